"""Clients of Node, as they are, against the server: each one streams, calls a tool, parses JSON, returns reasoning.

A client that is not installed is skipped. The table of docs/guides/serve.md has the versions that were tested:
npm install --prefix DIR openai @anthropic-ai/sdk ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic
export NODE_PATH=DIR/node_modules
"""

import json
import shutil
import subprocess

import pytest

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from tests.support.client_script import ANSWER, KEY, REPORT, SUM, THOUGHT, TOTAL, WEATHER, says
from tests.support.program import ROOT
from tests.support.scripted_engine import scripted

pytestmark = pytest.mark.slow

PACKAGES = {
    "openai-chat": "openai",
    "openai-responses": "openai",
    "anthropic": "@anthropic-ai/sdk",
    "ai-sdk-responses": "@ai-sdk/openai",
    "ai-sdk-compatible": "@ai-sdk/openai-compatible",
    "ai-sdk-anthropic": "@ai-sdk/anthropic",
}


@pytest.fixture(scope="module")
def server():
    with scripted(says, accounts=Accounts([ApiKey("own", KEY.encode())])) as one:
        yield one
    assert not [line for line in one.lines if " 400, " in line or " 500, " in line]


@pytest.fixture(params=PACKAGES)
def ask(request, server):
    """Returns what a client makes of a question, in one of its capabilities."""
    node, package = shutil.which("node"), PACKAGES[request.param]
    check = [node or "false", "-e", f"require('{package}')"]
    if node is None or subprocess.run(check, capture_output=True, check=False).returncode:
        pytest.skip(f"needs node and {package}")

    def run(capability, question):
        script = ROOT / "tests" / "support" / "node_clients.cjs"
        command = [node, script, request.param, capability, server.url, KEY, question]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, stdin=subprocess.DEVNULL)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_streams(ask, streams):
    assert ask("stream", SUM) == ANSWER
    assert len(streams) == 1


def test_calls_a_tool(ask):
    assert ask("tools", WEATHER) == REPORT


def test_parses_json(ask):
    assert ask("parse", TOTAL) == 42


def test_returns_the_reasoning(ask):
    assert ask("reason", SUM) == THOUGHT
