"""A conversation in one cache: what a turn prefills, that it answers as a fresh run would, and that nothing leaks."""

import sys
from array import array
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from dsv4cli.engine.chat import conversation
from dsv4cli.engine.chat.answers import generate_answers
from dsv4cli.engine.chat.conversation import ContextFull, Conversation
from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.state.prefix_cache import shared
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.tokens import THINK_END, USER
from dsv4cli.engine.weights.load import load_model
from dsv4cli.errors import NotEnoughMemory, UnsoundResult
from tests.support.shared_models import shared_model
from tests.support.slow import slow, slow_rows
from tests.support.small_model import model

SEEDED = Sampling(seed=3)
SYSTEM = {"role": "system", "content": "Be brief. " * 10}


@cache
def dialogue(think="off"):
    return open_dialogue(resolve_model("random:tiny,layers=4"), think)


def nano():
    return shared_model("nano")


END = dialogue().tokenizer.token_id(THINK_END)


def user(text):
    return {"role": "user", "content": text}


def said(text, reasoning=""):
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


def _limits(think, given):
    """Two tokens, and one more to end a thinking with."""
    return Limits(**{"max_tokens": 2 + (think != "off"), **given})


def new_conversation(think="off", **limits):
    return Conversation(model(), dialogue(think), _limits(think, limits), "cpu")


def drain(found):
    """The answer of a reply and its pieces."""
    items = list(found)
    return items[-1][0], [piece for _, added in items for piece in added]


def drawn(answer):
    """Its tokens, up to where the engine ended the thinking."""
    ids = [step.id for step in answer.tokens]
    return ids[: ids.index(END)] if answer.closed else ids


def fresh(messages, sampling=SEEDED, think="off", **limits):
    """What a run of its own draws; of an answer that only thinks, what comes before the engine ends that."""
    ids = _fresh(tuple(dialogue(think).prompt(messages).ids), sampling, think, tuple(limits.items()))
    return ids if think == "off" else ids[:1]


@cache
def _fresh(ids, sampling, think, limits):
    limits = _limits(think, dict(limits))
    found = generate_answers(model(), dialogue(think), [Request(list(ids), sampling, limits)], "cpu")
    return drawn(drain((answer, pieces) for _, answer, pieces in found)[0])


def held(one):
    """Slots that are taken and blocks that are held; of a decoder's slot and block nothing."""
    cache, decodes = one.engine.runner.cache, one.engine.runner.graphs is not None
    return cache.slots - cache.free_slots - decodes, cache.used_blocks - decodes


def ask(one, messages, sampling=SEEDED, **options):
    """Answers as a fresh run would; how many tokens were prefilled."""
    answer, _ = drain(one.reply(messages, sampling, **options))
    assert one.prefilled + one.reused == one.prompt_tokens == one.tokens(messages)
    assert answer.finish in ("stop", "length")
    return answer, one.prefilled


@pytest.fixture
def decoder(monkeypatch):
    """Steps of single tokens are made as on a GPU, but for the graphs."""
    monkeypatch.setattr(runner, "captures", lambda device: True)


def test_the_last_of_several_questions_that_were_read_at_once_is_replaced():
    """As where a session is taken up again and its last question put in other words."""
    one, before = new_conversation(), [user("One? " * 5), said("Two.")]
    ask(one, [*before, user("What is it? " * 9)])
    ask(one, [*before, user("Why?")])
    ids = dialogue().prompt([*before, user("Why?")]).ids
    assert one.reused == len(ids) - 1 - ids[::-1].index(dialogue().tokenizer.token_id(USER)) > 20


def test_states_are_stored_before_the_last_two_questions_and_at_the_end():
    ids = dialogue().prompt([user("One?"), said("1."), user("Two?"), said("2."), user("Three?")]).ids
    questions = [place for place, token in enumerate(ids) if token == dialogue().tokenizer.token_id(USER)]
    assert len(questions) == 3
    assert dialogue().boundaries(ids) == (*questions[1:], len(ids))


# the first block ends within the question
LONG = [SYSTEM, user("What is it? " * 4)]


def size(*messages, think="off"):
    return len(dialogue(think).transcript(list(messages)).ids)


def test_turns_prefill_only_what_is_new(decoder):
    with new_conversation() as one:
        messages = list(LONG)
        _, prefilled = ask(one, messages)
        assert prefilled == size(*messages)
        for text in ("and then?", "why?" * 9):
            before = size(*messages)
            messages += [said("It is."), user(text)]
            answer, prefilled = ask(one, messages)
            assert prefilled == size(*messages) - before
            assert drawn(answer) == fresh(messages)
        assert held(one)[0] == 0 < held(one)[1]
    assert held(one) == (0, 0)


@pytest.mark.gpu
def test_a_conversation_on_a_gpu(monkeypatch):
    source = resolve_model("nano")
    model = load_model(source, Numerics.reference(), device="cuda")
    greedy = Sampling(temperature=0)
    with Conversation(model, open_dialogue(source, "off"), Limits(max_tokens=32), "cuda") as one:
        messages = []
        for text, answer in (("What is 17 + 25?", "17 + 25 = 42."), ("Now subtract 4.", "42 - 4 = 38.")):
            messages.append(user(text))
            message, mended = drain(one.reply(messages, greedy))[0].message()
            messages.append(message)
            assert (message["content"], mended) == (answer, [])
        assert one.reused > 20
        long = user(f"{'The quick brown fox has 12 apples. ' * 80} What is it?")

        def interrupted(*_):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Runner, "_advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                drain(one.reply([*messages, long], greedy))
        messages[2] = user("And of Spain?")
        messages[:2] = user("What is the capital of Italy?"), said("The capital of Italy is Rome.")
        assert "Madrid" in drain(one.reply(messages[:3], greedy))[0].message()[0]["content"]
    assert held(one) == (0, 0)


@pytest.mark.slow
def test_the_answer_itself_is_not_prefilled_where_its_text_has_the_same_tokens():
    # nano's answers are words: what it draws is how they are encoded
    source = resolve_model("nano")
    nano_dialogue = open_dialogue(source, "off")
    limits = Limits(max_tokens=16)
    with Conversation(nano(), nano_dialogue, limits, "cpu") as one:
        messages = [user("What is 17 + 25?")]
        answer, _ = drain(one.reply(messages, Sampling(temperature=0)))
        message, mended = answer.message()
        assert (answer.finish, mended) == ("stop", [])
        before = one.prompt_tokens + len(answer.tokens) - 1  # the end token was not run
        messages += [message, user("What is the capital of Italy?")]
        ids = nano_dialogue.prompt(messages).ids
        again, prefilled = ask(one, messages, Sampling(temperature=0))
        assert prefilled == len(ids) - before
        expected = generate_answers(nano(), nano_dialogue, [Request(ids, Sampling(temperature=0), limits)], "cpu")
        alone = drain((answer, pieces) for _, answer, pieces in expected)[0]
        assert drawn(again) == drawn(alone)
        assert "Rome" in again.message()[0]["content"]


@pytest.mark.parametrize("think", ["off", *slow("high")])
def test_retry_undo_and_edit(think):
    with new_conversation(think) as one:
        first = list(LONG)
        second = [*first, said("No.", "hm" * 9), user("Sure? " * 8)]
        third = [*second, said("Yes."), user("Really?")]
        for messages in (first, second, third):
            ask(one, messages)
        marks = len(one.engine.runner.prefixes.states)
        assert [ask(one, third, Sampling(seed=seed))[1] for seed in (8, 9)] == [1, 1]  # the last token gives the logits
        assert len(one.engine.runner.prefixes.states) == marks
        # /edit: everything before the last question is held, its mark too
        edited = [*third[:-1], user("Rather not?")]
        answer, prefilled = ask(one, edited)
        assert prefilled <= size(*edited, think=think) - size(*third[:-1], think=think) + 1
        assert drawn(answer) == fresh(edited, think=think)
        # /undo: back to the second question
        answer, prefilled = ask(one, second)
        assert prefilled == 1
        assert drawn(answer) == fresh(second, think=think)
        # /undo twice and another question
        other = [*first, said("Other.", "hm"), user("New")]
        answer, prefilled = ask(one, other)
        assert prefilled <= size(*other, think=think) - size(*first, think=think) + (think != "off")
        assert drawn(answer) == fresh(other, think=think)
        # /clear: the system message stays
        clear = [SYSTEM, user("Hi")]
        answer, prefilled = ask(one, clear)
        assert prefilled == size(*clear, think=think) - size(SYSTEM, think=think)
        assert drawn(answer) == fresh(clear, think=think)
    assert held(one) == (0, 0)


def test_dropped_reasoning_is_prefilled_from_the_answer_on():
    with new_conversation("high") as one:
        answer, _ = ask(one, LONG)
        message, _ = answer.message()
        assert message["reasoning_content"]
        more = [*LONG, message, user("and?")]
        answer, prefilled = ask(one, more)
        # all but <think>, which is </think> now
        assert prefilled == size(*more, think="high") - size(*LONG, think="high") + 1
        assert drawn(answer) == fresh(more, think="high")
        # another effort is another prompt from its first message on; off changes the last token only
        one.dialogue = dialogue("max")
        ask(one, more)
        assert one.reused < 10
        one.dialogue = replace(dialogue("max"), thinking=False, effort=None)
        ask(one, more)
        assert ask(one, more)[1] == 1


@pytest.mark.parametrize("kept", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_the_number_of_snapshots_is_bounded_and_the_ends_stay(monkeypatch, kept):
    monkeypatch.setattr(conversation, "SNAPSHOTS", kept)
    with new_conversation(max_tokens=1) as one:
        messages = list(LONG)
        for number in range(3):
            ask(one, messages)
            assert len(one.engine.runner.prefixes.states) <= kept
            messages += [said("ok"), user(f"{number}")]
        lengths = [state.length for state in one.engine.runner.prefixes.states]
        assert (lengths[0], lengths[-1]) == (size(SYSTEM), size(*messages[:-2]))
        assert ask(one, [SYSTEM, user("?")])[1] < 10
        one.forget()
        assert held(one) == (0, 0)
        assert ask(one, messages)[1] == size(*messages)


@pytest.mark.slow  # test_retry_undo_and_edit has every kind of turn
@pytest.mark.parametrize("turns", [3, 60])
def test_random_turns_answer_as_a_fresh_run(decoder, turns):
    rng = Random(1)
    with new_conversation(prefill_chunk=60) as one:
        messages = [SYSTEM, user("a")]
        for _ in range(turns):
            step = rng.random()
            if step < 0.25 and len(messages) > 3:
                messages = messages[: 2 * rng.randrange(1, len(messages) // 2)]
            elif step < 0.4:
                messages[rng.randrange(1, len(messages)) // 2 * 2 - 1] = user("x" * rng.randrange(20))
            elif step < 0.9:
                messages += [said("y" * rng.randrange(60)), user("z" * rng.randrange(150))]
            sampling = Sampling(seed=rng.randrange(100))
            answer, _ = ask(one, messages, sampling)
            assert drawn(answer) == fresh(messages, sampling, prefill_chunk=60)
    assert held(one) == (0, 0)


def test_a_reply_can_be_closed_after_every_item(decoder):
    expected = fresh(LONG, max_tokens=2)
    second = [*LONG, said("Yes."), user("So?")]
    after = fresh(second, max_tokens=2)
    with new_conversation(prefill_chunk=100, max_tokens=2) as one:
        # in the first block, before the question, and after the first token
        for items in (2, 3, 5):
            one.forget()
            found = one.reply(LONG, SEEDED)
            answer = [next(found)[0] for _ in range(items)][-1]
            found.close()
            assert drawn(answer) == expected[: len(answer.tokens)]
            before = one.prefilled
            assert drawn(ask(one, second)[0]) == after
            assert one.reused + 1 >= min(before, size(*LONG))  # prefilled steps are not lost
    assert held(one) == (0, 0)


def test_stop_ends_before_the_next_step_and_keeps_the_text():
    whole = "".join(text for _, text in drain(new_conversation().reply(LONG, SEEDED))[1])
    one = new_conversation(prefill_chunk=100)
    for number in range(12):
        items = []
        for item in one.reply(LONG, SEEDED):
            items.append(item)
            if len(items) > number:
                one.stop()
        answer, pieces = items[-1][0], [piece for _, added in items for piece in added]
        text = "".join(text for _, text in pieces)
        if answer.finish:
            break
        assert answer.record()["content"] == text
        assert answer.message() == (said(text) | {"tool_calls": []}, [])
        assert whole.startswith(text.rstrip("\ufffd"))
    assert number == 1 + 1 + 1  # of the prompt one step is left, and the last token ends the answer by itself
    one.forget()
    one.forget()
    assert held(one) == (0, 0)


def test_only_the_reading_of_a_prompt_is_breakable_and_no_fetching_of_experts(monkeypatch):
    with new_conversation() as one:
        found = one.reply(LONG, SEEDED)
        next(found)
        assert one.breakable
        monkeypatch.setattr(conversation, "offload_of", lambda _: object())
        assert not one.breakable
        monkeypatch.undo()
        drain(found)
        assert (one.unread, one.breakable) == (0, False)


def test_a_new_reply_ends_the_one_before():
    with new_conversation() as one:
        first = one.reply(LONG, SEEDED)
        next(first)
        assert drawn(ask(one, LONG)[0]) == fresh(LONG)
        assert list(first) == []


FILES = tuple(
    f"{name}.py"
    for name in (
        "cache",
        "state",
        "engine",
        "runner",
        "scheduler",
        "prefix_cache",
        "ring_copies",
        "conversation",
        "graphs",
        "prepare",
    )
)


class Interruption:
    """Raises KeyboardInterrupt where the engine runs its n-th line; `lines` counts them."""

    def __init__(self, line):
        self.line, self.lines = line, 0

    def __call__(self, frame, event, _):
        if frame.f_code.co_filename.rpartition("/")[2] not in FILES:
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.line:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def watch(self, one, messages):
        found = one.reply(messages, SEEDED)
        sys.settrace(self)
        try:
            for _ in found:
                pass
        finally:
            sys.settrace(None)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Cache, "take_block"),
        *slow_rows((Runner, "_advance")),
        *slow_rows((Cache, "_release"), (Cache, "reserve"), (Cache, "snapshot")),
    ],
)
def test_an_interrupt_between_two_calls_leaves_the_cache_whole(monkeypatch, owner, name):
    with new_conversation(max_tokens=2) as one:
        ask(one, LONG)
        second = [*LONG, said("No."), user("Sure? " * 25)]
        work = getattr(owner, name)

        def interrupted(*given):
            work(*given)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                drain(one.reply(second, SEEDED))
        answer, prefilled = ask(one, second)
        assert drawn(answer) == fresh(second, max_tokens=2)
        assert prefilled <= size(*second) - size(*LONG) + 1
    assert held(one) == (0, 0)


@pytest.mark.parametrize("times", [1, pytest.param(100, marks=pytest.mark.slow)])
def test_an_interrupt_at_any_line_leaves_the_cache_whole(decoder, times):
    second = [*LONG, said("No."), user("Sure? " * 25)]
    expected = fresh(second, max_tokens=2)
    with new_conversation(max_tokens=2, prefill_chunk=100) as one:
        ask(one, LONG)
        counted = Interruption(0)
        counted.watch(one, second)
        rng = Random(2)
        for line in rng.sample(range(1, counted.lines), times):
            one.forget()
            ask(one, LONG)
            with pytest.raises(KeyboardInterrupt):
                Interruption(line).watch(one, second)
            answer, prefilled = ask(one, second)
            assert drawn(answer) == expected
            assert prefilled <= size(*second) - size(*LONG)
    assert held(one) == (0, 0)


@pytest.mark.parametrize("wrong", [*slow(NotEnoughMemory("no room", "wait")), UnsoundResult("nan")])
def test_a_failure_in_the_model_is_passed_on_and_forgotten(monkeypatch, wrong):
    with new_conversation(prefill_chunk=50) as one:
        ask(one, LONG)
        second = [*LONG, said("No."), user("Sure? " * 25)]

        def fails(*_):
            raise wrong

        with monkeypatch.context() as patch:
            patch.setattr(runner, "make_batch", fails)
            with pytest.raises(type(wrong)) as caught:
                drain(one.reply(second, SEEDED))
        if isinstance(wrong, NotEnoughMemory):
            assert caught.value.remedy == "remove earlier messages, or wait"
            assert held(one) == (0, 0)
        assert drawn(ask(one, second)[0]) == fresh(second)
    assert held(one) == (0, 0)


@pytest.mark.parametrize(
    ("budget", "most", "index", "closed"),
    [(0, 8, 0, "budget"), *slow_rows((None, 2, 0, "limit")), *slow_rows((3, 12, 3, "budget"), (None, 8, 5, "limit"))],
)
def test_thinking_is_ended_in_time_and_answered(budget, most, index, closed):
    with new_conversation("high", max_tokens=most) as one:
        answer, pieces = drain(one.reply(LONG, SEEDED, think_budget=budget))
        ids = [step.id for step in answer.tokens]
        assert ids.index(END) == index
        assert answer.closed == closed
        assert len(answer.tokens) > index + 1
        assert ids[index + 1] not in one.model.config.eos_token_ids
        assert [kind for kind, _ in pieces].count("content") > 0
        assert all(step.logprob < 0 for step in answer.tokens)


@pytest.mark.parametrize("asked", [{"task": "title"}, *slow({"task": "action"}, {})], ids=str)
def test_what_does_not_begin_with_thinking_is_the_answer(asked):
    """As that to a task, or one that goes on."""
    messages = [user("hi") | asked, *([] if asked else [said("a") | {"wo_eos": True}])]
    with new_conversation("high", max_tokens=3) as one:
        answer, pieces = drain(one.reply(messages, SEEDED))
    assert {kind for kind, _ in pieces} == {"content"}
    assert answer.record()["reasoning_content"] == ""
    prompt = dialogue("high").prompt(messages).ids
    found = generate_answers(model(), dialogue("high"), [Request(prompt, SEEDED, Limits(max_tokens=3))], "cpu")
    answer, pieces = drain((answer, pieces) for _, answer, pieces in found)
    assert {kind for kind, _ in pieces} == {"content"}


def test_an_answer_that_would_end_inside_its_thinking_goes_on(monkeypatch):
    eos, letter = 1, dialogue().tokenizer.encode("a")[0]
    draws = []

    def sample(logits, draws_of_rows):
        allowed = bool(logits[0, eos] > -1e29)
        draws.append(allowed)
        return logits.argmax(-1) * 0 + (eos if allowed and len(draws) > 2 else letter)

    monkeypatch.setattr("dsv4cli.engine.runtime.leader_step.sample", sample)
    with new_conversation("high", max_tokens=40) as one:
        answer, _ = drain(one.reply(LONG, SEEDED))
    assert [step.id for step in answer.tokens] == [letter, letter, END, letter, eos]
    assert (answer.closed, answer.finish) == ("end", "stop")
    assert answer.message() == (said("a", "aa") | {"tool_calls": []}, [])


def test_thinking_that_ends_by_itself_is_left_alone():
    thinking = Thinking(True, 100, 10, END, (1,))
    for token in (5, END, 6):
        assert (thinking.forced(), thinking.banned(), thinking.instead(token)) == (None, (), None)
        thinking.push(token)
    assert (thinking.instead(1), thinking.inside, thinking.closed) == (None, False, "")


def test_a_full_context_says_what_to_leave_out():
    one = new_conversation(max_context=300)
    turns = [message for number in range(8) for message in (user(f"{number}" * 30), said("x" * 20))]
    messages = [SYSTEM, *turns, user("last")]
    assert one.context == 300
    with pytest.raises(ContextFull) as caught:
        one.reply(messages, SEEDED)
    error = caught.value
    assert (error.tokens, error.context) == (one.tokens(messages), 300)
    assert error.messages_to_drop == one.messages_to_drop(messages) > 0
    assert f"remove the first {error.messages_to_drop} messages" in error.remedy
    rest = [SYSTEM, *messages[1 + error.messages_to_drop :]]
    assert rest[1]["role"] == "user"
    assert one.messages_to_drop(rest) == 0
    assert one.tokens(rest) <= 300 * 3 / 4 < one.tokens([SYSTEM, *messages[error.messages_to_drop - 1 :]])
    assert drain(one.reply(rest, SEEDED))[0].finish
    assert one.messages_to_drop([SYSTEM, user("x" * 400)]) == -1
    with pytest.raises(ContextFull, match="the context limit is 300 tokens") as caught:
        one.reply([user("x" * 400)], SEEDED)
    assert caught.value.remedy == "shorten the last message, or raise --max-context"
    assert ContextFull(9, 8, -1, longest=8).remedy == "shorten the last message"


def test_a_nearly_full_context_keeps_room_for_an_answer():
    one = new_conversation(max_context=425, max_tokens=12)
    turns = [message for number in range(7) for message in (user(f"{number}" * 20), said("x" * 20))]
    messages = [SYSTEM, *turns, user("last")]
    assert 425 - 12 < one.tokens(messages) < 425 - 2
    assert one.messages_to_drop(messages) > 0
    answer, _ = drain(one.reply([SYSTEM, *messages[1 + one.messages_to_drop(messages) :]], SEEDED))
    assert answer.finish == "stop" or len(answer.tokens) == 12
    one.limits = replace(one.limits, max_tokens=2)  # an answer that may have two tokens needs no more room
    assert one.messages_to_drop(messages) == 0
    one.limits = replace(one.limits, max_tokens=4000)
    long = user("x" * 310)  # leaves less than an eighth of the context, but some: it is asked alone
    assert 425 - 425 // 8 < one.tokens([SYSTEM, long]) < 425
    assert one.messages_to_drop([*messages[:-1], long]) == len(turns)
    assert one.messages_to_drop([SYSTEM, long]) == 0


@pytest.mark.parametrize(("first", "second", "most", "expected"), [("", "a", 0, 0), ("abc", "abd", 3, 2)])
def test_shared(first, second, most, expected):
    one, other = (bytearray(array("i", map(ord, text))) for text in (first, second))
    assert shared(one, other, most) == expected
    assert shared(one * 5, one * 5, 5 * len(first)) == 5 * len(first)
