"""The literal texts of the prompt format, from the official encoder (encoding_dsv4.py of April and of 0731).

Text made from messages is returned in parts: text of the format as `str`, text from the messages as `Given`.
"""

import json
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

from dsv4cli.engine.text.tokens import DSML, THINK_END, THINK_START, Given

CALLS_OPEN = f"\n\n<{DSML}tool_calls"
CALLS_CLOSE = f"</{DSML}tool_calls>"
INVOKE_OPEN = f"<{DSML}invoke"
INVOKE_CLOSE = f"</{DSML}invoke"
PARAMETER_OPEN = f"<{DSML}parameter"
PARAMETER_CLOSE = f"/{DSML}parameter"

# "max" of the April release is "high" of 0731
EFFORT_ABSOLUTE = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
EFFORT_BEYOND = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)

_TOOLS_HEAD = f"""## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<{DSML}tool_calls>" block like the following:

<{DSML}tool_calls>
<{DSML}invoke name="$TOOL_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$TOOL_NAME2">
...
</{DSML}invoke>
</{DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK_START}), you MUST output your complete reasoning inside \
{THINK_START}...{THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {THINK_END} with tool calls or final response.

### Available Tool Schemas

"""
_TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"


def to_json(value: object) -> str:
    """Return JSON in the style that the model was trained on: one line, `, ` and `: ` as separators, raw Unicode."""
    return json.dumps(value, ensure_ascii=False)


def from_json(text: str) -> Any:
    """Parse JSON that every parser accepts. Raises ValueError or RecursionError for anything else."""
    value = json.loads(text, parse_constant=_finite, parse_float=_finite)
    _check_pairs(text, value)
    return value


def _check_pairs(text: str, value: object) -> None:
    """Raise UnicodeEncodeError, a ValueError, if the JSON value contains half of a surrogate pair."""
    if "\\u" in text:
        to_json(value).encode()


def _finite(text: str) -> float:
    if not isfinite(float(text)):
        raise ValueError(f"{text} is not a JSON number")
    return float(text)


def joined(blocks: Iterable[list[str]], between: str) -> list[str]:
    """Return the parts of all blocks, with a separator between the blocks."""
    parts: list[str] = []
    for nth, block in enumerate(blocks):
        parts += [between, *block] if nth else block
    return parts


def tools_parts(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the end of a system or developer message with `tools` (OpenAI shape)."""
    schemas = "\n".join(to_json(tool["function"]) for tool in tools)
    return [f"\n\n{_TOOLS_HEAD}", Given(schemas), _TOOLS_TAIL]


def format_parts(schema: object) -> list[str]:
    """Return the end of a system or developer message with a response format."""
    head = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
    return [head, Given(to_json(schema))]


def result_parts(text: str) -> list[str]:
    """Return a tool's result inside a user turn. The tags are plain text, not tokens."""
    return ["<tool_result>", Given(text), "</tool_result>"]


def calls_parts(calls: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the end of an assistant message with `calls` (OpenAI shape, arguments as JSON text), without escaping."""
    invokes = joined((_invoke(call["function"]) for call in calls), "\n")
    return [f"{CALLS_OPEN}>\n", *invokes, f"\n{CALLS_CLOSE}"]


def _invoke(function: Mapping[str, Any]) -> list[str]:
    parameters = joined((_parameter(name, value) for name, value in _arguments(function["arguments"]).items()), "\n")
    return [f'{INVOKE_OPEN} name="', Given(function["name"]), '">\n', *parameters, f"\n{INVOKE_CLOSE}>"]


def _arguments(text: str) -> dict[str, Any]:
    """Return the arguments by name. Text that is not a JSON object is a single string argument named `arguments`.

    The same applies to JSON with half of a surrogate pair: a prompt can contain it only as an escape.
    """
    try:
        value = json.loads(text)
        _check_pairs(text, value)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _parameter(name: str, value: object) -> list[str]:
    text = value if isinstance(value, str) else to_json(value)
    kind = to_json(isinstance(value, str))
    return [f'{PARAMETER_OPEN} name="', Given(name), f'" string="{kind}">', Given(text), f"<{PARAMETER_CLOSE}>"]
