"""The session of `dsv4 chat`: its messages, the journal that no kill can take away, and files that others read."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4cli.errors import UsageError

if TYPE_CHECKING:
    from dsv4cli.engine.prompt import Message, Tool

SCHEMA = "dsv4.chat/1"


def state_folder(state_home: Path | None) -> Path:
    """Where journals and the history of inputs are; the XDG rules let a relative path count as none."""
    home = state_home if state_home is not None and state_home.is_absolute() else Path.home() / ".local" / "state"
    return home / "dsv4"


@dataclass
class Journal:
    """A file of JSON lines that say how the conversation became what it is: keep so many messages, add these.

    It is made with the first line, in a folder that nobody else can read; a line that has returned is on the disk.
    """

    folder: Path
    _path: Path | None = None
    _messages: "list[Message]" = field(default_factory=list)
    _tools: "list[Tool]" = field(default_factory=list)

    def write(self, messages: "Sequence[Message]", tools: "Sequence[Tool]") -> None:
        """Notes what has changed since the last line. Raises OSError."""
        messages, tools = list(messages), list(tools)
        if (messages, tools) == (self._messages, self._tools):
            return
        keep = 0
        while keep < min(len(messages), len(self._messages)) and messages[keep] == self._messages[keep]:
            keep += 1
        line: dict[str, Any] = {"keep": keep, "add": messages[keep:]}
        if tools != self._tools:
            line["tools"] = tools
        try:
            self._add(line)
        except OSError:  # half a line may be there: the next one begins a new file, with everything
            self._path, self._messages, self._tools = None, [], []
            raise
        self._messages, self._tools = messages, tools

    def _add(self, line: dict[str, Any]) -> None:
        from dsv4cli.engine.durable import sync_folder

        path = self._path
        if path is None:
            path = self._new_path()
            _append(path, [{"schema": SCHEMA}])
            sync_folder(self.folder)
        _append(path, [line])
        self._path = path

    def _new_path(self) -> Path:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.parent.chmod(0o700)
        started = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        nth = next(n for n in range(1000) if not (self.folder / f"{started}-{n}.jsonl").exists())
        return self.folder / f"{started}-{nth}.jsonl"


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    from dsv4cli.engine.durable import append

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        append(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    finally:
        os.close(file)


def read_journal(path: Path) -> "tuple[list[Message], list[Tool]]":
    """The conversation that a journal has come to; a last line that a kill has cut off does not count.

    Raises UsageError for a file that is no journal.
    """
    from dsv4cli.engine.prompt import check_messages, check_tools

    messages: list[Message] = []
    tools: list[Tool] = []
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # behind the last newline is nothing, or half a line
        for line in map(json.loads, lines[1:]):
            messages = messages[: line["keep"]] + line["add"]
            tools = line.get("tools", tools)
        return (check_messages(messages) if messages else []), check_tools(tools)
    except (OSError, ValueError, TypeError, KeyError, UsageError) as error:
        raise UsageError(
            f"{path} is no journal that can be continued: {error}", "move it away, or load a saved file with --session"
        ) from None


def newest_journal(folder: Path) -> Path:
    """The journal that was written last. Raises UsageError when there is none."""
    paths = folder.glob("*.jsonl")
    try:
        return max(paths, key=lambda path: (path.stat().st_mtime_ns, path.name))
    except ValueError:
        raise UsageError(
            f"there is no session to continue in {folder}", "start one: dsv4 chat; it is kept from its first answer on"
        ) from None


@dataclass
class Session:
    """The messages so far, without the tools, which join them in the prompt; `file` follows every saved change."""

    journal: Journal
    file: Path | None = None
    messages: "list[Message]" = field(default_factory=list)
    tools: "list[Tool]" = field(default_factory=list)

    def save(self) -> None:
        """Makes what has been said durable. Raises OSError."""
        self.journal.write(self.messages, self.tools)
        if self.file is not None:
            self.write_file(self.file)

    def write_file(self, path: Path) -> None:
        """The conversation as `dsv4 run --messages` and others read it; a kill leaves the old file or the new one.

        Raises OSError.
        """
        from dsv4cli.engine.durable import write_file

        text = json.dumps(self.document(), ensure_ascii=False, indent=1) + "\n"
        path = path.resolve()  # a link stays a link
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_file(path, text.encode(errors="surrogatepass"), beside, 0o600)
        finally:
            beside.unlink(missing_ok=True)

    def document(self) -> dict[str, Any]:
        """The conversation as the OpenAI API has it."""
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})

    def load_file(self, path: Path) -> None:
        """Takes the conversation of a file in place of this one. Raises UsageError."""
        from dsv4cli.engine.inputs import read_messages, read_text

        begun = "".join(read_text(path).split()) != '{"messages":[]}'  # ours, before the first question or after /clear
        messages = read_messages(path) if begun else []
        tools = [tool for message in messages if message["role"] == "system" for tool in message.get("tools") or ()]
        plain = [{key: value for key, value in message.items() if key != "tools"} for message in messages]
        self.messages = [one for one in plain if one["role"] != "system" or one.get("content")]
        self.tools = tools

    def prompt(self) -> "list[Message]":
        """What the model is asked: the messages, with the tools in the system message."""
        from dsv4cli.engine.prompt import with_tools

        return with_tools(self.messages, self.tools)

    @property
    def system(self) -> str:
        """The text of the system message, empty without one."""
        from dsv4cli.engine.turns import text_of

        return text_of(self.messages[0].get("content")) if self._has_system() else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[1:] if self._has_system() else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def clear(self) -> None:
        """Forgets everything but the system message."""
        self.messages = self.messages[:1] if self._has_system() else []

    def take_back(self) -> str:
        """Removes the last question and what follows it; its text. Raises UsageError when nothing was asked."""
        from dsv4cli.engine.turns import text_of

        asked = [n for n, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UsageError("nothing has been asked yet", "write a question, or /help")
        text = text_of(self.messages[asked[-1]]["content"])
        del self.messages[asked[-1] :]
        return text

    def last_answer(self) -> "Message":
        """The assistant's last message. Raises UsageError when there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message
        raise UsageError("there is no answer yet", "ask something first")
