"""Tools of the Responses API as functions of the prompt format: functions, custom tools and namespaces. No torch.

A custom tool becomes a function with one string parameter. A tool in a namespace gets a name that includes it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.refusals import bad_field
from dsv4cli.engine.text.prompt import Tool
from dsv4cli.engine.text.reply_grammar import ToolChoice

# the parameter of a custom tool
INPUT = "input"
SEPARATOR = "__"
SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}
NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}
CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The input of the tool, as plain text."}},
    "required": [INPUT],
}
Kind = Literal["function", "custom"]


@dataclass(frozen=True)
class OfferedTool:
    """A tool as the client names it."""

    kind: Kind
    name: str
    namespace: str | None = None


@dataclass
class ResponseTools:
    """The tools of a request.

    Attributes:
        functions: the tools in OpenAI's chat shape, for the prompt.
        offered: the tools by their names in the prompt.
        shown: the tools as the response lists them.
        dropped: the types of built-in tools that the request lists; this server has none.
    """

    functions: list[Tool] = field(default_factory=list)
    offered: dict[str, OfferedTool] = field(default_factory=dict)
    shown: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)

    def only(self, names: list[str]) -> list[Tool]:
        """Return the functions with these names in the prompt."""
        return [tool for tool in self.functions if tool["function"]["name"] in names]

    def find(self, kind: str | None, name: str, namespace: str | None) -> list[str]:
        """Return the names in the prompt of the tools that a client's choice refers to.

        Args:
            kind: function, custom or namespace; None for a function or custom tool.
        """
        if kind == "namespace":
            return [own for own, tool in self.offered.items() if tool.namespace == name]
        return [
            own
            for own, tool in self.offered.items()
            if tool.name == name and kind in (None, tool.kind) and namespace in (None, tool.namespace)
        ]


def prompt_name(namespace: str | None, name: str) -> str:
    """Return the name in the prompt of a tool, perhaps in a namespace."""
    if not namespace:
        return name
    return f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"


def read_tools(given: list[Any], where: str = "tools") -> ResponseTools:
    """Return the tools of a request. Raises `Refusal` if one is invalid."""
    tools = ResponseTools()
    for nth, one in enumerate(given):
        fields = entry(one, f"{where}[{nth}]")
        kind = fields.needed("type")
        if kind == "namespace":
            _add_namespace(tools, fields)
        elif kind in ("function", "custom"):
            tools.shown.append(_add(tools, fields, kind, None, ""))
        else:
            tools.dropped.append(kind)
    return tools


def entry(given: Any, where: str) -> Fields:
    """Return a list entry as `Fields`. Raises `Refusal` if it is not an object."""
    if not isinstance(given, dict):
        raise bad_field(where, "expected an object")
    return Fields(given, where)


def _add_namespace(tools: ResponseTools, fields: Fields) -> None:
    name, description = fields.needed("name"), fields.text("description") or ""
    shown: list[dict[str, Any]] = []
    for nth, one in enumerate(fields.items("tools") or []):
        inner = entry(one, f"{fields.name('tools')}[{nth}]")
        kind = inner.choice("type", ("function", "custom"))
        if kind is None:
            raise bad_field(inner.name("type"), "expected function or custom, got nothing")
        # the description of the namespace is in the prompt once, with its first tool
        shown.append(_add(tools, inner, kind, name, "" if shown else description))
    tools.shown.append({"type": "namespace", "name": name, "description": description, "tools": shown})


def _add(tools: ResponseTools, fields: Fields, kind: str, namespace: str | None, preface: str) -> dict[str, Any]:
    """Add a tool. Return it as the response lists it.

    Args:
        preface: text for the prompt before the tool's description.
    """
    name, description = fields.needed("name"), fields.text("description")
    own = prompt_name(namespace, name)
    if own in tools.offered:
        raise fields.wrong("name", "expected a name that no other tool has", name)
    shown: dict[str, Any] = {"type": kind, "name": name}
    if description is not None:
        shown["description"] = description
    words = [preface, description or ""]
    if kind == "custom":
        parameters, form = CUSTOM_PARAMETERS, _format(fields)
        words.append(form.pop("words"))
        shown["format"] = form
    else:
        schema = fields.mapping("parameters")
        parameters = NO_PARAMETERS if schema is None else fields.value("parameters")
        shown |= {"parameters": dict(parameters), "strict": fields.flag("strict")}
    tools.offered[own] = OfferedTool("custom" if kind == "custom" else "function", name, namespace)
    function = {"name": own, "description": "\n\n".join(filter(None, words)), "parameters": parameters}
    tools.functions.append({"type": "function", "function": function})
    return shown


def _format(fields: Fields) -> dict[str, Any]:
    """Return the input format of a custom tool, with `words` that describe it to the model."""
    given = fields.mapping("format")
    if given is None or given.choice("type", ("text", "grammar")) != "grammar":
        return {"type": "text", "words": ""}
    syntax, definition = given.choice("syntax", tuple(SYNTAXES)), given.needed("definition")
    if syntax is None:
        raise bad_field(given.name("syntax"), f"expected one of {', '.join(SYNTAXES)}, got nothing")
    words = f"The input must match this {SYNTAXES[syntax]}:\n{definition}"
    return {"type": "grammar", "syntax": syntax, "definition": definition, "words": words}


def read_choice(fields: Fields, tools: ResponseTools) -> tuple[ToolChoice, list[Tool], Any]:
    """Return the tool choice of a request, the tools that may be called, and the choice as the response shows it.

    It reads `tool_choice` and `parallel_tool_calls`. Raises `Refusal`.
    """
    parallel, value = fields.flag("parallel_tool_calls", otherwise=True), fields.value("tool_choice")
    if not isinstance(value, dict):
        word = fields.choice("tool_choice", ("none", "auto", "required")) or "auto"
        return _choice(word, None, parallel, tools.functions), tools.functions, word
    given = Fields(value, "tool_choice")
    kind = given.needed("type")
    if kind == "allowed_tools":
        mode = given.choice("mode", ("auto", "required")) or "auto"
        names = [name for nth, one in enumerate(given.items("tools") or []) for name in _named(one, nth, tools)]
        allowed = tools.only(names)
        return _choice(mode, None, parallel, allowed), allowed, value
    if kind not in ("function", "custom"):
        raise given.wrong("type", "expected function, custom or allowed_tools: this server has no built-in tools", kind)
    name = given.needed("name")
    found = tools.find(kind, name, given.text("namespace"))
    if not found:
        raise bad_field("tool_choice", f"the request has no {kind} tool {name!r}")
    return _choice("required", found[0], parallel, tools.functions), tools.functions, value


def _choice(mode: str, name: str | None, parallel: bool, tools: list[Tool]) -> ToolChoice:
    if mode == "required" and not tools:
        raise bad_field("tool_choice", "a call is required, but the request has no tools that may be called")
    if mode == "none":
        return ToolChoice("none")
    return ToolChoice("required" if mode == "required" else "auto", name, parallel)


def _named(given: Any, nth: int, tools: ResponseTools) -> list[str]:
    """Return the names in the prompt of an entry of `allowed_tools`; none for a built-in tool."""
    allowed = entry(given, f"tool_choice.tools[{nth}]")
    kind = allowed.needed("type")
    if kind not in ("function", "custom", "namespace"):
        return []
    name = allowed.needed("name")
    found = tools.find(kind, name, allowed.text("namespace"))
    if not found:
        raise bad_field(allowed.name("name"), f"the request has no {kind} tool {name!r}")
    return found
