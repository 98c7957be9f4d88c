"""Tools of the Responses API as functions of the prompt, and what the choice of a tool means."""

import pytest

from dsv4cli.engine.server.fields import Fields
from dsv4cli.engine.server.response_tools import INPUT, prompt_name, read_choice, read_tools

GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
GIVEN = [
    {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {}}}, "strict": True},
    {"type": "custom", "name": "c", "description": "Own.", "format": GRAMMAR},
    {"type": "namespace", "name": "mcp__files__", "description": "Files.", "tools": [
        {"type": "function", "name": "f", "description": "Read."}, {"type": "function", "name": "g"}]},
    {"type": "web_search"},
]  # fmt: skip


def chosen(choice, **fields):
    made, allowed, shown = read_choice(Fields({"tool_choice": choice, **fields}), read_tools(GIVEN))
    assert shown == (choice or "auto")
    return made, [tool["function"]["name"] for tool in allowed]


def test_tools_become_functions():
    tools = read_tools(GIVEN)
    functions = [tool["function"] for tool in tools.functions]
    assert [one["name"] for one in functions] == ["f", "c", "mcp__files__f", "mcp__files__g"]
    assert [one["description"] for one in functions] == [
        "", "Own.\n\nThe input must match this Lark grammar:\nstart: /a/", "Files.\n\nRead.", "",
    ]  # fmt: skip
    assert functions[0]["parameters"] == GIVEN[0]["parameters"]
    assert [*functions[1]["parameters"]["properties"]] == [INPUT]
    assert tools.dropped == ["web_search"]
    assert tools.shown[1] == GIVEN[1]
    assert [one["name"] for one in tools.shown[2]["tools"]] == ["f", "g"]
    assert prompt_name("crm", "f") == "crm__f"


ALL = ["f", "c", "mcp__files__f", "mcp__files__g"]


@pytest.mark.parametrize(
    ("choice", "kind", "name", "names"),
    [
        (None, "auto", None, ALL),
        ("none", "none", None, ALL),
        ("required", "required", None, ALL),
        ({"type": "function", "name": "g"}, "required", "mcp__files__g", ALL),
        ({"type": "function", "name": "f"}, "required", "f", ALL),
        ({"type": "custom", "name": "c"}, "required", "c", ALL),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "c"}]},
            "auto", None, ["c"],
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "mcp__files__"},
                                                                    {"type": "web_search"}]},
            "required", None, ALL[2:],
        ),
    ],
)  # fmt: skip
def test_a_choice_says_which_tools_may_or_must_be_called(choice, kind, name, names):
    made, allowed = chosen(choice, parallel_tool_calls=False)
    assert (made.kind, made.name, allowed) == (kind, name, names)
    assert made.parallel == (kind == "none")
    assert chosen(choice)[0].parallel
