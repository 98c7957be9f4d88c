"""The session of `dsv4 chat`: its messages, and the files that store them."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4cli.commands.chat.journal import SessionChoices, SessionJournal, read_journal
from dsv4cli.errors import UsageError

if TYPE_CHECKING:
    from dsv4cli.engine.text.prompt import Message, Tool


class FileChanged(UsageError):
    """Another program, perhaps another chat, changed the session's file since it was read or written here."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            f"{file} was changed by another program since it was read",
            f"to read it again, use /load {file}; to overwrite it with this conversation, use /save {file}",
        )


@dataclass
class Session:
    """The messages and tools of a conversation, and where they are saved.

    Attributes:
        file: Rewritten at every save, if given.
        messages: Without the tools; `prompt` adds those.
    """

    journal: SessionJournal
    file: Path | None = None
    messages: "list[Message]" = field(default_factory=list)
    tools: "list[Tool]" = field(default_factory=list)
    choices: SessionChoices = field(default_factory=SessionChoices)
    _seen: str = ""  # SHA-256 of the file when it was last read or written here

    def save(self) -> None:
        """Save the conversation. Raises OSError, or FileChanged if only the journal was written."""
        self.journal.write(self.messages, self.tools, self.choices)
        if self.file is not None:
            with _alone(self.file.resolve().parent):
                self.check_file()
                self.write_file(self.file)

    def check_file(self) -> None:
        """Raise FileChanged if another program wrote the file."""
        if self.file is None:
            return
        with suppress(OSError):  # a missing file loses nothing; any other error will also fail the write
            if _digest(self.file.read_bytes()) != self._seen:
                raise FileChanged(self.file)

    def write_file(self, path: Path) -> None:
        """Write the conversation in the format of `dsv4 run --messages`. The write is atomic.

        Raises OSError.
        """
        from dsv4cli.engine.system.atomic import write_file

        content = (json.dumps(self.document(), ensure_ascii=False, indent=1) + "\n").encode(errors="surrogatepass")
        path = path.resolve()  # so that a symbolic link stays a link
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_file(path, content, temporary, 0o600)
        finally:
            temporary.unlink(missing_ok=True)
        self._note(path, content)

    def _note(self, path: Path, content: bytes) -> None:
        if self.file is not None and path.resolve() == self.file.resolve():
            self._seen = _digest(content)

    def document(self) -> dict[str, Any]:
        """Return the conversation in the format of the OpenAI API."""
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})

    def load_file(self, path: Path) -> None:
        """Replace this conversation with a file's. An empty file is an empty conversation. Raises UsageError."""
        from dsv4cli.engine.text.inputs import decoded, name_of, parse_messages, read_content
        from dsv4cli.engine.text.prompt import without_tools

        content, name = read_content(path), name_of(path)
        text = decoded(content, name)
        tools = _tools_without_messages(text)
        self.messages, named = without_tools(parse_messages(text, name) if tools is None else [])
        self.tools = tools or named
        self._note(path, content)

    def take_up(self, path: Path) -> None:
        """Continue the conversation of a journal, in a new journal.

        `file` is reset and keeps its content, because it holds another conversation. Raises UsageError.
        """
        kept = read_journal(path)
        self.messages, self.tools, self.file = kept.messages, kept.tools, None
        self.choices = kept.choices or self.choices
        self.journal = SessionJournal(self.journal.folder, path.stem)

    def begin_anew(self) -> None:
        """Start another session with the same system message. The current one keeps its journal and its file."""
        self.clear()
        self.journal, self.file = SessionJournal(self.journal.folder), None

    def prompt(self) -> "list[Message]":
        """Return the messages to send to the model, with the tools in the system message."""
        from dsv4cli.engine.text.prompt import with_tools

        return with_tools(self.messages, self.tools)

    @property
    def system(self) -> str:
        """Text of the system message; empty if there is none."""
        from dsv4cli.engine.text.turns import text_of

        return text_of(self.messages[0].get("content")) if self._has_system() else ""

    @system.setter
    def system(self, text: str) -> None:
        rest = self.messages[1:] if self._has_system() else self.messages
        self.messages = [*([{"role": "system", "content": text}] if text else []), *rest]

    def _has_system(self) -> bool:
        return bool(self.messages) and self.messages[0]["role"] == "system"

    def clear(self) -> None:
        """Remove all messages except the system message."""
        self.messages = self.messages[:1] if self._has_system() else []

    def take_back(self) -> str:
        """Remove the last question and all messages after it. Return its text. Raises UsageError if there is none."""
        text = self.last_question()
        while self.messages.pop()["role"] != "user":
            pass
        return text

    def take_back_answer(self) -> None:
        """Remove all messages after the last tool results."""
        while self.messages[-1]["role"] != "tool":
            self.messages.pop()

    def has_results(self) -> bool:
        """Return whether tool calls ran in the last turn."""
        roles = [message["role"] for message in self.messages]
        return "tool" in roles and "user" not in roles[len(roles) - roles[::-1].index("tool") :]

    def last_question(self) -> str:
        """Return the last user message. Raises UsageError if there is none."""
        from dsv4cli.engine.text.turns import text_of

        for message in reversed(self.messages):
            if message["role"] == "user":
                return text_of(message["content"])
        raise UsageError("there is no question yet", "type a question, or /help")

    def last_answer(self) -> "Message":
        """Return the assistant's last message. Raises UsageError if there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message
        raise UsageError("there is no answer yet", "ask something first")


def _tools_without_messages(text: str) -> "list[Tool] | None":
    """Return the tools of a file that has no messages, or None for any other content.

    Such a file is what a session writes before its first question: empty, an empty list, or an object whose messages
    are empty. Raises UsageError.
    """
    from dsv4cli.engine.text.prompt import check_tools

    try:
        value = json.loads(text.strip() or "[]")
    except (ValueError, RecursionError):
        return None
    if value == []:
        return []
    if not isinstance(value, dict) or value.get("messages") != [] or value.keys() - {"messages", "tools"}:
        return None
    return check_tools(value.get("tools") or [])


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder, so that no other chat checks and writes a file in it at the same time.

    File systems without locks are not protected. Raises OSError.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
