"""Grammars of answers in llguidance's dialect of Lark: a form for the text, and calls of tools."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from dsv4cli.engine.text.prompt_text import (
    CALLS_CLOSE,
    CALLS_OPEN,
    INVOKE_CLOSE,
    INVOKE_OPEN,
    PARAMETER_CLOSE,
    PARAMETER_OPEN,
    to_json,
)
from dsv4cli.engine.text.schema_checks import check_schema
from dsv4cli.engine.text.schema_references import DEFINITIONS, Schema, resolved, with_places
from dsv4cli.engine.text.tokens import DSML
from dsv4cli.errors import UsageError

# whitespace between JSON tokens: one space, or a line break with indentation. Without a limit, weak models may write
# whitespace without end.
WHITESPACE = r"\x20|\x0A[\x20\x09]{0,16}"
# text between two tags, before a name, after a name, and between a parameter's name and its value
BREAK, NAME, END_OF_NAME, TYPE = "\n", ' name="', '">', '" string="{}">'
_TYPES = ("string", "number", "integer", "boolean", "object", "array", "null")


@dataclass(frozen=True)
class AnswerForm:
    """The form of an answer's text: JSON that matches a schema, a regex, or a Lark grammar.

    `value` is the schema, or the text of the regex or grammar.
    """

    kind: Literal["json", "regex", "lark"]
    value: Any


ANY_JSON = AnswerForm("json", {"type": "object"})


@dataclass(frozen=True)
class ToolChoice:
    """Which tool calls an answer may or must contain.

    Attributes:
        kind: "auto" for optional calls, "none", or "required" for at least one.
        name: the only function that may be called, exactly once. None: any function.
        parallel: whether the answer may contain several calls.
    """

    kind: Literal["auto", "none", "required"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True)
class _Forms:
    """The ways to write a parameter: as text (any, or one of `texts`) and as JSON of a schema; None if not so."""

    texts: Sequence[str] | Literal["any"] | None
    json: Schema | None


class _Rules:
    """The rules of a grammar under construction. `dsml` is the id of the DSML token, which all markup contains."""

    def __init__(self, dsml: int) -> None:
        self._token = f"<[{dsml}]>"
        self._rules: dict[str, str] = {}

    @property
    def text(self) -> str:
        """The text of all rules."""
        return "\n".join(f"{name}: {rule}" for name, rule in self._rules.items())

    def add(self, name: str, *alternatives: str) -> str:
        """Add a rule unless one of this name exists. Return the name."""
        self._rules.setdefault(name, " | ".join(alternatives))
        return name

    def markup(self, text: str) -> str:
        """Return the expression for a text whose markup is the DSML token.
         Each line break is a separate literal, because literals that are possible at the same place must not share a
        prefix.
        """
        parts = re.split(f"({DSML}|\n)", text)
        return " ".join(self._token if part == DSML else _literal(part) for part in parts if part)


def reply_grammar(form: AnswerForm | None, tools: Sequence[Mapping[str, Any]], choice: ToolChoice, dsml: int) -> str:
    """Return the grammar of an answer after its thinking, as JSON for llguidance.

    The answer is text of the form, or calls of the tools. A call has the parameters of its schema in their order;
    optional ones may be left out. A schema without properties allows any parameters. Restrictions of strings other than
    `enum`, and whatever a grammar cannot express, are left to the tool.

    Args:
        form: the form of the text, None for no text.
        tools: the tools in OpenAI's shape.
        choice: which calls are allowed or required.
        dsml: id of the DSML token, which all markup contains.

    Raises:
        UsageError: a schema is invalid, or the choice names a tool that is not among the tools.
    """
    rules = _Rules(dsml)
    starts, named = list[str](), list[dict[str, Any]]()
    if form is not None and choice.kind != "required":
        starts.append("@form")
        named.append(_named("form", form))
    if choice.kind == "required" and not tools:
        raise UsageError("tool_choice requires a call, but there are no tools", "add tools, or remove tool_choice")
    if tools and choice.kind != "none":
        functions = [tool["function"] for tool in tools]
        if choice.name is not None:
            functions = _only(functions, choice.name)
        starts.append(_add_calls(rules, functions, several=choice.parallel and choice.name is None))
    rules.add("start", *starts)
    return to_json({"grammars": [{"name": "reply", "lark_grammar": rules.text}, *named]})


def json_grammar(schema: Schema, lenient: bool) -> str:
    """Return the grammar of JSON that matches a schema. `lenient`: ignore what a grammar cannot express."""
    return to_json({"grammars": [{"name": "form", "json_schema": _guided(schema, lenient)}]})


def parameter_schemas(function: Mapping[str, Any]) -> dict[str, Schema]:
    """Return the schemas of a function's parameters, each with all definitions. Raises UsageError if one is invalid."""
    name = function["name"]
    whole = with_places(_schema_of(function.get("parameters") or {}, f"the schema of {name}"))
    properties = _schema_of(whole.get("properties") or {}, f"the value of properties in the schema of {name}")
    definitions = {key: whole[key] for key in DEFINITIONS if isinstance(whole.get(key), Mapping)}
    return {key: {**_schema_of(own, f"the schema of {name}'s {key}"), **definitions} for key, own in properties.items()}


def _named(name: str, form: AnswerForm) -> dict[str, Any]:
    if form.kind == "json":
        schema = _schema_of(form.value, "the schema")
        check_schema(schema, "the schema", lenient=False)
        return {"name": name, "json_schema": _guided(schema, lenient=False)}
    if form.kind == "regex":
        # in Lark, a slash without a backslash ends a regex
        text = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], form.value, flags=re.DOTALL)
        return {"name": name, "lark_grammar": f"start: /{text}/"}
    for schema in _schemas_in(form.value):
        check_schema(schema, "the schema in the grammar", lenient=True)
    return {"name": name, "lark_grammar": form.value}


def _schemas_in(lark: str) -> Iterator[Schema]:
    """Yield the JSON schemas in a Lark grammar."""
    for found in re.finditer(r"%json\s*(?={)", lark):
        with suppress(ValueError):  # llguidance reports the error
            yield json.JSONDecoder().raw_decode(lark, found.end())[0]


def _guided(schema: Schema, lenient: bool) -> Schema:
    """Return a schema with options for llguidance."""
    options = {"lenient": lenient, "whitespace_pattern": WHITESPACE, "coerce_one_of": True}  # `oneOf` was checked
    return {**schema, "x-guidance": options}


def _schema_of(value: object, what: str) -> Schema:
    if value is True:
        return {}
    if not isinstance(value, Mapping):
        raise _no_schema(what)
    return value


def _no_schema(what: str) -> UsageError:
    return UsageError(f"{what} is not a JSON schema: it must be an object", 'write it as {"type": ...}')


def _only(functions: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    found = [function for function in functions if function["name"] == name]
    if not found:
        names = ", ".join(function["name"] for function in functions)
        raise UsageError(f"tool_choice names the tool {name}, which is not among the tools", f"use one of {names}")
    return found[:1]


def _add_calls(rules: _Rules, functions: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    call = rules.add("call", *(_add_call(rules, f"f{number}", one) for number, one in enumerate(functions)))
    block = f"{call} ({rules.markup(BREAK)} {call})*" if several else call
    return rules.add("calls", f"{rules.markup(f'{CALLS_OPEN}>{BREAK}')} {block} {rules.markup(BREAK + CALLS_CLOSE)}")


def _add_call(rules: _Rules, rule: str, function: Mapping[str, Any]) -> str:
    name, schemas = function["name"], parameter_schemas(function)
    required = function["parameters"].get("required") if schemas else None
    parameters = [
        (_add_parameter(rules, f"{rule}p{place}", f"{name}'s {key}", key, schema), _holds(required, key))
        for place, (key, schema) in enumerate(schemas.items())
    ]
    inside = _add_in_order(rules, rule, parameters) if parameters else _add_any(rules)
    opened = f"{rules.markup(INVOKE_OPEN + NAME)} {_literal(name + END_OF_NAME)} {rules.markup(BREAK)}"
    return rules.add(rule, f"{opened} {inside} {rules.markup(f'{BREAK}{INVOKE_CLOSE}>')}")


def _add_in_order(rules: _Rules, rule: str, parameters: Sequence[tuple[str, bool]]) -> str:
    """Add rules for the parameters in their order, one per line, optional ones included. Return the first rule."""
    first = later = '""'  # the rest if no parameter has been written yet, and after one
    for place, (parameter, required) in reversed([*enumerate(parameters)]):
        left_out = [[] if required else [rest] for rest in (first, later)]
        first = rules.add(f"{rule}first{place}", f"{parameter} {later}", *left_out[0])
        later = rules.add(f"{rule}later{place}", f"{rules.markup(BREAK)} {parameter} {later}", *left_out[1])
    return first


def _add_any(rules: _Rules) -> str:
    """Add rules for any parameters."""
    rules.add("ANY_NAME", r"/[^\x00-\x1F\"<>]+/")
    opened = rules.markup(PARAMETER_OPEN + NAME)
    one = rules.add("one", *(f"{opened} ANY_NAME {form}" for form in _add_forms(rules, _Forms("any", {}), {})))
    return rules.add("any", f"({one} ({rules.markup(BREAK)} {one})*)?")


def _add_parameter(rules: _Rules, rule: str, what: str, name: str, schema: Schema) -> str:
    check_schema(schema, f"the schema of {what}", lenient=True)
    definitions = {key: schema[key] for key in DEFINITIONS if key in schema}
    forms = _forms(schema, definitions)
    if forms.texts is None and forms.json is None:
        raise UsageError(f"the schema of {what} allows no value", "fix the schema")
    opened = f"{rules.markup(PARAMETER_OPEN + NAME)} {_literal(name)}"
    return rules.add(rule, *(f"{opened} {form}" for form in _add_forms(rules, forms, definitions)))


def _add_forms(rules: _Rules, forms: _Forms, definitions: Schema) -> list[str]:
    """Return the alternatives for what follows a parameter's name. `definitions`: those of the parameter's schema."""
    closed, found = rules.markup(f"{PARAMETER_CLOSE.removeprefix('/')}>"), []
    if forms.texts is not None:
        # the text includes the "</" before the DSML token that closes it, since only that token shows where it ends
        text = rules.add("TEXT", r"/(?s:.*)<\//") if forms.texts == "any" else _any_of(forms.texts)
        found.append(f"{_literal(TYPE.format('true'))} {text} {closed}")
    if forms.json is not None:
        # lenient: a tool checks what a grammar cannot
        schema = to_json(_guided({**forms.json, **definitions}, lenient=True))
        found.append(f"{_literal(TYPE.format('false'))} %json {schema} {_literal('</')} {closed}")
    return found


def _any_of(texts: Sequence[str]) -> str:
    return f"({' | '.join(_literal(f'{text}</') for text in texts)})"


def _forms(schema: Schema, definitions: Schema) -> _Forms:
    """Return the ways to write a parameter of this schema."""
    schema = resolved(schema, definitions)
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        texts, others = ([value for value in values if isinstance(value, str) == text] for text in (True, False))
        return _Forms(texts or None, {"enum": others} if others else None)
    branches, parts = schema.get("anyOf") or schema.get("oneOf"), schema.get("allOf")
    if "type" not in schema and isinstance(branches, list):
        return _either([_forms(branch, definitions) for branch in branches if isinstance(branch, Mapping)])
    if "type" not in schema and isinstance(parts, list):
        return _both([_forms(part, definitions) for part in parts if isinstance(part, Mapping)], schema)
    types = schema.get("type", _TYPES)
    if not isinstance(types, str | list | tuple):
        return _Forms(None, schema)  # llguidance rejects it
    types = [types] if isinstance(types, str) else types
    others = [one for one in types if one != "string"]
    return _Forms("any" if "string" in types else None, {**schema, "type": others} if others else None)


def _either(forms: Sequence[_Forms]) -> _Forms:
    """Return the forms that any of these forms allows."""
    texts = [one.texts for one in forms if one.texts is not None]
    schemas = [one.json for one in forms if one.json is not None]
    some = [text for own in texts if own != "any" for text in own]
    return _Forms("any" if "any" in texts else some or None, {"anyOf": schemas} if schemas else None)


def _both(forms: Sequence[_Forms], schema: Schema) -> _Forms:
    """Return the forms that all of these forms allow; they come from a schema's `allOf`."""
    texts = [[] if one.texts is None else one.texts for one in forms if one.texts != "any"]
    shared = [text for text in texts[0] if all(text in own for own in texts)] if texts else "any"
    others = schema if not shared else {**schema, "type": [one for one in _TYPES if one != "string"]}
    return _Forms(shared or None, None if any(one.json is None for one in forms) else others)


def _holds(names: object, name: str) -> bool:
    return isinstance(names, list | tuple) and name in names


def _literal(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return to_json(text)
