"""Tool calls of `dsv4 chat`: shown to the user, and answered by the user or by a command."""

import json
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.chat.input import Input
from dsv4cli.commands.chat.tool_process import Ended, carry_out
from dsv4cli.errors import UsageError
from dsv4cli.output import Output, counted, size_text

if TYPE_CHECKING:
    from dsv4cli.commands.chat.backend import ChatBackend
    from dsv4cli.commands.chat.session import Session
    from dsv4cli.engine.text.prompt import Message, Tool

# maximum characters: of a result for the model; of each output of a failed command; of a result on the terminal
MOST_CHARACTERS, LAST_WORDS, SEEN = 20_000, 2_000, 200
# bytes kept of an output: at least MOST_CHARACTERS characters in UTF-8, 4 bytes each at most
KEPT = 4 * MOST_CHARACTERS + 4
# minimum token budget of a result: below it, the message around the result and an answer would not fit
FEWEST_TOKENS = 128
NOT_RUN = "no result; the answer ends here"


class Round(NamedTuple):
    """The tool calls of one answer.

    Attributes:
        number: Round of calls since the user's question, from 1.
        max_tokens: Maximum tokens of one result.
        tokens: Returns an upper bound on the number of tokens of a text.
        offered: Whether tools were offered to the model.
    """

    number: int
    max_tokens: int
    tokens: Callable[[str], int]
    offered: bool = True


def next_round(session: "Session", backend: "ChatBackend", calls: int) -> Round:
    """Return the round for the newest `calls` tool calls.

    Their results share half of the context that the last question and the messages after it leave free, so that an
    answer or another round always fits.
    """
    messages = session.prompt()
    asked = max(i for i, message in enumerate(messages) if message["role"] == "user")
    turn = [*(message for message in messages[:asked] if message["role"] == "system"), *messages[asked:]]
    number = sum(bool(message.get("tool_calls")) for message in messages[asked:])
    max_tokens = max(backend.left(turn) // 2 // calls, 0)
    return Round(number, max_tokens, backend.most_tokens, offered=bool(session.tools))


def read_tools(path: Path) -> "list[Tool]":
    """Read the tools in a JSON file: a list as in the OpenAI API, or an object with `tools`. Raises UsageError."""
    from dsv4cli.engine.text.inputs import read_text
    from dsv4cli.engine.text.prompt import check_tools

    try:
        value = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is not valid JSON: {error}", "use a list of tools in the format of the OpenAI chat API"
        ) from None
    return check_tools(value.get("tools") if isinstance(value, dict) else value, f"{path}: tools")


def split_command(text: str) -> list[str]:
    """Split a command line as a shell would. Raises UsageError, also if the program cannot be found."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--tool-exec {text!r}: {error}", "close the quotes") from None
    if not words:
        raise UsageError("--tool-exec is empty", "give a program that reads a call as JSON and prints its result")
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--tool-exec: cannot find an executable program {words[0]!r}",
            "use its path, quoted if it has spaces; make a script executable with chmod +x",
        )
    return words


@dataclass
class Tools:
    """Runs tool calls with a command, or asks the user for their results.

    Attributes:
        command: Reads each call as JSON from stdin and prints the result; if empty, the user types the results.
        seconds: Timeout of a call.
        ask_first: Ask before each call.
        rounds: Without `ask_first`, ask again after this many rounds of calls in a turn.
    """

    out: Output
    source: Input
    command: Sequence[str] = ()
    seconds: float = 60.0
    ask_first: bool = True
    rounds: int = 25

    def run(self, calls: list[dict[str, Any]], now: Round) -> "Iterator[Message]":
        """Run the calls in order and yield each result as a message as soon as it is known.

        Ends early if the user declines a call, if the rounds are used up, or if the context has no space for a result.
        """
        if not self.command and not now.offered:
            for call in calls:
                self._show(call["function"])
            self.out.status("the call has no result: no tools were offered to the model; use --tools FILE")
            return
        try:
            if not (self._has_space(now) and self._may_go_on(now.number)):
                return
            for call in calls:
                content = self._result(call["function"], now)
                if content is None:
                    return
                yield {"role": "tool", "tool_call_id": call["id"], "content": content}
        except EOFError:
            self.out.status(NOT_RUN)

    def _has_space(self, now: Round) -> bool:
        if now.max_tokens < FEWEST_TOKENS:
            self.out.warning("the context has no space for another tool result; the answer ends here")
        return now.max_tokens >= FEWEST_TOKENS

    def _may_go_on(self, number: int) -> bool:
        if not self.command or self.ask_first or number == 1 or (number - 1) % self.rounds:
            return True
        done = f"{counted(number - 1, 'round')} of tool calls in this turn"
        if sys.stdin is not None and sys.stdin.isatty():
            return self._agreed(f"{done}. Continue?")
        self.out.warning(
            f"{done}, and no terminal for confirmation; the answer ends here; to allow more, raise --max-rounds"
        )
        return False

    def _agreed(self, question: str) -> bool:
        while True:
            self.out.status(f"{question} (y/n)")
            word = self.source.read("").strip().lower()
            if word in ("y", "yes"):
                return True
            if word in ("n", "no"):
                self.out.status(NOT_RUN)
                return False

    def _show(self, function: dict[str, Any]) -> None:
        self.out.line(f"{function['name']}({function['arguments']})")

    def _result(self, function: dict[str, Any], now: Round) -> str | None:
        self._show(function)
        if not self.command:
            self.out.status(f"type the result of {function['name']} (Ctrl-D: no result, the answer ends here)")
            text = self.source.read("")
            return self._cut(text, now)
        if self.ask_first and not self._agreed(f"run {shlex.join(self.command)}?"):
            return None
        return self._execute(function, now)

    def _execute(self, function: dict[str, Any], now: Round) -> str:
        """Return the command's output unchanged. If it fails, return the error as JSON for the model to read."""
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        call = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        try:
            ended = carry_out(self.command, f"{call}\n", self.seconds, KEPT)
        except OSError as error:
            return self._failed(f"cannot run the command: {error.strerror}")
        if ended.code is None:
            return self._failed(f"no result after {self.seconds:g} s", ended, now)
        if ended.code:
            return self._failed(f"the command failed with exit code {ended.code}", ended, now)
        self._show_errors(ended)
        seen = " ".join(ended.out.split())
        self.out.status(f"→ {seen[:SEEN]}… ({size_text(ended.out_bytes)})" if len(seen) > SEEN else f"→ {seen}")
        return self._cut(ended.out, now, ended.out_bytes)

    def _failed(self, why: str, ended: Ended | None = None, now: Round | None = None) -> str:
        self.out.warning(why)
        if ended is None or now is None:
            return json.dumps({"error": why})
        self._show_errors(ended)
        words = {"stdout": ended.last_out[-LAST_WORDS:], "stderr": ended.last_err[-LAST_WORDS:]}
        texts = {name: text for name, text in words.items() if text}
        text = json.dumps({"error": why, **texts}, ensure_ascii=False)
        return self._cut(text, now)

    def _show_errors(self, ended: Ended) -> None:
        if ended.last_err:
            cut = f"(the end of {size_text(ended.err_bytes)})\n" if ended.err_bytes > LAST_WORDS else ""
            self.out.reasoning(f"{cut}{ended.last_err[-LAST_WORDS:]}\n")

    def _cut(self, text: str, now: Round, size: int = 0) -> str:
        """Return a result cut to the limits of characters and tokens, with a note at the end if it was cut.

        Args:
            size: Bytes of the whole output, if `text` is only its beginning.
        """
        low, high = 0, min(len(text), MOST_CHARACTERS)
        if now.tokens(text[:high]) > now.max_tokens:
            while low < high:
                middle = (low + high + 1) // 2
                low, high = (middle, high) if now.tokens(text[:middle]) <= now.max_tokens else (low, middle - 1)
        if high == len(text):
            return text
        size = max(size, len(text.encode(errors="replace")))
        part = f"the first {counted(high, 'character')} of {size_text(size)}"
        self.out.warning(f"the result is too long; the model gets {part}")
        return f"{text[:high]}\n[cut: {part}]"
