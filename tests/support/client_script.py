"""What a scripted model says to other people's clients: an answer, a tool call, JSON, with reasoning if it is on."""

import json
from typing import Any

from dsv4cli.engine.text.tokens import THINK_END, THINK_START, USER
from tests.support.program import calls_block

SUM, ANSWER = "What is 17 + 25?", "17 + 25 = 42."
WEATHER, REPORT = "What is the weather in Paris?", "It is 21 degrees in Paris."
TOTAL, JSON_ANSWER = "Give the total of 17 and 25 as JSON.", '{"total": 42}'
THOUGHT = "Let me see."
KEY = "a-key-of-eight"
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"total": {"type": "integer"}},
    "required": ["total"],
    "additionalProperties": False,
}
# tools that clients add for the end of an answer, and what the model calls them with
FINAL_TOOLS: dict[str, Any] = {"final_result": {"total": 42}, "final_answer": {"answer": REPORT}}


def call(name: str, **given: Any) -> str:
    """Return the markup of a tool call."""
    return calls_block([{"function": {"name": name, "arguments": json.dumps(given)}}])


def says(prompt: str) -> str:
    """Answer the last message of a prompt: a question, or the result of the tool `get_weather`."""
    thought = THOUGHT + THINK_END if prompt.endswith(THINK_START) else ""
    last = prompt.rpartition(USER)[2]
    final = next((call(name, **given) for name, given in FINAL_TOOLS.items() if f'"name": "{name}"' in prompt), None)
    if "<tool_result>" in last or "21 in Paris" in last:
        return thought + (final or REPORT)
    if WEATHER in last:
        return thought + call("get_weather", city="Paris")
    if TOTAL in last:
        return thought + (final or JSON_ANSWER)
    return thought + ANSWER
