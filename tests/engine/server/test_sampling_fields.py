"""The sampling fields mean the same on every path that generates text."""

import pytest

from tests.support.slow import slow_except

SUM = "What is 17 + 25?"
MESSAGES = [{"role": "user", "content": SUM}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/completions": {"prompt": "17 + 25 =", "max_tokens": 8},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": SUM, "max_output_tokens": 8},
}


def answer(nano, path: str, **fields) -> str:
    status, document = nano.post(path, BODIES[path] | {"seed": 7} | fields)
    assert status == 200, document
    match path:
        case "/v1/chat/completions":
            return document["choices"][0]["message"]["content"]
        case "/v1/completions":
            return document["choices"][0]["text"]
        case "/v1/messages":
            return document["content"][0]["text"]
    return document["output"][0]["content"][0]["text"]


@pytest.mark.parametrize("path", BODIES)
def test_a_filter_and_a_penalty_are_obeyed(nano, path):
    greedy = answer(nano, path, temperature=0)
    assert answer(nano, path, temperature=20, top_k=1) == greedy
    assert answer(nano, path, temperature=0, repetition_penalty=100) != greedy


# all paths read these fields with one function
@pytest.mark.parametrize("path", slow_except(["/v1/completions"], BODIES))
def test_the_other_fields_are_obeyed(nano, path):
    greedy = answer(nano, path, temperature=0)
    assert answer(nano, path, temperature=20, min_p=1) == greedy
    penalties = {"frequency_penalty": 2, "presence_penalty": 2, "repetition_penalty": 0.01}
    assert answer(nano, path, temperature=0, **penalties) != greedy


def test_a_repetition_penalty_changes_what_follows_an_echo(nano):
    """The likeliest token is not taken from the scores of the prompt, which have no penalties."""
    body = {"prompt": "The capital of Italy is", "max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0}
    texts = [
        nano.post("/v1/completions", body | fields)[1]["choices"][0]["text"]
        for fields in ({}, {"repetition_penalty": 0.01})
    ]
    assert texts[0] != texts[1]
