"""transformers' own server with the model and the chat template that `dsv4 convert` writes answers as `dsv4 run`."""

import json
import urllib.request

import pytest

from tests.support.foreign_servers import transformers_server
from tests.support.program import Program

pytestmark = pytest.mark.slow

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
FUNCTION = {"name": "get_weather", "description": "Get the weather in a city.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
SUM = {"role": "user", "content": "What is 17 + 25?"}
WEATHER = {"role": "user", "content": "What is the weather in Paris?"}
CALLED = [
    WEATHER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": '{"temperature": 21, "sky": "sunny"}'},
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """The address of `transformers serve`, and the folder of its model."""
    folder = tmp_path_factory.mktemp("served")
    with transformers_server(folder) as url:
        yield url, folder / "nano"


@pytest.mark.parametrize(
    ("messages", "tools", "level"),
    [([SUM], [], "off"), ([SUM], [], "high"), ([WEATHER], TOOLS, "off"), (CALLED, TOOLS, "off")],
    ids=["answer", "reasoning", "call", "result"],
)
def test_answers_are_those_of_dsv4_run(server, messages, tools, level, tmp_path, monkeypatch, capsys):
    url, folder = server
    body = {"model": str(folder), "messages": messages, "max_tokens": 120}
    body |= {"tools": tools} if tools else {}
    body |= {"chat_template_kwargs": {"thinking": True}} if level != "off" else {}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=900) as response:
        theirs = json.load(response)
    (tmp_path / "talk.json").write_text(json.dumps({"messages": messages, "tools": tools}))
    given = ["--messages", str(tmp_path / "talk.json"), "--think", level, "--max-tokens", "120", "--temperature", "0"]
    ours = json.loads(Program(monkeypatch, capsys)("run", *given, "--json").out)
    for count in ("prompt_tokens", "completion_tokens"):
        assert theirs["usage"][count] == ours["usage"][count]
    said = theirs["choices"][0]["message"]["content"]
    # it removes special tokens and parses neither reasoning nor calls
    if ours["tool_calls"]:
        assert "get_weather" in said
        assert "Paris" in said
    else:
        assert said == (ours["reasoning_content"] or "") + ours["content"]
