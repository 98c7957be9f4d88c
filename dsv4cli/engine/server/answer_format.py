"""The output format that a client requires: tool calls, and a schema, regex or grammar for the text. No torch."""

from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.text.prompt import Message, Tool
from dsv4cli.engine.text.reply_grammar import ANY_JSON, AnswerForm, ToolChoice

FORMATS = ("text", "json_object", "json_schema")
CHOICE = "tool_choice"
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

    It reads `response_format`, vLLM's `structured_outputs`, `tool_choice` and `parallel_tool_calls`. Raises `Refusal`.
    """
    parallel = fields.flag("parallel_tool_calls", otherwise=True)
    form, field = _openai_form(fields)
    return AnswerFormat(form, _choice(_openai_choice(fields), parallel, tools), tools, field)


def anthropic_shape(fields: Fields, tools: list[Tool]) -> AnswerFormat:
    """Return the shape that an Anthropic request requires: `tool_choice`, `output_config.format`. Raises `Refusal`."""
    given, output = fields.mapping(CHOICE), fields.mapping("output_config")
    form = None if output is None else form_in(output, "format", nested=False)
    field = CHOICE if output is None or form is None else output.name("format")
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
    word = fields.choice(CHOICE, tuple(WORDS))
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


def _openai_form(fields: Fields) -> tuple[AnswerForm | None, str]:
    """Return the form, and the field that requests it (`tool_choice` if there is no form)."""
    given = fields.mapping("structured_outputs")
    found = None if given is None else _structured(given)
    if found is not None:
        return found
    form = form_in(fields, "response_format", nested=True)
    return form, CHOICE if form is None else "response_format"


def _structured(given: Fields) -> tuple[AnswerForm, str] | None:
    """Return the form in vLLM's `structured_outputs`. Other kinds are rejected, because they would not be enforced."""
    schema, regex, grammar = given.mapping("json"), given.text("regex"), given.text("grammar")
    for name in given.unknown:
        raise bad_field(name, "expected json, regex or grammar")
    if schema is not None:
        return AnswerForm("json", given.value("json")), given.name("json")
    if regex is not None:
        return AnswerForm("regex", regex), given.name("regex")
    return None if grammar is None else (AnswerForm("lark", grammar), given.name("grammar"))


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
