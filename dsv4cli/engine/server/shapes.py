"""What a client wants answers to look like: which calls of tools they have, which form their text; no torch."""

from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.text.prompt import Message, Tool
from dsv4cli.engine.text.reply_grammar import ANY_JSON, AnswerForm, ToolChoice

FORMATS = ("text", "json_object", "json_schema")
WORDS = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


@dataclass(frozen=True)
class Shape:
    """form: of the text, None for any. choice: which calls there are, of these tools, in OpenAI's shape."""

    form: AnswerForm | None
    choice: ToolChoice
    tools: list[Tool]

    @property
    def needs_grammar(self) -> bool:
        """Whether not every answer has this shape."""
        return self.form is not None or self.choice.kind == "required"


ANY_SHAPE = Shape(None, ToolChoice("auto"), [])


def openai_shape(fields: Fields, tools: list[Tool]) -> Shape:
    """`response_format`, `structured_outputs` as vLLM has it, `tool_choice` and `parallel_tool_calls`. Raises
    `Refusal`."""
    parallel = fields.flag("parallel_tool_calls", otherwise=True)
    return Shape(_openai_form(fields), _choice(_openai_choice(fields), parallel, tools), tools)


def anthropic_shape(fields: Fields, tools: list[Tool]) -> Shape:
    """`tool_choice`, and `format` of `output_config`. Raises `Refusal`."""
    given, output = fields.mapping("tool_choice"), fields.mapping("output_config")
    form = None if output is None else _form(output, "format", nested=False)
    if given is None:
        return Shape(form, ToolChoice("auto"), tools)
    kind = given.choice("type", ("auto", "any", "tool", "none"))
    named = ("required", given.text("name")) if kind == "tool" else (WORDS[kind or "auto"], None)
    return Shape(form, _choice(named, not given.flag("disable_parallel_tool_use"), tools), tools)


def with_schema(messages: list[Message], form: AnswerForm | None) -> list[Message]:
    """The conversation with the schema of the answer in its first system message, where the model was trained on it."""
    if form is None or form.kind != "json" or form == ANY_JSON:
        return messages
    at = next((i for i, message in enumerate(messages) if message["role"] == "system"), None)
    if at is None:
        return [{"role": "system", "content": "", "response_format": form.value}, *messages]
    return [*messages[:at], {**messages[at], "response_format": form.value}, *messages[at + 1 :]]


_Named = tuple[str, str | None]


def _openai_choice(fields: Fields) -> _Named:
    value = fields.value("tool_choice")
    if isinstance(value, dict):
        given = fields.mapping("tool_choice")
        assert given is not None
        given.choice("type", ("function",))
        function = given.mapping("function")
        return "required", function.text("name") if function is not None else given.text("name")
    word = fields.choice("tool_choice", tuple(WORDS))
    return WORDS[word or "auto"], None


def _choice(named: _Named, parallel: bool, tools: list[Tool]) -> ToolChoice:
    kind, name = named
    names = [tool["function"]["name"] for tool in tools]
    if kind == "required" and not tools:
        raise bad_field("tool_choice", "a call is required, and there are no tools")
    if name is not None and name not in names:
        raise bad_field("tool_choice", f"there is no tool {name!r}")
    if kind == "none":
        return ToolChoice("none")
    return ToolChoice("required" if kind == "required" else "auto", name, parallel)


def _openai_form(fields: Fields) -> AnswerForm | None:
    given = fields.mapping("structured_outputs")
    for name, kind in (("json", "json"), ("regex", "regex"), ("grammar", "lark")):
        value = None if given is None else given.mapping(name) if name == "json" else given.text(name)
        if value is not None and given is not None:
            return AnswerForm(kind, given.value(name))  # type: ignore[arg-type] # a kind of the table
    return _form(fields, "response_format", nested=True)


def _form(fields: Fields, name: str, *, nested: bool) -> AnswerForm | None:
    """nested: whether the schema stands within `json_schema`."""
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
