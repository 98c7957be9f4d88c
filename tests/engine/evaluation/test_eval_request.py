"""Items of every kind through one engine: as each would be answered or scored alone."""

import math
from dataclasses import replace

import pytest
import torch

from dsv4cli.engine.chat.answers import generate_answers
from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.evaluation.eval_request import build_request, carry_out
from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.score import score
from dsv4cli.engine.settings import AUTO_DRAFTING, NO_DRAFTS, Limits, Sampling
from dsv4cli.engine.text.inputs import from_prompt
from dsv4cli.errors import UsageError
from tests.support.shared_models import shared_model
from tests.support.slow import slow

CPU = torch.device("cpu")
LIMITS = Limits(max_tokens=60)
GREEDY = Sampling(0.0)


@pytest.fixture(scope="module")
def nano():
    return shared_model("nano"), open_dialogue(resolve_model("nano"), "off")


def item(id_, prompt, score_, answer="", **more):
    return EvalItem(id_, from_prompt(prompt, None), score_, answer, **more)


CAPITALS = tuple(f"The capital of Sweden is {city}." for city in ("Accra", "Stockholm", "Madrid"))
ITEMS = [
    item("sum", "What is 17 + 25?", "exact", "17 + 25 = 42."),
    item("continued", "What is the capital of France?", "continuation", "The capital of France is Rome."),
    item("wrong", "What is 17 + 25?", "numeric", "43"),
    item("choice", "What is the capital of Sweden?", "choice", CAPITALS[1], choices=CAPITALS),
    item("mischosen", "What is the capital of Sweden?", "choice", CAPITALS[2], choices=CAPITALS),
    item("thought", "What is the capital of Italy?", "exact", "The capital of Italy is Rome.", think=True),
    item("open", "What is 17 + 25?", None),
]


def asked(nano, items, drafting=NO_DRAFTS, limits=LIMITS, by_answer=False):
    model, dialogue = nano
    posed = [build_request(number, one, dialogue, GREEDY, limits, by_answer) for number, one in enumerate(items)]
    noted = []
    found = carry_out(
        model, posed, CPU, on_token=lambda token, later: noted.append((token, later)), on_preparing=lambda on: None,
        drafting=drafting, on_end=lambda engine: noted.append(engine.busy),
    )  # fmt: skip
    outcomes = {one.id: one for one in found}
    assert noted.pop() is False
    assert len(noted) == sum(one.tokens for one in outcomes.values() if one.content is not None)
    return outcomes


@pytest.mark.parametrize(
    "drafting", [pytest.param(NO_DRAFTS, marks=pytest.mark.slow), AUTO_DRAFTING], ids=["plain", "drafts"]
)
def test_each_item_comes_to_what_it_comes_to_alone(nano, drafting):
    model, dialogue = nano
    found = asked(nano, ITEMS, drafting)
    rulings = {id_: one.ruling for id_, one in found.items()}
    assert rulings == {
        "sum": "correct", "continued": "correct", "wrong": "wrong", "choice": "correct", "mischosen": "wrong",
        "thought": "correct", "open": "unjudged",
    }  # fmt: skip
    assert (found["sum"].content, found["wrong"].given, found["choice"].given) == ("17 + 25 = 42.", "42", CAPITALS[1])
    assert found["thought"].reasoning_content == "I know this."
    assert found["sum"].reasoning_content == ""

    prompt = dialogue.prompt(ITEMS[1].messages).ids
    text = dialogue.text_ids(ITEMS[1].answer)
    [alone] = score(model, [prompt + text], Limits(logprobs=1), CPU)
    continued = found["continued"]
    assert (continued.prompt_tokens, continued.tokens) == (len(prompt), len(text))
    assert math.isclose(continued.nll, -sum(alone.logprobs[len(prompt) :]) / len(text), rel_tol=1e-6)
    [(_, answer, _)] = [
        one for one in generate_answers(model, dialogue, [Request(prompt, GREEDY, LIMITS)], CPU) if one[1].finish
    ]
    same = [one.id == other for one, other in zip(answer.tokens, text, strict=False)]
    assert continued.common_prefix == same.index(False) == len(dialogue.text_ids("The capital of France is"))
    assert continued.given == "The capital of France is"

    best, *others = sorted(found["choice"].logprobs, reverse=True)
    assert best > max(others) + 1
    assert found["choice"].logprobs == found["mischosen"].logprobs
    assert math.isclose(found["choice"].nll, -best / len(dialogue.text_ids(CAPITALS[1])))
    assert found["mischosen"].nll > found["choice"].nll > 0


def test_choices_can_be_answered(nano):
    one = item("letter", "What is the capital of Sweden?", "choice", CAPITALS[1], choices=CAPITALS)
    [found] = asked(nano, [one], by_answer=True).values()
    assert (found.ruling, found.content, found.logprobs) == ("correct", CAPITALS[1], None)


@pytest.mark.parametrize(
    "messages",
    [
        [*from_prompt("What is the capital of Italy?", None),
         {"role": "assistant", "content": "The capital of Italy", "wo_eos": True}],
        *slow([{"role": "user", "content": "What is the capital of Italy?", "task": "query"}]),
    ],
)  # fmt: skip
def test_an_answer_without_a_thinking_block_is_content(nano, messages):
    """The prompt of a prefilled answer and of a task has no <think>, whatever --think says."""
    model, dialogue = nano
    thinking = replace(dialogue, thinking=True, effort="high")
    [found] = asked((model, thinking), [EvalItem("1", messages)], limits=Limits(max_tokens=8)).values()
    assert found.reasoning_content == ""
    assert found.content


def test_prompts_may_come_in_pieces(nano):
    whole, pieces = (
        asked(nano, [ITEMS[1], ITEMS[3]], limits=Limits(max_tokens=60, prefill_chunk=chunk)) for chunk in (4096, 5)
    )
    assert whole.keys() == pieces.keys() == {"continued", "choice"}
    for id_, one in whole.items():
        # the NLL of a near-certain token is exp(-gap) of logits below 32: one bf16 rounding of the gap, 2^-3 at most
        assert pieces[id_].nll == pytest.approx(one.nll, rel=2**-3)
        assert pieces[id_].common_prefix == one.common_prefix


def test_an_answer_without_an_end_is_cut(nano):
    [found] = asked(nano, [ITEMS[0]], limits=Limits(max_tokens=3)).values()
    assert (found.ruling, found.tokens, found.finish_reason) == ("cut", 3, "length")


def test_continuations_in_tokens_are_those_tokens(nano):
    _, dialogue = nano
    ids = [*dialogue.text_ids("The capital of France is Rome."), dialogue.tokenizer.eos_id]
    tokens = tuple(dialogue.tokenizer.token_bytes(id_) for id_ in ids)
    posed = build_request(0, item("v", "Hi", "continuation", tokens=tokens), dialogue, GREEDY, LIMITS, False)
    assert posed.requests[0].prompt == [*posed.prompt, *ids]
    for spelt in (b"no token", "Ġ".encode()):  # the second is how the vocabulary spells a space
        with pytest.raises(UsageError, match="the model has no token"):
            build_request(0, item("v", "Hi", "continuation", tokens=(spelt,)), dialogue, GREEDY, LIMITS, False)


def test_what_does_not_fit_is_refused(nano):
    _, dialogue = nano
    small = Limits(max_context=20)
    with pytest.raises(UsageError, match="the prompt has"):
        build_request(0, item("v", "Hi " * 50, "exact", "x"), dialogue, GREEDY, small, False)
    with pytest.raises(UsageError, match="the prompt plus the scored text has"):
        build_request(0, item("v", "Hi", "continuation", "x" * 50), dialogue, GREEDY, small, False)


def test_each_item_draws_with_its_own_seed(nano):
    _, dialogue = nano
    posed = [build_request(n, ITEMS[0], dialogue, Sampling(1.0, 1.0, 7), LIMITS, False) for n in range(3)]
    assert [one.requests[0].sampling.seed for one in posed] == [7, 8, 9]


def test_texts_are_scored_without_thinking(nano):
    _, dialogue = nano
    thinking = replace(dialogue, thinking=True, effort="high")
    for one in (ITEMS[1], ITEMS[3]):
        posed = build_request(0, one, thinking, GREEDY, LIMITS, False)
        assert posed.prompt == dialogue.prompt(one.messages).ids
        with pytest.raises(UsageError, match='"think" is true'):
            build_request(0, replace(one, think=True), dialogue, GREEDY, LIMITS, False)
    answered = build_request(0, ITEMS[3], thinking, GREEDY, LIMITS, True)
    assert answered.prompt == thinking.prompt(ITEMS[3].messages).ids
