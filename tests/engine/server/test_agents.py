"""What agents send, as published captures and their sources show it: the second turn hits the prefix cache.

Each shape has what its agent changes from request to request: nonces, dates, cache marks, and where files are.
"""

from typing import Any

import pytest

from dsv4cli.engine.server.service import Service
from tests.support.serving import Served

RULES = "\n".join(f"- Rule {number}: read the file before you change it, and name each source." for number in range(60))
WEATHER = "What is the weather in Paris?"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}}
DESCRIPTION = "Get the weather in a city."
FUNCTION = {"name": "get_weather", "description": DESCRIPTION, "parameters": SCHEMA}
# at least this share of the tokens that a request repeats is cached
LEAST = 0.95


class Prompts(list[list[int]]):
    """The token ids of each prompt that a server encodes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        honest = Service.prompt

        def prompt(service: Service, *given: Any) -> list[int]:
            ids = honest(service, *given)
            self.append(ids)
            return ids

        patch.setattr(Service, "prompt", prompt)

    @property
    def repeated(self) -> int:
        """How many tokens the last prompt shares with the one before, from the start."""
        *_, first, second = self
        return next((n for n, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), len(first))


class ClaudeCode:
    """/v1/messages: a billing line with a nonce, reminders in user turns, cache marks that move, thinking sent back."""

    path = "/v1/messages"

    def __init__(self) -> None:
        reminder = (
            "<system-reminder>\n# claudeMd\nUse tabs.\n# currentDate\nToday's date is 2026-11-29.\n</system-reminder>"
        )
        question = [{"type": "text", "text": reminder}, {"type": "text", "text": WEATHER, **MARK}]
        self.messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        self.turn = 0

    def body(self) -> dict[str, Any]:
        self.turn += 1
        head = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={self.turn * 7919:05x};"
        system = [
            {"type": "text", "text": head},
            {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude.", **MARK},
            {"type": "text", "text": f"{RULES}\n<env>\nWorking directory: /work\nPlatform: linux\n</env>", **MARK},
        ]
        tool = {"name": "get_weather", "description": DESCRIPTION, "input_schema": SCHEMA}
        return {
            "system": system, "messages": self.messages, "tools": [tool], "max_tokens": 60,
            "metadata": {"user_id": f"user_1_session_{self.turn}"}, "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        }  # fmt: skip

    def take(self, document: dict[str, Any]) -> int:
        """Continue after a response. Return how many tokens were cached."""
        content = document["content"]
        self.messages[-1]["content"][-1].pop("cache_control")
        self.messages.append({"role": "assistant", "content": content})
        calls = [one for one in content if one["type"] == "tool_use"]
        answer: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": one["id"], "content": '{"temperature": 21}'} for one in calls
        ]
        answer += [{"type": "text", "text": "<system-reminder>\nThe todo list is empty.\n</system-reminder>", **MARK}]
        self.messages.append({"role": "user", "content": answer})
        return document["usage"]["cache_read_input_tokens"]


MARK = {"cache_control": {"type": "ephemeral"}}


class Codex:
    """/v1/responses: instructions, a developer message, the environment, sealed reasoning, no stored responses."""

    path = "/v1/responses"

    def __init__(self) -> None:
        environment = (
            "<environment_context>\n<cwd>/work</cwd>\n<current_date>2026-11-29</current_date>\n</environment_context>"
        )
        self.items = [_item("developer", "<permissions>never ask</permissions>"), _item("user", environment)]
        self.items.append(_item("user", WEATHER))

    def body(self) -> dict[str, Any]:
        return {
            "instructions": f"You are Codex, based on GPT-5.\n{RULES}", "input": self.items, "store": False,
            "tools": [{"type": "function", "strict": False, **FUNCTION}], "tool_choice": "auto",
            "parallel_tool_calls": False, "include": ["reasoning.encrypted_content"], "prompt_cache_key": "019a",
            "reasoning": {"effort": "high", "summary": "auto"}, "max_output_tokens": 80,
        }  # fmt: skip

    def take(self, document: dict[str, Any]) -> int:
        for one in document["output"]:
            self.items.append({name: value for name, value in one.items() if name not in ("id", "status")})
            if one["type"] == "function_call":
                result = {"type": "function_call_output", "call_id": one["call_id"], "output": '{"temperature": 21}'}
                self.items.append(result)
        self.items.append(_item("user", "Go on."))
        return document["usage"]["input_tokens_details"]["cached_tokens"]


def _item(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


class OpenCode:
    """/v1/chat/completions of the AI SDK: two system messages, with the date of the day; no reasoning sent back."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        environment = "<env>\n  Working directory: /work\n  Platform: linux\n  Today's date: Sun Nov 29 2026\n</env>"
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": f"You are opencode, an interactive CLI tool.\n{RULES}"},
            {"role": "system", "content": environment},
            {"role": "user", "content": WEATHER},
        ]

    def body(self) -> dict[str, Any]:
        tools = [{"type": "function", "function": FUNCTION}]
        return {"messages": self.messages, "tools": tools, "tool_choice": "auto", "max_tokens": 60, "temperature": 0}

    def take(self, document: dict[str, Any]) -> int:
        message = document["choices"][0]["message"]
        message.pop("reasoning_content", None)
        message.pop("reasoning", None)
        self.messages.append(message)
        for call in message.get("tool_calls") or ():
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": '{"temperature": 21}'})
        if not message.get("tool_calls"):
            self.messages.append({"role": "user", "content": "Go on."})
        return document["usage"]["prompt_tokens_details"]["cached_tokens"]


class Aider:
    """/v1/chat/completions without tools: the files of the chat move behind the history, a reminder ends each turn."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        self.current = "Add a docstring to the first function."

    def body(self) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": f"Act as an expert software developer.\n{RULES}"},
            *_exchange("Change get_factorial() to use math.factorial", "Here is the block:\n<<<< SEARCH"),
            *_exchange("Here are summaries of some files in my repo:\na.py: def f(x)", "Ok, I won't edit them."),
            *self.done,
            *_exchange("I have *added these files to the chat*:\n\nb.py\n" + "x = 1\n" * 20, "Ok."),
            {"role": "user", "content": f"{self.current}\n\nReply with SEARCH/REPLACE blocks only."},
        ]
        return {"messages": messages, "temperature": 0, "max_tokens": 30}

    def take(self, document: dict[str, Any]) -> int:
        self.done += _exchange(self.current, document["choices"][0]["message"]["content"])
        self.current = "Now rename the second one."
        return document["usage"]["prompt_tokens_details"]["cached_tokens"]


def _exchange(said: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]


class Cline:
    """/v1/chat/completions without tools: calls are XML in the text, and each user turn ends with the time."""

    path = "/v1/chat/completions"

    def __init__(self) -> None:
        system = f"You are Cline, a software engineer.\n# Tools\n<read_file><path></path></read_file>\n{RULES}"
        self.messages: list[dict[str, Any]] = [
            {"role": "system", "content": system},
            self._said("<task>\nFix it\n</task>"),
        ]

    def _said(self, text: str) -> dict[str, Any]:
        time = f"11/29/2026, 10:0{len(getattr(self, 'messages', ()))}:07 AM"
        details = f"<environment_details>\n# Current Time\n{time}\n# Context Window Usage\n3%\n</environment_details>"
        return {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": details}]}

    def body(self) -> dict[str, Any]:
        return {"messages": self.messages, "temperature": 0, "max_tokens": 30}

    def take(self, document: dict[str, Any]) -> int:
        self.messages.append({"role": "assistant", "content": document["choices"][0]["message"]["content"]})
        self.messages.append(self._said("[read_file for 'a.py'] Result:\nx = 1"))
        return document["usage"]["prompt_tokens_details"]["cached_tokens"]


AGENTS = [ClaudeCode, Codex, OpenCode, Aider, Cline]


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.__name__)
def test_a_second_turn_finds_what_it_repeats_in_the_cache(nano: Served, monkeypatch: pytest.MonkeyPatch, agent: Any):
    talk, prompts = agent(), Prompts(monkeypatch)
    for turn in range(3):
        status, document = nano.post(talk.path, talk.body())
        assert status == 200, document
        cached = talk.take(document)
        if turn:
            assert prompts.repeated > 1000
            assert cached >= LEAST * prompts.repeated, (cached, prompts.repeated)
