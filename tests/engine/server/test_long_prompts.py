"""Prompts that are much too long: refused before they are encoded, or as soon as enough of them is counted."""

import threading

import pytest

from dsv4cli.engine.server import incoming
from dsv4cli.engine.server.refusals import Refusal
from dsv4cli.engine.server.service import MOST_READING
from dsv4cli.engine.text import tokenizer
from tests.support.serving import asking, comes

TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
# a body with a text in every place that is encoded
PLACES = {
    "chat": ("/v1/chat/completions", lambda text: asking(text)),
    "system": ("/v1/chat/completions", lambda text: {"messages": [{"role": "system", "content": text}]}),
    "parts": ("/v1/chat/completions", lambda text: asking([{"type": "text", "text": text[:9999]}] * 16)),
    "turns": ("/v1/chat/completions", lambda text: {"messages": [{"role": "user", "content": text[:999]}] * 160}),
    "tools": ("/v1/chat/completions", lambda text: asking("", tools=[TOOL] * (len(text) // 64))),
    "schema": (
        "/v1/chat/completions",
        lambda text: asking("", response_format={"type": "json_schema", "json_schema": {"schema": {"title": text}}}),
    ),
    "messages": ("/v1/messages", lambda text: asking(text, max_tokens=1)),
    "count": ("/v1/messages/count_tokens", lambda text: asking(text)),
    "completions": ("/v1/completions", lambda text: {"prompt": text}),
    "prompts": ("/v1/completions", lambda text: {"prompt": ["a", text]}),
    "tokenize": ("/tokenize", lambda text: {"prompt": text}),
    "tokenize messages": ("/tokenize", lambda text: asking(text)),
}


def refused(nano, path, body, tokens, counted=True):
    """In the words of the API, by which agents recognize a prompt that is too long."""
    status, document = nano.post(path, body)
    assert status == 400, document
    error = document["error"]
    if path.startswith("/v1/messages"):
        rest = "" if counted else " (at least; the rest was not counted)"
        assert document["type"] == "error"
        assert error["type"] == "invalid_request_error"
        assert error["message"] == f"prompt is too long: {tokens + (not counted)} tokens > 8191 maximum{rest}"
    else:
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == (
            "This model's maximum context length is 8192 tokens. However, your messages resulted in "
            f"{'' if counted else 'more than '}{tokens} tokens. Please reduce the length of the messages."
        )


@pytest.mark.parametrize("place", PLACES)
def test_a_prompt_is_counted_up_to_a_bound(nano, monkeypatch, place):
    path, body = PLACES[place]
    seen, encoded = [], tokenizer._encoded
    monkeypatch.setattr(tokenizer, "_encoded", lambda backend, text: seen.append(text) or encoded(backend, text))
    refused(nano, path, body("a " * 80_000), 16_384, counted=False)
    assert sum(map(len, seen)) < 70_000


@pytest.mark.parametrize("place", sorted({*PLACES} - {"parts", "turns", "tools", "prompts"}))
def test_a_prompt_that_cannot_fit_is_not_encoded(nano, monkeypatch, place):
    path, body = PLACES[place]
    monkeypatch.setattr(tokenizer, "_encoded", lambda *_: [])
    refused(nano, path, body("a " * 300_000), 16_384, counted=False)


@pytest.mark.parametrize("place", PLACES)
def test_a_body_that_cannot_fit_is_not_read_as_json(nano, monkeypatch, place):
    path, body = PLACES[place]
    monkeypatch.setattr(incoming, "BESIDE_PROMPTS", -incoming.MOST_BODY)
    monkeypatch.setattr(incoming, "_object", lambda _: 1 / 0)
    refused(nano, path, body("a " * 1000), 8192, counted=False)


def test_a_prompt_that_is_somewhat_too_long_is_refused_with_its_length(nano):
    refused(nano, "/v1/completions", {"prompt": "a " * 8200}, 8201)
    assert nano.post("/tokenize", {"prompt": "a " * 8200})[1]["count"] == 8201
    said = asking("a " * 9000, max_tokens=1)
    count = nano.post("/v1/messages/count_tokens", said)[1]["input_tokens"]
    refused(nano, "/v1/messages", said, count)


@pytest.mark.parametrize(
    ("body", "fits"),
    [
        (b'{"a": [1, 2, 3, 4]}', True),
        (b'{"a": [1, 2, 3, 4, 5, 6]}', False),
        (b'{"a": "' + b'[,\\\\\\"{' * 20 + b'", "b": "]]]{{{[[[,,,,,,,,,,"}', True),
        (b'{"a": [[], [], [[]]]}', False),
        (b'{"a": [{}, {}, [{}]]}', False),
        (b'{"a": ",,,,,,,,,,,,,,,,,,', True),  # no JSON, as the parser says
        (b'{"a\\', True),
    ],
)
def test_documents_have_so_many_values(monkeypatch, body, fits):
    monkeypatch.setattr(incoming, "MOST_VALUES", 4)
    monkeypatch.setattr(incoming, "MOST_CONTAINERS", 4)
    if fits:
        incoming._check_values(bytearray(body))
    else:
        with pytest.raises(Refusal, match="the body has more than 4 values, or 4 objects and lists") as error:
            incoming._check_values(bytearray(body))
        assert error.value.status == 413


def test_so_many_long_bodies_are_read_at_once_and_short_ones_beside_them(nano, monkeypatch):
    inside, most, may_end, read = [], [], threading.Event(), incoming._object

    def slowly(content):
        if len(content) < 1000:
            return read(content)
        inside.append(1)
        most.append(len(inside))
        may_end.wait(60)
        inside.pop()
        return read(content)

    monkeypatch.setattr(incoming, "LARGE_BODY", 100)
    monkeypatch.setattr(incoming, "LONG_BODY", 1000)
    monkeypatch.setattr(incoming, "_object", slowly)
    answers = []
    long = [
        threading.Thread(target=lambda: answers.append(nano.post("/tokenize", {"prompt": "a " * 1000})[0]))
        for _ in range(MOST_READING + 2)
    ]
    for thread in long:
        thread.start()
    assert comes(lambda: len(inside) == MOST_READING)
    assert comes(lambda: len(nano.server.server_state.connections) >= len(long))
    assert nano.post("/tokenize", {"prompt": "a " * 100})[0] == 200
    assert nano.get("/health")[0] == 200
    may_end.set()
    for thread in long:
        thread.join(60)
    assert answers == [200] * len(long)
    assert max(most) == MOST_READING
