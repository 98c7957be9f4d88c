"""Arguments that a model has put into one argument of its own making, as it does at times: taken out again."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsv4cli.engine.text.prompt_text import from_json, to_json
from dsv4cli.engine.text.reply import ToolCall

WRAPPERS = ("arguments", "input")
# of each function, the parameters that it has
Declared = Mapping[str, frozenset[str]]


def declared_by(tools: Sequence[Mapping[str, Any]]) -> Declared:
    """What tools (OpenAI's shape) declare; functions without parameters apart."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    held = {name: schema.get("properties") for name, schema in schemas.items() if isinstance(schema, Mapping)}
    return {name: frozenset(properties) for name, properties in held.items() if isinstance(properties, Mapping)}


def required_by(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Return the required parameters of each function that tools (in OpenAI's shape) declare."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    required = {name: schema.get("required") if isinstance(schema, Mapping) else () for name, schema in schemas.items()}
    return {name: frozenset(names if isinstance(names, Sequence) else ()) for name, names in required.items()}


def may_wrap(declared: Declared, function: str, parameter: str) -> bool:
    """Whether a parameter may hold the arguments of a function, for it has none of that name."""
    return parameter in WRAPPERS and parameter not in declared.get(function, {parameter})


def unwrapped(call: ToolCall, declared: Declared) -> ToolCall:
    """A call, its arguments JSON, with the arguments that its only one holds, if they are all the function's."""
    function = call["function"]
    arguments = _parsed(function["arguments"])
    if not isinstance(arguments, dict) or len(arguments) != 1:
        return call
    [wrapper] = arguments
    if not may_wrap(declared, function["name"], wrapper):
        return call
    inner = _parsed(arguments[wrapper])
    if not isinstance(inner, dict) or not inner.keys() <= declared[function["name"]]:
        return call
    return {**call, "function": {**function, "arguments": to_json(inner)}}


def _parsed(value: object) -> object:
    """A value, or what a text holds as JSON."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except (ValueError, RecursionError):
        return None
