"""Scores of a text from a server's `echo` with `logprobs`, and servers that report them in another way."""

import pytest

from dsv4cli.engine.evaluation.items import EvalItem
from dsv4cli.engine.evaluation.remote_items import TextScore, remote_item
from dsv4cli.errors import ServerError, UsageError

PROMPT = "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜></think>"
ROWS = {
    "tokens": [PROMPT, "4", "2", ".", "!"],
    "token_logprobs": [None, -0.5, -2.0, -0.25, -1.0],
    "top_logprobs": [None, {"4": -0.5}, {"2": -2.0, "3": -0.25}, {".": -0.25}, {"!": -1.0}],
    "text_offset": [0, len(PROMPT), len(PROMPT) + 1, len(PROMPT) + 2, len(PROMPT) + 3],
}


class Client:
    """A server with one response."""

    url = "http://server"

    def __init__(self, rows):
        self.rows, self.body = rows, None

    def post(self, path, body, patient):
        assert (path, patient) == ("/v1/completions", True)
        self.body = body
        return {"choices": [{"text": "", "logprobs": self.rows}]}


class Conversation:
    model = "m"


def item(**more):
    values = {"id": "i", "messages": [{"role": "user", "content": "q"}], "score": "continuation", "answer": "42."}
    return EvalItem(**values | more)


def posed(**more):
    return remote_item(3, item(**more), Conversation(), None, by_answer=False)


def test_a_text_is_scored_behind_its_prompt():
    one, client = posed(), Client(ROWS)
    found = [task(client) for task in one.tasks]
    assert found == [TextScore(["4", "2", "."], [-0.5, -2.0, -0.25], [True, False, True], 1)]
    assert client.body["prompt"] == f"{PROMPT}42."
    outcome = one.outcome(found)
    assert (outcome.index, outcome.ruling, outcome.given, outcome.common_prefix) == (3, "correct", "4", 1)
    assert (outcome.nll, outcome.prompt_tokens, outcome.tokens) == (2.75 / 3, 1, 3)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        {},
        ROWS | {"token_logprobs": [None] * 5},
        ROWS | {"tokens": ["4"]},
        ROWS | {"top_logprobs": None},
        ROWS | {"text_offset": [0, len(PROMPT) - 1, len(PROMPT) + 1, len(PROMPT) + 2, len(PROMPT) + 3]},
    ],
)
def test_a_server_that_does_not_score_prompts(rows):
    [task] = posed().tasks
    with pytest.raises(ServerError, match="does not score the tokens of a prompt") as caught:
        task(Client(rows))
    assert "--choices answer" in caught.value.remedy


def test_items_that_a_server_cannot_score():
    with pytest.raises(UsageError, match="given as tokens"):
        posed(tokens=(b"4",))
    with pytest.raises(UsageError, match="does not allow thinking"):
        posed(think=True)
