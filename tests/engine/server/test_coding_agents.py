"""Coding agents, as they are, against the server: each one edits a file as a scripted model says.

An agent that is not installed is skipped. The table of docs/guides/serve.md has the versions that were tested:
npm install --prefix DIR @anthropic-ai/claude-code opencode-ai; export NODE_PATH=DIR/node_modules
pip install aider-chat, in an environment of its own, with `aider` on the PATH
"""

import json
import os
import shutil
import subprocess

import pytest

from dsv4cli.engine.server.accounts import Accounts
from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.text.tokens import THINK_END, THINK_START, USER
from tests.support.client_script import KEY, call
from tests.support.scripted_engine import scripted

pytestmark = pytest.mark.slow

TASK, DONE = "Replace old by new in notes.txt.", "The file is changed."
COMMAND = "sed -i s/old/new/ notes.txt; cat notes.txt"


def program(name):
    """Return the path of a program of npm or on the PATH. Skips the test if there is none."""
    folders = [f"{folder}/.bin" for folder in os.environ.get("NODE_PATH", "").split(os.pathsep) if folder]
    found = shutil.which(name, path=os.pathsep.join([*folders, os.environ["PATH"]]))
    return found or pytest.skip(f"needs {name}")


def edits_with(tool, **more):
    """Return a script that calls a tool of the agent for shell commands, and says afterwards that it is done."""

    def says(prompt):
        thought = f"I run a command.{THINK_END}" if prompt.endswith(THINK_START) else ""
        last = prompt.rpartition(USER)[2]
        if "new words" in last:
            return thought + DONE
        if TASK in last and f'"name": "{tool}"' in prompt:
            return thought + call(tool, command=COMMAND, **more)
        return thought + "A title"

    return says


def rewrites(prompt):
    """Answer with a block of aider's format `diff`."""
    thought = f"I rewrite it.{THINK_END}" if prompt.endswith(THINK_START) else ""
    return f"{thought}notes.txt\n```\n<<<<<<< SEARCH\nold words\n=======\nnew words\n>>>>>>> REPLACE\n```\n"


@pytest.fixture
def agent(tmp_path):
    """Runs an agent in a folder with notes.txt, and returns what it prints."""
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "notes.txt").write_text("old words\n")

    def run(*command, **variables):
        own = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **variables}
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200, stdin=subprocess.DEVNULL,
                              cwd=work, env=own)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert (work / "notes.txt").read_text() == "new words\n", done.stdout + done.stderr
        return done.stdout

    run.home = home
    return run


def serving_to(script, **options):
    return scripted(script, accounts=Accounts([ApiKey("own", KEY.encode())]), **options)


def check(server, path, streams):
    """Check that every answer on a path was streamed, that the model was asked to think, and that nothing failed."""
    answers = [line for line in server.lines if f" {path} 200" in line]
    assert answers
    assert len(streams) >= 1
    assert any(prompt.endswith(THINK_START) for prompt in server.engine.prompts)
    assert not [line for line in server.lines if " 400, " in line or " 500, " in line]


def test_claude_code(agent, streams):
    claude = program("claude")
    with serving_to(edits_with("Bash", description="Edit the file"), think="high") as server:
        own = {"ANTHROPIC_BASE_URL": server.url, "ANTHROPIC_AUTH_TOKEN": KEY, "ANTHROPIC_MODEL": "nano",
               "ANTHROPIC_SMALL_FAST_MODEL": "nano", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
               "MAX_THINKING_TOKENS": "1024"}  # fmt: skip
        assert DONE in agent(claude, "-p", TASK, "--allowedTools", "Bash", **own)
        check(server, "/v1/messages", streams)
        assert cached_share(server) > 0.95


def test_opencode(agent, streams):
    opencode = program("opencode")
    with serving_to(edits_with("bash", description="Edit the file"), think="high") as server:
        model = {"name": "nano", "reasoning": True, "tool_call": True, "limit": {"context": 100_000, "output": 4096}}
        provider = {"npm": "@ai-sdk/openai-compatible", "name": "own", "models": {"nano": model},
                    "options": {"baseURL": f"{server.url}/v1", "apiKey": KEY}}  # fmt: skip
        config = {"provider": {"own": provider}, "permission": {"bash": "allow"}, "autoupdate": False}
        (agent.home / "opencode.json").write_text(json.dumps(config))
        own = {"OPENCODE_CONFIG": str(agent.home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"}
        assert DONE in agent(opencode, "run", "-m", "own/nano", TASK, **own)
        check(server, "/v1/chat/completions", streams)
        assert cached_share(server) > 0.95


def test_aider(agent, streams):
    aider = program("aider")
    with serving_to(rewrites, think="high") as server:
        options = ["--model", "openai/nano", "--edit-format", "diff", "--no-git", "--yes-always", "--no-check-update",
                   "--no-show-model-warnings", "--analytics-disable", "--message", TASK]  # fmt: skip
        own = {"OPENAI_API_BASE": f"{server.url}/v1", "OPENAI_API_KEY": KEY, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
        assert "Applied edit to notes.txt" in agent(aider, *options, "notes.txt", **own)
        check(server, "/v1/chat/completions", streams)


def cached_share(server):
    """Return the part of the last prompt that was found in the prefix cache, from the log."""
    words = next(line for line in reversed(server.lines) if " cached" in line).replace(",", "").split()
    return int(words[words.index("cached") - 1]) / int(words[words.index("+") - 1])
