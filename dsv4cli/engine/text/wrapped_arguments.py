"""Unwrapping of arguments that a model has put into a single argument of its own invention."""

from collections.abc import Mapping, Sequence
from typing import Any

from dsv4cli.engine.text.prompt_text import from_json, to_json
from dsv4cli.engine.text.reply import ToolCall

WRAPPERS = ("arguments", "input")
# the parameters of each function
Declared = Mapping[str, frozenset[str]]


def declared_by(tools: Sequence[Mapping[str, Any]]) -> Declared:
    """Return the parameters of each tool (OpenAI's shape) that declares any."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    held = {name: schema.get("properties") for name, schema in schemas.items() if isinstance(schema, Mapping)}
    return {name: frozenset(properties) for name, properties in held.items() if isinstance(properties, Mapping)}


def required_by(tools: Sequence[Mapping[str, Any]]) -> dict[str, frozenset[str]]:
    """Return the required parameters of each tool (OpenAI's shape)."""
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}
    required = {name: schema.get("required") if isinstance(schema, Mapping) else () for name, schema in schemas.items()}
    return {name: frozenset(names if isinstance(names, Sequence) else ()) for name, names in required.items()}


def may_wrap(declared: Declared, function: str, parameter: str) -> bool:
    """Return True if a parameter may wrap a function's arguments: the function declares no parameter of its name."""
    return parameter in WRAPPERS and parameter not in declared.get(function, {parameter})


def unwrapped(call: ToolCall, declared: Declared) -> ToolCall:
    """Return a call with its single wrapped argument unpacked, if that contains only parameters of the function."""
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
    """Return a value. A string is parsed as JSON, and becomes None if that fails."""
    if not isinstance(value, str):
        return value
    try:
        return from_json(value)
    except (ValueError, RecursionError):
        return None
