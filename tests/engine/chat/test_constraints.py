"""Constraints together, and answers of random weights under grammars: always valid, with drafts and without."""

import json
from functools import cache

import pytest

from tests.support.slow import slow_rows

pytest.importorskip("llguidance")

from dsv4cli.engine.chat.constraints import Constraints, Without
from dsv4cli.engine.chat.grammar import Grammars
from dsv4cli.engine.chat.thinking import Thinking
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.reply import parse_reply
from dsv4cli.engine.text.reply_grammar import AnswerForm, ToolChoice
from dsv4cli.engine.text.tokens import THINK_END, THINK_START
from dsv4cli.engine.weights.load import build_random
from tests.engine.runtime.test_speculation import Script
from tests.support.program import BYTES
from tests.support.small_model import FP32
from tests.support.speculation import CONFIGS, always_draft, know, mask_of

SIZE, MOST, EOS = 512, 120, (BYTES.eos_id,)
END, START = BYTES.token_id(THINK_END), BYTES.token_id(THINK_START)
GRAMMARS = Grammars(BYTES, SIZE, EOS)
WORD = {"type": "string", "maxLength": 4}
SCHEMAS = [
    {"type": "object", "properties": {"a": WORD, "b": {"type": "boolean"}}, "required": ["a", "b"]},
    {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 120}, "minItems": 1, "maxItems": 3},
    {"anyOf": [{"type": "null"}, {"enum": ["no", "yes", 7]}, {"type": "array", "items": WORD, "maxItems": 2}]},
    {"$ref": "#/$defs/T", "$defs": {"T": {"type": "object", "properties": {"t": {"$ref": "#/$defs/L"}},
     "required": ["t"]}, "L": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}}},
]  # fmt: skip
CLOSED = {"additionalProperties": False}
F = {"properties": {"n": SCHEMAS[1], "k": {"enum": ["x", "y"]}}, "required": ["n"]}
TOOLS = [
    {"function": {"name": "f", "parameters": F}},
    {"function": {"name": "go", "parameters": {"properties": {"on": {"type": "boolean"}}}}},
]


@cache
def model() -> Transformer:
    """A small model with an MTP drafter and the byte vocabulary."""
    config = parse_config(CONFIGS["mtp"] | {"vocab_size": SIZE}, "test")
    return build_random(config, Numerics.plain(), formats=FP32)


def closed(schema):
    """A schema whose objects have no other properties: an answer comes to its end."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    own = {key: closed(value) for key, value in schema.items()}
    return own | CLOSED if "properties" in own and "type" in own else own


def test_a_token_comes_that_all_let_come():
    parts = [
        Script(forced={1: 9}, banned={0: [3]}, instead={(0, 5): 6}),
        Script(forced={1: 8, 2: 7}, banned={0: [4]}, instead={(0, 5): 7, (0, 4): 1}),
    ]
    parts[0].masks = lambda drafts: [mask_of(range(10), 40), None, mask_of([1], 40)]
    parts[1].masks = lambda drafts: [mask_of(range(5, 40), 64), None]
    both = Constraints(*parts)
    assert both.masks([1, 2]) == [mask_of(range(5, 10), 64), None, mask_of([1], 40)]
    assert (both.forced(), both.banned(), both.instead(5), both.instead(4), both.instead(1)) == (
        None,
        (3, 4),
        6,
        1,
        None,
    )
    both.push(1)
    assert both.forced() == 9
    both.push(9)
    assert both.forced() == 7
    assert parts[0].seen == parts[1].seen == [1, 9]


def test_a_grammar_that_fails_is_heard_of():
    grammar = GRAMMARS.reply(thinking=False, form=AnswerForm("json", {}))
    both = Constraints(Thinking(False, 9, None, END, EOS), grammar)
    assert both.failure == ""
    both.push(BYTES.encode("x")[0])
    assert both.failure == grammar.failure != ""


def test_tokens_are_kept_out():
    without = Without([3, 17], 20)
    assert without.masks([5, 3]) == [mask_of([id for id in range(20) if id not in (3, 17)], 20)] * 3


def answers(requests, drafts=0, texts=()):
    """What requests get, and the most tokens that a step gave one of them. texts: what their drafter knows."""
    one, most = Engine(model(), Capacity(16, 400), "cpu", drafting=Drafting(drafts)), 0
    if texts:
        know(one, texts, lambda number, place: (number + place) % 9)
    for request in requests:
        one.add(request)
    while one.busy:
        most = max(most, *(len(result.tokens) for result in one.step()))
    return [request.ids[len(request.prompt) :] for request in requests], most


def asked(temperature, numbers=range(6)):
    """An answer under each schema, then two of calls; every other one thinks, and is stopped at that."""
    requests = []
    for number, schema in ((number, [*SCHEMAS, None, None][number]) for number in numbers):
        thinks = number % 2 == 1
        if schema is None:
            grammar = GRAMMARS.reply(thinking=thinks, tools=TOOLS, choice=ToolChoice("required"))
        else:
            grammar = GRAMMARS.reply(thinking=thinks, form=AnswerForm("json", closed(schema)))
        thinking = Thinking(thinks, MOST, 3, END, EOS)
        prompt = [*BYTES.encode(f"q{number}"), START if thinks else END]
        sampling = Sampling(temperature, 0.9 if number > 1 else 1.0, number)
        requests.append(Request(prompt, sampling, Limits(MOST), Constraints(thinking, grammar)))
    return requests


def valid(value, schema, root) -> bool:
    """Whether a value is what the keywords used here ask for."""
    if "$ref" in schema:
        return valid(value, root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    if "anyOf" in schema:
        return any(valid(value, one, root) for one in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    match schema["type"]:
        case "object":
            own = schema["properties"]
            right = own.keys() >= value.keys() >= {*schema["required"]}
            return right and all(valid(value[name], own[name], root) for name in value)
        case "array":
            right = schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
            return right and all(valid(one, schema["items"], root) for one in value)
        case "integer":
            return isinstance(value, int) and schema["minimum"] <= value <= schema["maximum"]
        case "string":
            return isinstance(value, str) and len(value) <= schema["maxLength"]
        case "boolean":
            return isinstance(value, bool)
    return value is None


def follows(number, ids) -> bool:
    """Whether an answer of `asked` is what its grammar asks for, as far as it goes."""
    *thought, rest = BYTES.decode(ids).split(THINK_END)
    assert len(thought) == number % 2
    if len(ids) == MOST:
        return True
    assert ids[-1] in EOS
    if number < len(SCHEMAS):
        return valid(json.loads(rest.removesuffix(tokens.EOS)), SCHEMAS[number], SCHEMAS[number])
    calls = [call["function"] for call in parse_reply(rest, thinking=False).tool_calls]
    assert calls
    return all(right_call(call["name"], json.loads(call["arguments"])) for call in calls)


def right_call(name, arguments) -> bool:
    if name == "go":
        return arguments in ({}, {"on": True}, {"on": False})
    return name == "f" and valid(arguments.pop("n"), SCHEMAS[1], {}) and arguments in ({}, {"k": "x"}, {"k": "y"})


@pytest.mark.parametrize(
    ("temperature", "numbers"),
    [(1.0, (0, 1)), *slow_rows((0.0, range(6)), (1.0, range(6)))],
)
def test_random_weights_write_what_a_grammar_asks_for(temperature, numbers, monkeypatch):
    """Steps as on a GPU, but for the graphs; with right and wrong drafts the same tokens come."""
    monkeypatch.setattr(runner, "captures", lambda device: True)
    always_draft(monkeypatch)
    requests = asked(temperature, numbers)
    expected, _ = answers(requests)
    assert all(follows(number, ids) for number, ids in zip(numbers, expected, strict=True))
    assert sum(len(ids) < MOST for ids in expected) > 1
    texts = [request.prompt + ids for request, ids in zip(requests, expected, strict=True)]
    found, most = answers(asked(temperature, numbers), 5, texts)
    assert found == expected
    assert most > 3


@pytest.mark.slow
def test_many_answers_of_random_weights():
    """As above, for 20 draws of each."""
    for seed in range(20):
        requests = asked(1.0)
        for request in requests:
            request.sampling = request.sampling.plus(100 * seed + 100)
        assert all(follows(number, ids) for number, ids in enumerate(answers(requests)[0]))
