"""Tools of `dsv4 chat`: what the model calls is shown, and its result comes from the user or from a command."""

import json
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.chat_input import Input
from dsv4cli.errors import UsageError
from dsv4cli.output import Output

if TYPE_CHECKING:
    from dsv4cli.engine.prompt import Message, Tool


def read_tools(path: Path) -> "list[Tool]":
    """The tools of a JSON file: a list as in the OpenAI API, or an object that has it as `tools`. Raises UsageError."""
    from dsv4cli.engine.inputs import BOM, read_text
    from dsv4cli.engine.prompt import check_tools

    try:
        value = json.loads(read_text(path).removeprefix(BOM))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not JSON: {error}", "write a list of tools as for the OpenAI chat API") from None
    return check_tools(value.get("tools") if isinstance(value, dict) else value, f"{path}: tools")


def split_command(text: str) -> list[str]:
    """A command and its arguments, as a shell would part them. Raises UsageError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--tool-exec {text!r}: {error}", "close the quotes") from None
    if not words:
        raise UsageError("--tool-exec names no command", "give one that reads a call as JSON and prints JSON")
    return words


@dataclass
class Tools:
    """Carries out calls: with `command`, which gets each as JSON on stdin and prints JSON; without, by asking."""

    out: Output
    source: Input
    command: Sequence[str] = ()
    seconds: float = 60.0
    ask_first: bool = True

    def run(self, calls: list[dict[str, Any]]) -> "list[Message] | None":
        """The results as messages, in order; None when the user wants it to end here."""
        results: list[Message] = []
        try:
            for call in calls:
                content = self._result(call["function"])
                if content is None:
                    return None
                results.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        except EOFError:
            return None
        return results

    def _result(self, function: dict[str, Any]) -> str | None:
        self.out.line(f"{function['name']}({function['arguments']})")
        if not self.command:
            self.out.status(f"what does {function['name']} give? (Ctrl-D: nothing, the answer ends here)")
            return self.source.read("")
        if self.ask_first:
            self.out.status(f"run {shlex.join(self.command)}? y or n")
            if self.source.read("").strip().lower() not in ("y", "yes"):
                return None
        return self._execute(function)

    def _execute(self, function: dict[str, Any]) -> str:
        """What the command prints; where it fails, what went wrong, as JSON, for the model to read."""
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = function["arguments"]
        call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        try:
            printed = self._run(call)
            json.loads(printed)
        except OSError as error:
            return self._failed(f"the command cannot be run: {error.strerror}")
        except subprocess.TimeoutExpired:
            return self._failed(f"no result after {self.seconds:g} s")
        except subprocess.CalledProcessError as error:
            return self._failed(f"the command ended with {error.returncode}")
        except ValueError:
            return self._failed("the command printed no JSON")
        self.out.status(f"→ {printed}")
        return printed

    def _run(self, call: str) -> str:
        """In a session of its own, so that whatever it has started ends with it."""
        pipe = subprocess.PIPE
        with subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", start_new_session=True
        ) as process:
            try:
                printed, _ = process.communicate(call + "\n", timeout=self.seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, self.command)
        return printed.strip()

    def _failed(self, why: str) -> str:
        self.out.warning(why)
        return json.dumps({"error": why})
