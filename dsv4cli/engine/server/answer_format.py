"""The output format that a client requires: tool calls, and a schema, regex or grammar for the text. No torch."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.text.prompt import Message, Tool
from dsv4cli.engine.text.reply_grammar import ANY_JSON, AnswerForm, ToolChoice

FORMATS = ("text", "json_object", "json_schema")
CHOICE, OLD_CHOICE = "tool_choice", "function_call"
WORDS = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


@dataclass(frozen=True)
class AnswerFormat:
    """The required shape of an answer.

    Attributes:
        form: the form of the text, None for any.
        choice: which tools must or may be called.
        tools: the available tools, in OpenAI's shape.
        field: the body's field that requests the form or, if there is none, the calls.
    """

    form: AnswerForm | None
    choice: ToolChoice
    tools: list[Tool]
    field: str = CHOICE

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar is needed to enforce the shape."""
        return self.form is not None or self.choice.kind == "required"


ANY_SHAPE = AnswerFormat(None, ToolChoice("auto"), [])


def openai_shape(fields: Fields, tools: list[Tool]) -> AnswerFormat:
    """Return the shape that an OpenAI request requires.

    It reads `response_format`, vLLM's `structured_outputs` and `guided_...`, `tool_choice` and `parallel_tool_calls`,
    and the older `function_call`. Raises `Refusal`.
    """
    # the older form has one call in an answer
    parallel = fields.flag("parallel_tool_calls", otherwise=True) and not fields.items("functions")
    form, field = openai_form(fields)
    return AnswerFormat(form, _choice(_openai_choice(fields), parallel, tools), tools, field)


def anthropic_shape(fields: Fields, tools: list[Tool]) -> AnswerFormat:
    """Return the shape that an Anthropic request requires.

    It reads `tool_choice`, `output_config.format` and its older form, `output_format`. Raises `Refusal`.
    """
    given, output = fields.mapping(CHOICE), fields.mapping("output_config")
    form = None if output is None else form_in(output, "format", nested=False)
    field = CHOICE if output is None or form is None else output.name("format")
    older = form_in(fields, "output_format", nested=False)
    if older is not None:
        if form is not None and form != older:
            raise bad_field("output_format", "contradicts output_config.format: use one of them")
        form, field = older, "output_format"
    if given is None:
        return AnswerFormat(form, ToolChoice("auto"), tools, field)
    kind = given.choice("type", ("auto", "any", "tool", "none"))
    named = ("required", given.needed("name")) if kind == "tool" else (WORDS[kind or "auto"], None)
    return AnswerFormat(form, _choice(named, not given.flag("disable_parallel_tool_use"), tools), tools, field)


def with_schema(messages: list[Message], form: AnswerForm | None) -> list[Message]:
    """Return the conversation with the answer's JSON schema in its first system message, as the model was trained."""
    if form is None or form.kind != "json" or form == ANY_JSON:
        return messages
    at = next((i for i, message in enumerate(messages) if message["role"] == "system"), None)
    if at is None:
        return [{"role": "system", "content": "", "response_format": form.value}, *messages]
    return [*messages[:at], {**messages[at], "response_format": form.value}, *messages[at + 1 :]]


_Named = tuple[str, str | None]


def _openai_choice(fields: Fields) -> _Named:
    value = fields.value(CHOICE)
    if isinstance(value, dict):
        given = fields.mapping(CHOICE)
        assert given is not None
        given.choice("type", ("function",))
        return "required", (given.mapping("function") or given).needed("name")
    word, older = fields.choice(CHOICE, tuple(WORDS)), fields.value(OLD_CHOICE)
    if word is None and isinstance(older, dict):
        return "required", Fields(older, OLD_CHOICE).needed("name")
    if word is None:
        word = fields.choice(OLD_CHOICE, ("none", "auto"))
    return WORDS[word or "auto"], None


def _choice(named: _Named, parallel: bool, tools: list[Tool]) -> ToolChoice:
    kind, name = named
    names = [tool["function"]["name"] for tool in tools]
    if kind == "required" and not tools:
        raise bad_field(CHOICE, "a call is required, but the request has no tools")
    if name is not None and name not in names:
        raise bad_field(CHOICE, f"the request has no tool {name!r}")
    if kind == "none":
        return ToolChoice("none")
    return ToolChoice("required" if kind == "required" else "auto", name, parallel)


def openai_form(fields: Fields) -> tuple[AnswerForm | None, str]:
    """Return the form, and the field that requests it (`tool_choice` if there is no form).

    Raises `Refusal` if a form is invalid, or if several fields request one.
    """
    given = fields.mapping("structured_outputs")
    found = [] if given is None else _structured(given, given.unknown)
    found += _structured(Guided(fields), ())
    form = form_in(fields, "response_format", nested=True)
    found += [] if form is None else [(form, "response_format")]
    if len(found) > 1:
        raise bad_field(found[1][1], f"cannot be combined with {found[0][1]}: use one of them")
    return found[0] if found else (None, CHOICE)


class Guided:
    """The older fields of vLLM, `guided_json` and others, read like its `structured_outputs`."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields

    def name(self, name: str) -> str:
        """Return a field's full name."""
        return self._fields.name(f"guided_{name}")

    def text(self, name: str) -> str | None:
        """Return a string."""
        return self._fields.text(f"guided_{name}")

    def items(self, name: str) -> list[Any] | None:
        """Return a list."""
        return self._fields.items(f"guided_{name}")

    def value(self, name: str) -> Any:
        """Return a field of any type."""
        return self._fields.value(f"guided_{name}")


def _structured(given: Fields | Guided, unknown: Sequence[str]) -> list[tuple[AnswerForm, str]]:
    """Return the forms in vLLM's fields. Other kinds are rejected, because they would not be enforced."""
    schema, regex, grammar = given.value("json"), given.text("regex"), given.text("grammar")
    choices = given.items("choice")
    for name in unknown:
        if name.rpartition(".")[2] not in ("json", "regex", "grammar", "choice"):
            raise bad_field(name, "expected json, regex, grammar or choice")
    found = []
    if schema is not None:
        found.append((AnswerForm("json", _schema(schema, given.name("json"))), given.name("json")))
    if regex is not None:
        found.append((AnswerForm("regex", regex), given.name("regex")))
    if grammar is not None:
        found.append((AnswerForm("lark", grammar), given.name("grammar")))
    if choices is not None:
        if not choices or not all(isinstance(one, str) and one for one in choices):
            raise bad_field(given.name("choice"), "expected a list of strings that are not empty")
        found.append((AnswerForm("regex", "|".join(map(_escaped, choices))), given.name("choice")))
    return found


def _schema(given: Any, name: str) -> Any:
    """Return a schema, given as an object or as its JSON text."""
    schema = given
    if isinstance(given, str):
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError):
            raise bad_field(name, "expected a JSON schema, got a text that is not JSON") from None
    if not isinstance(schema, dict):
        raise bad_field(name, "expected an object")
    return schema


def _escaped(text: str) -> str:
    """Return the regex that matches a text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text)


def form_in(fields: Fields, name: str, *, nested: bool) -> AnswerForm | None:
    """Return the form that a field in OpenAI's shape requests, None for any. Raises `Refusal`.

    Args:
        nested: whether the schema is inside `json_schema`.
    """
    given = fields.mapping(name)
    if given is None:
        return None
    kind = given.choice("type", FORMATS)
    if kind == "json_object":
        return ANY_JSON
    if kind != "json_schema":
        return None
    holder: Fields | None = given.mapping("json_schema") if nested else given
    schema: Any = None if holder is None else holder.mapping("schema")
    if holder is None or schema is None:
        where = f"{given.name('json_schema')}.schema" if nested else given.name("schema")
        raise bad_field(where, "expected an object, got nothing")
    return AnswerForm("json", holder.value("schema"))
