"""Steps that give several tokens: a conversation is what it is with one token a step, wherever it is ended."""

from functools import cache

import pytest

from dsv4cli.engine.chat.conversation import Conversation
from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.text.tokens import THINK_END
from tests.support.drafts import ManyTokens
from tests.support.slow import slow_rows
from tests.support.small_model import model

SEEDED = Sampling(seed=3)
FIRST = [{"role": "user", "content": "What is it? " * 4}]
SECOND = [*FIRST, {"role": "assistant", "content": "It is."}, {"role": "user", "content": "why?"}]


@cache
def dialogue(think="off"):
    return open_dialogue(resolve_model("random:tiny,layers=4"), think)


END = dialogue().tokenizer.token_id(THINK_END)


def conversation(think="off", most=8):
    return Conversation(model(), dialogue(think), Limits(max_tokens=most), "cpu")


def turn(one, messages, **options):
    """The tokens of an answer, its text by kinds, how it ended, and what was read for it."""
    items = list(one.reply(messages, SEEDED, **options))
    answer, text = items[-1][0], [piece for _, pieces in items for piece in pieces]
    return [token.id for token in answer.tokens], text, answer.finish, answer.closed, one.prefilled, one.reused


@pytest.mark.parametrize(("think", "most"), [*slow_rows(("off", 7)), ("high", 3)])
def test_the_same_turns(monkeypatch, think, most):
    def turns():
        with conversation(think) as one:
            return [turn(one, FIRST, think_budget=3), turn(one, SECOND, think_budget=3)]

    expected = turns()
    made = ManyTokens(monkeypatch, most)
    assert turns() == expected
    assert [most] in made.steps
    assert expected[0][3] == ("" if think == "off" else "budget")


def test_a_stop_inside_a_step_keeps_what_was_shown(monkeypatch):
    with conversation() as one:
        ids, text, *_ = turn(one, FIRST)
        second = turn(one, SECOND)[0]
        ManyTokens(monkeypatch)
        for shown in (1, 3):  # the steps give 1, 3 and 3
            pieces = []
            for answer, added in one.reply(FIRST, SEEDED):
                pieces += added
                if len(answer.tokens) == shown:
                    one.stop()
            assert (answer.finish, [token.id for token in answer.tokens]) == (None, ids[:shown])
            said = "".join(piece for _, piece in pieces)
            assert answer.message()[0]["content"] == said
            assert "".join(piece for _, piece in text).startswith(said.rstrip("\ufffd"))
        assert turn(one, SECOND)[0] == second


@pytest.mark.slow  # test_a_reply_can_be_closed_after_every_item drops replies
def test_a_reply_that_is_dropped_inside_a_step_leaves_nothing(monkeypatch):
    with conversation() as one:
        turn(one, FIRST)
        second = turn(one, SECOND)[0]
    ManyTokens(monkeypatch)
    with conversation() as one:
        reply = one.reply(FIRST, SEEDED)
        while len(next(reply)[0].tokens) < 3:
            pass
        reply.close()
        assert not one.engine.busy
        assert turn(one, SECOND)[0] == second


def test_a_thinking_is_not_called_ended_before_its_end_is_shown(monkeypatch):
    ManyTokens(monkeypatch)
    with conversation("high") as one:
        for answer, _ in one.reply(FIRST, SEEDED, think_budget=3):  # one token, then two and the end
            assert bool(answer.closed) is (END in [token.id for token in answer.tokens])


def test_each_turn_counts_its_own_drafts(monkeypatch):
    ManyTokens(monkeypatch)
    with conversation(most=7) as one:
        assert one.drafts.steps == 0
        for messages in (FIRST, SECOND):
            turn(one, messages)
            report = one.drafts
            assert (report.steps, report.drafted, report.accepted, report.per_position) == (3, 4, 4, [2, 2])
        assert one.engine.draft_report().steps == 6


def test_a_conversation_without_drafts_counts_none():
    with conversation(most=1) as one:
        turn(one, FIRST)
        assert one.drafts is None


def test_drafts_are_asked_of_the_engine(monkeypatch):
    seen, init = [], Engine.__init__

    def made(self, model, capacity, device, followers=None, drafting=None):
        seen.append(drafting)
        init(self, model, capacity, device, followers)

    monkeypatch.setattr(Engine, "__init__", made)
    Conversation(model(), dialogue(), Limits(), "cpu", drafting=Drafting(3))
    assert seen == [Drafting(3)]
