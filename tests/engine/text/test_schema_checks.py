"""Which JSON schemas a grammar can hold: numbers, recursion, and alternatives of oneOf that exclude each other."""

import math

import pytest

from dsv4cli.engine.text.schema_checks import check_schema, parts_of
from dsv4cli.errors import UsageError

EXACT, INT64 = 2**53, 2**63


def refusal(schema, lenient=False) -> str:
    """Why a schema is refused, "" if it is not."""
    try:
        check_schema(schema, "the schema", lenient=lenient)
    except UsageError as error:
        return error.message
    return ""


@pytest.mark.parametrize("keyword", ["const", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
@pytest.mark.parametrize(
    ("number", "held"),
    [(0, True), (0.1, True), (EXACT, True), (-EXACT, True), (2**54, True), (EXACT + 1, False), (-EXACT - 1, False),
     (2**70, False), (-INT64, False), (float(-INT64), False), (math.inf, False), (math.nan, False)],
)  # fmt: skip
def test_a_number_that_cannot_be_held_is_refused_by_name_and_place(keyword, number, held):
    schema = {"properties": {"a": {"items": {"type": "number", keyword: number}}}}
    message = refusal(schema)
    assert message == (
        "" if held else f"the schema at #/properties/a/items: {keyword} has the number {number}, "
        "which a grammar cannot represent exactly"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        ({"enum": ["a", {"b": [1, EXACT + 1]}]}, False),
        ({"enum": [True, "9007199254740993", None]}, True),
        ({"const": 1e22}, True),
        ({"maximum": INT64 - 1}, True),  # the limit of int64, which many schemas have
        ({"minimum": 2**62}, False),
        ({"maximum": 1e19}, False),
        ({"maxLength": 2**32 - 1}, True),
        ({"maxLength": 2**32}, False),
        ({"maxItems": 2**32}, True),
        ({"maxItems": 2**70}, False),
        ({"multipleOf": EXACT + 1}, False),
        ({"default": EXACT + 1, "examples": [2**70], "properties": {"const": {"type": "integer"}}}, True),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"const": 2**70}}}, False),
        ({"$defs": {"A": {"const": 2**70}}}, True),  # nothing refers to it
    ],
)
def test_numbers_are_looked_for_where_a_grammar_has_them(schema, held):
    assert ("cannot represent exactly" in refusal(schema)) != held


A = {"$ref": "#/$defs/A"}


def defined(definition, **schema):
    return {**(schema or A), "$defs": {"A": definition}}


def required(schema, **more):
    return {"type": "object", "properties": {"a": schema}, "required": ["a"], **more}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"$ref": "#"}, "#"),
        ({"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/B"}, "B": A}}, "#/$defs/A"),
        (required({"$ref": "#"}), "#"),
        (defined(required(A)), "#/$defs/A"),
        (defined(required(A), properties={"x": A}), "#/$defs/A"),
        (defined(required({"anyOf": [A, required(A)]})), "#/$defs/A"),
        (defined({"type": "array", "items": A, "minItems": 1}), "#/$defs/A"),
        (defined({"type": "array", "prefixItems": [{}, A], "minItems": 2}), "#/$defs/A"),
        (defined({"allOf": [{"type": "object"}, required(A)]}), "#/$defs/A"),
        (defined({"type": "object", "additionalProperties": A, "minProperties": 1}), "#/$defs/A"),
        (defined({"type": "object", "additionalProperties": A, "required": ["x"]}), "#/$defs/A"),
        (defined({**required(A), "type": ["object", "array"], "items": A, "minItems": 1}), "#/$defs/A"),
        (required({"anyOf": [{}, required({"$ref": "#/properties/a/anyOf/1"})]}), "#/properties/a/anyOf/1"),
    ],
)  # fmt: skip
def test_a_recursion_without_an_end_is_refused(schema, place):
    message = f"the grammar allows no finite answer: the schema at {place} requires itself recursively"
    assert refusal(schema) == refusal(schema, lenient=True) == message


@pytest.mark.parametrize(
    "schema",
    [
        defined(required({"anyOf": [A, {"type": "null"}]})),
        defined({"type": "object", "properties": {"a": A}}),
        defined({"type": "array", "items": A}),
        defined({"type": ["array", "null"], "items": A, "minItems": 1}),
        defined({"type": "array", "prefixItems": [{"type": "null"}], "items": A, "minItems": 1}),
        defined({"type": "object", "properties": {"b": {}}, "additionalProperties": A, "minProperties": 1}),
        defined(required(A, const={"a": 1})),
        defined(required(A, type=[])),  # which llguidance refuses
        required({"$ref": "#/nowhere"}),
        required({"$ref": "#anchor"}),
        required(True, properties={"a": True}),
    ],
)
def test_a_recursion_with_an_end_is_accepted(schema):
    assert refusal(schema) == ""


def kind(value, **properties):
    return {"type": "object", "properties": {"kind": {"const": value}, **properties}, "required": ["kind"]}


@pytest.mark.parametrize(
    "alternatives",
    [
        [{"type": "integer", "minimum": 0}, {"type": "array"}],
        [{"type": "string"}, {"type": ["null", "boolean"]}, {"type": "number"}],
        [{"const": 1, "title": "one"}, {"const": 2}, {"enum": ["1", 3.5]}],
        [{"const": True}, {"const": 1}, {"const": None}],
        [kind("a"), kind("b"), {"type": "null"}],
        [kind("a"), {"allOf": [kind("b"), {"properties": {"x": {}}}]}],
        [required(kind("a")), required(kind("b"))],
        [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}],
        [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"type": "integer"}],
        [{"type": "string"}, False],
        [{}],
    ],
)
def test_alternatives_that_exclude_each_other(alternatives):
    schema = {"items": {"oneOf": alternatives}, "$defs": {"A": kind("a"), "B": {"$ref": "#/$defs/C"}, "C": kind("c")}}
    assert refusal(schema) == ""


@pytest.mark.parametrize(
    ("alternatives", "pair"),
    [
        ([{"type": "null"}, {"type": "integer"}, {"type": "number"}], (1, 2)),
        ([{"const": 1}, {"const": 2}, {"const": 1.0}], (0, 2)),
        ([{"const": [1]}, {"const": [1.0]}], (0, 1)),
        ([{"const": "a"}, {"type": "string"}], (0, 1)),
        ([{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}], (0, 1)),
        ([False, {}, True], (1, 2)),
        ([kind("a"), kind("a")], (0, 1)),
        ([kind("a"), {**kind("b"), "required": []}], (0, 1)),
        ([{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], (0, 1)),
        ([{"type": "array", "items": {"const": 1}}, {"type": "array", "items": {"const": 2}}], (0, 1)),  # []
        ([{"$ref": "#/items"}, {"type": "integer"}], (0, 1)),
    ],
)
def test_alternatives_that_can_both_match_are_named(alternatives, pair):
    definitions = {"A": kind("a"), "B": {"properties": {"kind": {"const": "b"}}}}
    schema = {"items": {"oneOf": alternatives}, "$defs": definitions}
    message = f"the schema at #/items: alternatives {pair[0]} and {pair[1]} of oneOf can both match"
    assert refusal(schema) == message
    assert refusal(schema, lenient=True) == ""


def test_names_in_a_pointer_are_escaped():
    assert [place for place, _ in parts_of({"properties": {"a/b~c": {}}})] == ["/properties/a~1b~0c"]


def test_many_alternatives_take_no_time():
    """Each is looked at once for a type or a property, not beside each other."""
    schema = {"oneOf": [kind(number) for number in range(1000)]}
    assert refusal(schema) == ""
