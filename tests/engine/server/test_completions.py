"""POST /v1/completions over the wire, the contract of evaluation harnesses among it; and tokens of texts."""

import json

import pytest

from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.server.completion_choice import CompletionChoice
from dsv4cli.engine.server.plan import AnswerPlan
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.text.tokens import ASSISTANT, BOS, EOS, THINK_END, USER
from tests.support.program import Program, calls_block
from tests.support.slow import slow_rows

PROMPT = f"{BOS}{USER}What is 17 + 25?{ASSISTANT}{THINK_END}"
ANSWER = "17 + 25 = 42."


def completed(nano, **fields):
    status, document = nano.post("/v1/completions", {"temperature": 0, **fields})
    assert status == 200, document
    return document


def ids_of(nano, text):
    return nano.post("/tokenize", {"prompt": text})[1]["tokens"]


@pytest.fixture
def score(monkeypatch, capsys, tmp_path):
    """What `dsv4 run --score` says of token ids."""

    def run(*ids):
        (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"ids": one}) + "\n" for one in ids))
        done = Program(monkeypatch, capsys)("run", "--score", str(tmp_path / "texts.jsonl"), "--logprobs", "2")
        return [json.loads(line) for line in done.out.splitlines()]

    return run


def test_a_text_is_gone_on_with(nano):
    document = completed(nano, prompt=PROMPT, max_tokens=20)
    assert document["object"] == "text_completion"
    assert document["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    assert document["usage"]["prompt_tokens"] == len(ids_of(nano, PROMPT))


@pytest.mark.slow
def test_prompts_of_every_kind_are_told_apart_by_their_index(nano):
    ids = ids_of(nano, PROMPT)
    for prompt in (ids, [PROMPT, PROMPT], [ids, ids], PROMPT.removeprefix(BOS)):
        document = completed(nano, prompt=prompt, max_tokens=3, add_special_tokens=isinstance(prompt, str))
        assert [choice["text"] for choice in document["choices"]] == ["17 +"] * len(document["choices"])
        assert [choice["index"] for choice in document["choices"]] == [*range(len(document["choices"]))]
        assert {choice["finish_reason"] for choice in document["choices"]} == {"length"}


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"echo": True, "logprobs": 1}, {"logprobs": 2, "stop": "= 4"}])
def test_a_stream_joins_to_the_document(nano, fields):
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "stream_options": {"include_usage": True}, **fields}
    [choice] = completed(nano, **body)["choices"]
    *events, usage, done = nano.stream("/v1/completions", body)
    assert done == ("", "[DONE]")
    assert usage[1]["usage"]["completion_tokens"] > 5
    pieces = [data["choices"][0] for _, data in events]
    assert "".join(piece["text"] for piece in pieces) == choice["text"]
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    if choice["logprobs"]:
        for name, values in choice["logprobs"].items():
            assert [one for piece in pieces for one in piece["logprobs"][name]] == values


@pytest.mark.parametrize(("stop", "echo"), [*slow_rows(("17", False)), (" + 25 =", True)])
def test_log_probabilities_are_of_the_text_before_a_stop_text(nano, stop, echo):
    """Of a token that the text ends within, too: it is the last."""
    body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 1, "stop": stop, "echo": echo}
    choice = nano.post("/v1/completions", body)[1]["choices"][0]
    text, listed = choice["text"], choice["logprobs"]["tokens"]
    assert text == PROMPT * echo + ANSWER.partition(stop)[0]
    assert "".join(listed).startswith(text)
    assert len("".join(listed[:-1])) < len(text) or not listed
    pieces = [data["choices"][0] for _, data in nano.stream("/v1/completions", body)[:-1]]
    assert [token for piece in pieces for token in piece["logprobs"]["tokens"]] == listed
    assert ["".join(piece["text"] for piece in pieces), pieces[-1]["finish_reason"]] == [text, "stop"]


def test_what_was_held_of_each_prompt_is_counted(nano):
    prompts = [f"{PROMPT} {word}" for word in ("four", "five")]
    document = [completed(nano, prompt=prompts, max_tokens=1, n=2) for _ in range(2)][-1]
    read = sum(len(ids_of(nano, prompt)) for prompt in prompts)
    # a drafter reads the last one that is held again
    assert document["usage"]["prompt_tokens_details"]["cached_tokens"] == read - 2 * 2
    assert document["usage"]["prompt_tokens"] == read


def test_echo_with_log_probabilities_is_what_a_harness_expects(nano, score):
    """lm-eval's local-completions: ids in a list, one token more, T = 0; it reads [context:-1]."""
    text = ids_of(nano, PROMPT + ANSWER)
    document = completed(nano, prompt=[text, text[:9]], max_tokens=1, logprobs=1, echo=True, seed=1)
    expected = score(text, text[:9])
    for choice, ids, own in zip(document["choices"], (text, text[:9]), expected, strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["top_logprobs"])
        assert logprobs["token_logprobs"][0] is logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][: len(ids)] == own["logprobs"]
        for token, value, top in list(
            zip(*[logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs")], strict=True)
        )[1:]:
            assert top[token] == value <= max(top.values())
        assert "".join(logprobs["tokens"]) == choice["text"]
        assert [
            choice["text"][start:][: len(name)]
            for start, name in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        ] == logprobs["tokens"]
    # the whole answer is there, so that its end follows; the other goes on with one token
    assert [len(choice["logprobs"]["tokens"]) for choice in document["choices"]] == [len(text), 10]
    assert [choice["finish_reason"] for choice in document["choices"]] == ["stop", "length"]


def test_the_token_that_scoring_finds_is_the_one_that_is_drawn(nano):
    prompt = ids_of(nano, PROMPT + "17 +")
    found = completed(nano, prompt=prompt, max_tokens=1, logprobs=2, echo=True)["choices"][0]["logprobs"]
    drawn = completed(nano, prompt=prompt, max_tokens=1, logprobs=2)["choices"][0]["logprobs"]
    assert found["tokens"][-1:] == drawn["tokens"]
    assert found["top_logprobs"][-1].keys() == drawn["top_logprobs"][0].keys()
    assert found["token_logprobs"][-1] == pytest.approx(drawn["token_logprobs"][0], abs=1e-4)


def test_an_end_that_is_ignored_is_a_token_behind_an_echo_too(nano):
    body = {"prompt": PROMPT + "17 + 25 = 42.", "max_tokens": 1, "logprobs": 0, "echo": True}
    [choice] = completed(nano, **body, ignore_eos=True)["choices"]
    assert (choice["finish_reason"], choice["logprobs"]["tokens"][-1]) == ("length", EOS)


def test_offsets_count_characters_also_where_a_token_is_part_of_one(nano):
    text = "wörld 😀!"
    body = {"prompt": text, "max_tokens": 0, "logprobs": 0, "echo": True}
    logprobs = completed(nano, **body)["choices"][0]["logprobs"]
    assert logprobs["text_offset"][-1] == len(text) - 1
    assert len(logprobs["tokens"]) > len(text)


def test_calls_in_a_raw_text_are_text(nano):
    tokenizer = nano.server.config.app.service.dialogue.tokenizer
    ids = tokenizer.encode(calls_block([{"type": "function", "function": {"name": "f", "arguments": "{}"}}]) + EOS)
    plan = AnswerPlan([0], Sampling(0.0), Limits())
    choice = CompletionChoice(0, plan, Request([0], plan.sampling, plan.limits), tokenizer)
    added, _ = choice.push(Token(one, 0.0, [], "stop" if one == ids[-1] else None) for one in ids)
    assert choice.ended
    assert choice.finish == "stop"
    assert choice.text == added == tokenizer.decode(ids[:-1])


def test_a_bias_changes_what_follows_an_echo(nano):
    prompt = ids_of(nano, PROMPT + "17 +")
    body = {"prompt": prompt, "max_tokens": 1, "logprobs": 0, "echo": True}
    [likeliest] = ids_of(nano, completed(nano, **body)["choices"][0]["logprobs"]["tokens"][-1])
    [choice] = completed(nano, **body, logit_bias={str(likeliest): -100})["choices"]
    assert ids_of(nano, choice["logprobs"]["tokens"][-1]) != [likeliest]
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 1


@pytest.mark.slow
def test_nothing_need_follow_an_echo(nano, score):
    prompt = ids_of(nano, PROMPT)
    [choice] = completed(nano, prompt=prompt, max_tokens=0, logprobs=0, echo=True)["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["token_logprobs"] == score(prompt)[0]["logprobs"]
    [choice] = completed(nano, prompt=prompt, max_tokens=2, logprobs=0, echo=True, temperature=1)["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(prompt) + 2


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({}, "prompt", "text or a list"),
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": ["a", ""]}, "prompt[1]", "empty"),
        ({"prompt": [1, "a"]}, "prompt[0]", "text or a list"),
        ({"prompt": [1, 2304]}, "prompt", "not in the vocabulary, 0 to 2,303"),
        ({"prompt": [[-1]]}, "prompt[0]", "not in the vocabulary"),
        ({"prompt": [[True]]}, "prompt[0]", "text or a list"),
        ({"prompt": ["a"] * 65}, "prompt", "1 to 64"),
        ({"prompt": ["a"] * 64, "n": 6}, "n", "384 requests, and the server accepts 320 at a time"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "whole number"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(nano, fields, param, reason):
    status, document = nano.post("/v1/completions", fields)
    assert (status, document["error"]["param"]) == (400, param)
    assert reason in document["error"]["message"]


def test_tokens_of_texts_and_conversations(nano):
    status, document = nano.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert status == 200
    assert "".join(document["token_strs"]) == PROMPT
    assert document["count"] == len(document["tokens"])
    assert document["max_model_len"] == 8192
    messages = [{"role": "user", "content": "What is 17 + 25?"}]
    assert nano.post("/tokenize", {"messages": messages})[1]["tokens"] == document["tokens"]
    thinking = nano.post("/tokenize", {"messages": messages, "reasoning_effort": "high"})[1]["tokens"]
    assert thinking[:-1] == document["tokens"][:-1]
    assert nano.post("/detokenize", {"tokens": document["tokens"]})[1] == {"prompt": PROMPT}
    begun = nano.post("/tokenize", {"prompt": PROMPT.removeprefix(BOS), "add_special_tokens": True})[1]
    assert begun["tokens"] == document["tokens"]
    info = nano.get("/tokenizer_info")[1]
    assert (info["bos_token"], info["eos_token"]) == (BOS, "<｜end▁of▁sentence｜>")


@pytest.mark.parametrize(
    ("path", "body"),
    [("/tokenize", {}), *(("/detokenize", body) for body in ({}, {"tokens": [9999]}, {"tokens": [True]}))],
)
def test_what_has_no_tokens_is_refused(nano, path, body):
    assert nano.post(path, body)[0] == 400
