"""Grammars: what the official vocabulary may write under them, refusals with their place, and masks behind drafts."""

import json
import re
from random import Random

import pytest

pytest.importorskip("llguidance")

from dsv4cli.engine.chat import grammar as module
from dsv4cli.engine.chat.grammar import Grammar, Grammars
from dsv4cli.engine.text.prompt_text import calls_parts
from dsv4cli.engine.text.reply_grammar import ANY_JSON, AnswerForm, ToolChoice
from dsv4cli.engine.text.tokenizer import Tokenizer
from dsv4cli.engine.text.tokens import DSML, EOS, THINK_END
from dsv4cli.errors import UsageError
from tests.engine.text.test_tokenizer import official_file
from tests.support.program import BYTES
from tests.support.slow import slow

REQUIRED = ToolChoice("required")


def tool(name, properties=None, required=(), **more):
    parameters = {"type": "object", "properties": properties or {}, "required": required, **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


DEFINITIONS = {"Lines": {"type": "object", "properties": {"from": {"$ref": "#/$defs/Line"}}, "required": ["from"]}}
DEFINITIONS["Line"] = {"type": "integer", "minimum": 1}
WRITE = tool(
    "write",
    {
        "path": {"type": "string"},
        "mode": {"enum": ["w", "wb"]},
        "count": {"type": "integer"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "lines": {"$ref": "#/$defs/Lines"},
    },
    ["path"],
    **{"$defs": DEFINITIONS},
)
ANY = {"type": "function", "function": {"name": 'any "é"'}}
READ = tool("read", {"all": {"type": "boolean"}, "at": {"type": ["number", "string"]}}, ["at"])
TOOLS = [WRITE, ANY, READ]
SHAPE = AnswerForm("json", {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})


def calls(*given) -> list[str]:
    """What the official encoder writes for these, in parts."""
    return calls_parts([{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in given])


@pytest.fixture(scope="module")
def official() -> Tokenizer:
    return Tokenizer.from_file(official_file())


@pytest.fixture(scope="module")
def grammars(official) -> Grammars:
    return Grammars(official, official.size, (official.eos_id,))


@pytest.fixture(scope="module")
def small() -> Grammars:
    return Grammars(BYTES, 512, (BYTES.eos_id,))


def allowed(mask: bytes) -> set[int]:
    return {place for place in range(8 * len(mask)) if mask[place // 8] >> place % 8 & 1}


def ends(grammar: Grammar) -> bool:
    """Whether the end token may come."""
    [mask] = grammar.masks([])
    return BYTES.eos_id in allowed(mask)


def followed(grammar: Grammar, ids: list[int]) -> int:
    """How many of these tokens a grammar lets come, one after another."""
    for number, id in enumerate(ids):
        [mask] = grammar.masks([])
        if not mask[id // 8] >> id % 8 & 1:
            return number
        grammar.push(id)
    return len(ids)


WRITTEN = [
    calls(("write", {"path": "x</y>\n</p\n"})),
    calls(("write", {"path": "", "mode": "wb", "count": -3, "note": None, "lines": {"from": 7}})),
    calls(("write", {"path": f"{EOS}, <{DSML}parameter and </{DSML}parameter>", "note": "text"})),
    calls(('any "é"', {}), ('any "é"', {"what": "y", "z": [1, "a"], "t": True})),
    calls(("read", {"at": 1.5}), ("read", {"all": True, "at": "end"}), ("write", {"path": "p"})),
]


@pytest.mark.parametrize("parts", [*slow(*WRITTEN[:1]), WRITTEN[1], *slow(*WRITTEN[2:])], ids=range(len(WRITTEN)))
def test_calls_as_the_official_encoder_writes_them(parts, grammars, official):
    """Token by token: a line break between two calls, two in one without parameters, in one token with what stands
    before or not. A grammar that asks for two between calls ends them after the first (xgrammar 637, 638)."""
    ids, _ = official.encode_parts(parts)
    grammar = grammars.reply(thinking=False, tools=TOOLS, choice=REQUIRED)
    assert followed(grammar, ids) == len(ids)
    assert allowed(grammar.masks([])[0]) == {official.eos_id}
    assert grammar.failure == ""


@pytest.mark.parametrize(
    ("parts", "choice", "until"),
    [
        (calls(("write", {"mode": "w"})), REQUIRED, 'name="'),  # lacks what is required
        (calls(("write", {"path": "p", "mode": "a"})), REQUIRED, 'string="true">'),
        (calls(("write", {"path": "p", "count": "3"})), REQUIRED, 'string="'),
        (calls(("write", {"path": "p", "lines": {"from": 0}})), REQUIRED, '{"from": '),
        (calls(("write", {"path": "p", "more": 1})), REQUIRED, 'name="'),
        (calls(("read", {"at": "x", "all": True})), REQUIRED, "parameter>\n"),  # in another order
        (calls(("rea", {"at": 1})), REQUIRED, 'invoke name="rea'),
        (calls(("read", {"at": 1}), ("read", {"at": 1})), ToolChoice("required", parallel=False), "invoke>\n"),
        (calls(("read", {"at": 1}), ("read", {"at": 1})), ToolChoice("required", "read"), "invoke>\n"),
        (calls(("write", {"path": "p"})), ToolChoice("required", "read"), 'invoke name="'),
        (["Hello"], REQUIRED, ""),
        ([EOS], REQUIRED, ""),
        (["\n\n<", "tool_calls>"], REQUIRED, "\n\n<"),
    ],
)
def test_other_calls_do_not_come(parts, choice, until, grammars, official):
    ids, _ = official.encode_parts(parts)
    grammar = grammars.reply(thinking=False, tools=TOOLS, choice=choice)
    reached = official.decode(ids[: followed(grammar, ids)])
    assert reached.endswith(until)
    assert reached != "".join(parts)
    assert until or not reached


def test_a_text_is_not_written_as_json(grammars, official):
    """Where a parameter may be either, a text is written as it is."""
    parts = [part.replace('string="true"', 'string="false"') for part in calls(("read", {"at": '"x"'}))]
    grammar = grammars.reply(thinking=False, tools=TOOLS, choice=REQUIRED)
    ids = official.encode("".join(parts))
    assert official.decode(ids[: followed(grammar, ids)]).endswith('string="false">')


def test_an_answer_has_its_form_or_calls(grammars, official):
    call, _ = official.encode_parts(calls(("read", {"at": 1})))
    answer = official.encode('{"x": 17}')
    for choice, answers, may_call in (
        (ToolChoice(), True, True),
        (ToolChoice("none"), True, False),
        (REQUIRED, False, True),
    ):
        for ids, may in ((answer, answers), (call, may_call)):
            grammar = grammars.reply(thinking=False, form=SHAPE, tools=TOOLS, choice=choice)
            assert followed(grammar, ids) == (len(ids) if may else 0)


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (SHAPE, ['{"x": 1}', '{\n  "x": -20\n}'], ['{"x": 1.5}', '{"y"', " {", "[", '{"x": 1} ']),
        (ANY_JSON, ["{}", f'{{"a": [null, "{DSML}", 1e9, {{"é": "\\n"}}]}}'], ["[]", '{"a"}', '{"a": NaN}']),
        (AnswerForm("json", True), ["[1]", "null", '"</think>"'], ["nul1"]),
        (AnswerForm("regex", r"a\/b/\\/"), ["a/b/\\/"], ["a\\/b/\\/", "a/b"]),
        (AnswerForm("regex", "a/b\n[0-9]+é?"), ["a/b\n12", "a/b\n1é"], ["a/b1", "a/b\n1éé", ""]),
        (AnswerForm("lark", 'start: "yes" | no\nno: "no" /!+/'), ["yes", "no!!"], ["no", "yes!"]),
    ],
)
def test_forms_of_an_answer(form, right, wrong, grammars, official):
    for text in right:
        grammar = grammars.reply(thinking=False, form=form)
        ids = official.encode_plain(text)
        assert followed(grammar, ids) == len(ids)
        assert ends(grammar)
    for text in wrong:
        grammar = grammars.reply(thinking=False, form=form)
        ids = official.encode_plain(text)
        assert followed(grammar, ids) < len(ids) or not ends(grammar)


def test_no_json_is_spaces_for_ever(grammars, official):
    ids = official.encode_plain('{"x":')
    for space, most in (("\n", 1), (" ", 1), ("\t", 0)):
        spaces = official.encode_plain(space) * 40
        assert followed(grammars.reply(thinking=False, form=SHAPE), ids + spaces) == len(ids) + most
    spaces = [*official.encode_plain("\n"), *official.encode_plain(" ") * 40]
    assert followed(grammars.reply(thinking=False, form=SHAPE), ids + spaces) == len(ids) + 17


def test_a_special_token_is_no_text(grammars, official):
    grammar = grammars.reply(thinking=False, form=ANY_JSON)
    followed(grammar, official.encode('{"a": "'))
    assert not allowed(grammar.masks([])[0]) & official.special.keys()


def test_a_grammar_begins_behind_the_thinking(small):
    grammar = small.reply(thinking=True, form=SHAPE)
    end = BYTES.token_id(THINK_END)
    first, *drafts = BYTES.encode(f'hm{THINK_END}{{"y')
    assert grammar.masks([first]) == [None, None]
    masks = grammar.masks([first, *drafts])
    assert masks[:3] == [None] * 3  # the third behind the second token, before the end of the thinking
    assert [allowed(mask) & {*BYTES.encode('{"xy')} for mask in masks[3:]] == [
        {*BYTES.encode("{")},
        {*BYTES.encode('"')},
        {*BYTES.encode("x")},
    ]  # the last draft is not allowed
    for token in (first, drafts[0], end):
        assert grammar.masks([]) == [None]
        grammar.push(token)
    assert grammar.masks([]) == [masks[3]]


def test_masks_behind_drafts_are_those_that_come_then(small):
    """For random drafts, some of them not allowed; looking ahead changes nothing."""
    rng, grammar = Random(0), small.reply(thinking=False, form=SHAPE, tools=TOOLS)
    for _ in range(12):
        other, path, drafts = small.reply(thinking=False, form=SHAPE, tools=TOOLS), [], []
        grammar = small.reply(thinking=False, form=SHAPE, tools=TOOLS)
        for _ in range(rng.randrange(30)):
            token = rng.choice(sorted(allowed(grammar.masks([])[0]) - {BYTES.eos_id}) or [BYTES.eos_id])
            path.append(token)
            grammar.push(token)
            other.push(token)
            if token == BYTES.eos_id:
                break
        while len(drafts) < 7:
            [mask] = other.masks([])
            token = rng.choice(sorted(allowed(mask))) if rng.random() < 0.9 else rng.randrange(512)
            drafts.append(token)
            assert grammar.masks(drafts)[len(drafts) - 1] == mask
            assert grammar.masks([]) == grammar.masks(drafts)[:1]
            if token == BYTES.eos_id or token not in allowed(mask):
                assert len(grammar.masks([*drafts, 40, 41])) == len(drafts)
                break
            other.push(token)


def test_nothing_follows_an_end_that_is_drafted(small):
    grammar, [a] = small.reply(thinking=False, form=AnswerForm("regex", "a")), BYTES.encode("a")
    for _ in range(2):
        masks = grammar.masks([a, BYTES.eos_id, a])
        assert [allowed(mask) for mask in masks] == [{a}, {BYTES.eos_id}]


def test_an_id_without_a_token_does_not_come(small):
    grammar = small.reply(thinking=False, form=ANY_JSON)
    followed(grammar, BYTES.encode('{"a": "'))
    assert max(allowed(grammar.masks([])[0])) < BYTES.size


def test_what_cannot_be_followed_ends_the_answer(small):
    grammar = small.reply(thinking=False, form=SHAPE)
    grammar.push(BYTES.encode("x")[0])
    assert "doesn't satisfy the grammar" in grammar.failure
    assert "\n" not in grammar.failure
    assert allowed(grammar.masks([])[0]) == {BYTES.eos_id}


@pytest.mark.parametrize("drafts", [0, 3])
def test_masks_that_take_too_long_end_the_answer(drafts, small, monkeypatch):
    """All requests of an engine wait for them. Each mask may take some time, and an answer's some more."""
    seconds, now = [0.0], iter(range(10**6))
    monkeypatch.setattr(module, "thread_time", lambda: seconds[0] * next(now))
    [a] = BYTES.encode("a")
    slow, other = (small.reply(thinking=False, form=AnswerForm("lark", 'start: "a"*')).copy() for _ in range(2))
    seconds[0] = (1 + drafts) * module.MASK_SECONDS
    for _ in range(20):
        assert len(slow.masks([a] * drafts)) == 1 + drafts
    seconds[0] += 0.3
    for _ in range(4):
        assert slow.failure == ""
        assert a in allowed(slow.masks([a] * drafts)[0])
    assert slow.failure.startswith("it is too ambiguous")
    assert [allowed(mask) for mask in slow.masks([a] * drafts)] == [{BYTES.eos_id}]
    assert other.failure == ""


LOOKING = {"type": "string", "pattern": "(?=x)a"}


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"items": {"type": "strin"}}}}, "at #/properties/a/items: Invalid type: strin"),
        ({"anyOf": [{"type": "string"}, LOOKING]}, "at #/anyOf/1: look-around, including look-ahead and look-"),
        ({"additionalProperties": {"allOf": [{"maxLength": -1}]}}, "at #/additionalProperties/allOf/0: Expected pos"),
        ({"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"items": {"$ref": "#/$defs/B"}}, "B": {"not": {}}}},
         "at #/$defs/B: Unimplemented keys: [\"not\"]"),
        ({"items": {"$ref": "#/$defs/A"}, "$defs": {"A": {"items": {"$ref": "#/$defs/A"}, "not": {}}}},
         "at #/$defs/A: Unimplemented keys"),
        ({"properties": {"a": {"$ref": "#/$defs/Z"}}}, "at #/properties/a: Pointer '/$defs/Z' does not exist"),
        ({"type": "object", "properties": {"a": {"minimum": 5, "maximum": 3, "type": "integer"}}, "required": ["a"]},
         "at #/properties/a: Unsatisfiable schema: minimum (5) is greater than maximum (3)"),
        ({"required": "a"}, "at #: Expected array for 'required', got \"a\""),
        ({"enum": []}, "at #: Unsatisfiable schema"),
        ("x", "the schema is not a JSON schema: it must be an object"),
        ({"enum": ["\ud800"]}, "the grammar is not valid Unicode at character"),
        ({"$defs": 5, "items": {"$ref": "#/$defs/x"}}, "at #/items: Pointer '/$defs/x' does not exist"),
        ({"$ref": "#"}, "the grammar allows no finite answer"),
        ({"properties": {"a": {"const": 2**70}}}, "at #/properties/a: const has the number 1180591620717411303424"),
        ({"oneOf": [{"const": 1}, {"minimum": 1}]}, "at #: alternatives 0 and 1 of oneOf can both match"),
        ({"items": {"$ref": "https://a.example/b"}},
         "at #/items: https://a.example/b is not in the schema, and external references are not loaded"),
        ({"type": "string", "pattern": r"\bfoo"}, r"at #: \b and other look-around are not supported in regex /\bfoo/"),
        ({"minimum": "1"}, "Expected a number for 'minimum', got \"1\""),
    ],
)  # fmt: skip
def test_a_schema_that_cannot_be_names_the_place(schema, message, small):
    with pytest.raises(UsageError) as caught:
        small.reply(thinking=True, form=AnswerForm("json", schema))
    assert message in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (AnswerForm("regex", "(a"), "invalid grammar: unclosed group"),
        (AnswerForm("regex", "(?=a)b"), "invalid grammar: look-around"),
        (AnswerForm("regex", ""), "the grammar allows no answer"),
        (AnswerForm("lark", "start: foo"), 'invalid grammar: at 1(8): unknown name: "foo"'),
        (AnswerForm("lark", 'begin: "a"'), "invalid grammar: no start rule found"),
        (AnswerForm("lark", "start: <|x|>"), 'invalid grammar: at 1(8): unknown special token: "<|x|>"'),
        (
            AnswerForm("lark", 'start: %json {"items": {"const": -9223372036854775808}}'),  # it would end the process
            "the schema in the grammar at #/items: const has the number -9223372036854775808",
        ),
        (AnswerForm("lark", 'start: %json {"oneOf": [{}, {}]}'), "oneOf is not supported in a Lark grammar, use anyOf"),
    ],
)
def test_a_grammar_that_cannot_be(form, message, small):
    with pytest.raises(UsageError, match=re.escape(message)):
        small.reply(thinking=False, form=form)


LINE = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 2}
POINT = {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 500}, {"$ref": "#/$defs/L"}]}


def test_alternatives_that_exclude_each_other_are_held(small):
    schema = {"type": "object", "properties": {"p": POINT}, "required": ["p"], "$defs": {"L": LINE}}
    for text, holds in (('{"p": 17}', True), ('{"p": [1, 2]}', True), ('{"p": 501}', False), ('{"p": [1]}', False)):
        ids = BYTES.encode(text)
        assert (followed(small.reply(thinking=False, form=AnswerForm("json", schema)), ids) == len(ids)) == holds


def test_a_tool_takes_any_alternative(small):
    """The tool checks whether several match."""
    given = tool("f", {"a": {"type": "array", "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]}}}, ["a"])
    ids = BYTES.encode("".join(calls(("f", {"a": [2, 2.5]}))))
    assert followed(small.reply(thinking=False, tools=[given], choice=REQUIRED), ids) == len(ids)


@pytest.mark.parametrize(
    ("given", "choice", "message"),
    [
        (
            [tool("f", {"a": {"enum": [2**70]}})],
            REQUIRED,
            "f's a at #: enum has the number 1180591620717",
        ),
        (
            [tool("f", {"a": {"$ref": "#"}}, ["a"])],
            REQUIRED,
            "f's a at #/$defs/the-whole requires itself",
        ),
        ([tool("f", {"a": {"items": {"type": "intege"}}})], REQUIRED, "f's a at #/items: Invalid type: intege"),
        (
            [tool("f", {"a": {"not": {}, "type": "null"}, "b": {"type": "intege"}})],
            REQUIRED,
            "f's b at #: Invalid type: intege",
        ),
        ([tool("f", {"a": 3})], REQUIRED, "the schema of f's a is not a JSON schema: it must be an object"),
        ([tool("f", {"a": {"enum": []}})], REQUIRED, "the schema of f's a allows no value"),
        ([tool("f", {"a": {"type": 5}})], REQUIRED, "f's a at #: type must be a string"),
        ([tool("f", [1])], REQUIRED, "the value of properties in the schema of f is not"),
        ([{"function": {"name": "f", "parameters": [1]}}], REQUIRED, "the schema of f is not a JSON schema"),
        ([tool("f")], ToolChoice("required", "g"), "tool_choice names the tool g, which is not among the tools"),
        ([], REQUIRED, "tool_choice requires a call, but there are no tools"),
    ],
)
def test_tools_that_cannot_be_called(given, choice, message, small):
    with pytest.raises(UsageError, match=re.escape(message)):
        small.reply(thinking=False, tools=given, choice=choice)


def test_a_schema_may_be_nested_too_deeply(small):
    schema = {"type": "strin"}
    for _ in range(950):
        schema = {"items": schema}
    with pytest.raises(UsageError, match=r"the grammar is nested too deeply|the schema at #/anyOf/0/items/items/"):
        small.reply(thinking=False, form=AnswerForm("json", {"anyOf": [schema]}))


def test_of_a_form_and_tools_the_wrong_one_is_named(small):
    given = [tool("f", {"a": {"type": "intege"}})]
    for form in (SHAPE, AnswerForm("json", True), AnswerForm("regex", "a+")):
        with pytest.raises(UsageError, match="f's a at #: Invalid type: intege"):
            small.reply(thinking=False, form=form, tools=given)


E = {"$ref": "#/$defs/E"}


def written(small, schema, value, **more) -> bool:
    """Whether a call may give its one parameter, of this schema, a value."""
    ids = BYTES.encode("".join(calls(("f", {"a": value}))))
    given = tool("f", {"a": schema, **more.pop("beside", {})}, ["a"], **more)
    return followed(small.reply(thinking=False, tools=[given], choice=REQUIRED), ids) == len(ids)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"allOf": [E], "default": "x"}, "x", "z"),
        ({"allOf": [{"type": "string"}]}, "z", 1),
        ({"allOf": [E, {"enum": ["y", "z"]}]}, "y", "x"),
        ({"allOf": [{"$ref": "#/$defs/O"}]}, {"n": 1}, "text"),
        ({"allOf": [{"$ref": "#/$defs/O"}]}, {"n": 1}, {"n": "x"}),
        ({"allOf": [{"description": "any"}]}, "text", None),
        ({"allOf": [{"description": "any"}]}, [1], None),
    ],
)
def test_a_parameter_is_what_all_the_parts_of_its_schema_say(schema, right, wrong, small):
    """As pydantic writes a reference with a default."""
    number = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    definitions = {"$defs": {"E": {"type": "string", "enum": ["x", "y"]}, "O": number}}
    assert written(small, schema, right, **definitions)
    assert wrong is None or not written(small, schema, wrong, **definitions)


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"$ref": "#/properties/b"}, 1, "text"),
        ({"$ref": "#/properties/c/items"}, "x", "y"),
        ({"$ref": "#/properties/c/anyOf/1"}, None, 1),
        ({"type": "array", "items": {"$ref": "#"}}, [{"a": [{"a": []}]}], [[]]),
        ({"$ref": "#/$defs/P/properties/a~1b"}, True, "text"),
    ],
)
def test_a_parameter_may_refer_to_any_place_of_the_schema(schema, right, wrong, small):
    """As zod's schemas do, where one stands twice, and those of trees."""
    beside = {"b": {"type": "integer"}, "c": {"items": {"enum": ["x"]}, "anyOf": [{}, {"const": None}]}}
    definitions = {"$defs": {"P": {"properties": {"a/b": {"type": "boolean"}}}}}
    assert written(small, schema, right, beside=beside, **definitions)
    assert not written(small, schema, wrong, beside=beside, **definitions)


def test_what_no_grammar_holds_is_left_to_the_tool(small):
    """Keywords that llguidance does not know, beside those that it does."""
    given = tool("f", {"a": {"type": "array", "contains": {"const": 1}, "items": {"type": "integer"}}}, 3)
    ids = BYTES.encode("".join(calls(("f", {"a": [2]}))))
    assert followed(small.reply(thinking=False, tools=[given], choice=REQUIRED), ids) == len(ids)


def test_without_the_library_the_error_says_how_to_install_it(small, monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as caught:
        small.reply(thinking=False, form=SHAPE)
    assert caught.value.message == "grammars require llguidance, which is not installed"
    assert caught.value.remedy == "in a clone of dsv4, install it: pip install '.[grammar]'"
