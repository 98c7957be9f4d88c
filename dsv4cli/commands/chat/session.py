"""The session of `dsv4 chat`: its messages, and the files that keep them."""

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
    """The file of a session is not as it was read or written here: another chat, or another program, has changed it."""

    def __init__(self, file: Path) -> None:
        super().__init__(
            f"{file} was changed by another program since it was read",
            f"to read it again, use /load {file}; to overwrite it with this conversation, use /save {file}",
        )


@dataclass
class Session:
    """The messages so far, without the tools, which join them in the prompt; `file` follows every saved change."""

    journal: SessionJournal
    file: Path | None = None
    messages: "list[Message]" = field(default_factory=list)
    tools: "list[Tool]" = field(default_factory=list)
    choices: SessionChoices = field(default_factory=SessionChoices)
    _seen: str = ""  # what the file held when it was read or written here

    def save(self) -> None:
        """Makes what has been said durable. Raises OSError, and FileChanged where only the journal has it."""
        self.journal.write(self.messages, self.tools, self.choices)
        if self.file is not None:
            with _alone(self.file.resolve().parent):
                self.check_file()
                self.write_file(self.file)

    def check_file(self) -> None:
        """Raises FileChanged where somebody else has written the file."""
        if self.file is None:
            return
        with suppress(OSError):  # where it is not there, nothing is lost; any other reason prevents writing too
            if _digest(self.file.read_bytes()) != self._seen:
                raise FileChanged(self.file)

    def write_file(self, path: Path) -> None:
        """The conversation as `dsv4 run --messages` and others read it; a kill leaves the old file or the new one.

        Raises OSError.
        """
        from dsv4cli.engine.system.atomic import write_file

        content = (json.dumps(self.document(), ensure_ascii=False, indent=1) + "\n").encode(errors="surrogatepass")
        path = path.resolve()  # a link stays a link
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            write_file(path, content, beside, 0o600)
        finally:
            beside.unlink(missing_ok=True)
        self._note(path, content)

    def _note(self, path: Path, content: bytes) -> None:
        if self.file is not None and path.resolve() == self.file.resolve():
            self._seen = _digest(content)

    def document(self) -> dict[str, Any]:
        """The conversation as the OpenAI API has it."""
        return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})

    def load_file(self, path: Path) -> None:
        """Takes the conversation of a file in place of this one; an empty file has an empty one. Raises UsageError."""
        from dsv4cli.engine.text.inputs import decoded, name_of, parse_messages, read_content
        from dsv4cli.engine.text.prompt import without_tools

        content, name = read_content(path), name_of(path)
        text = decoded(content, name)
        tools = _tools_without_messages(text)
        self.messages, named = without_tools(parse_messages(text, name) if tools is None else [])
        self.tools = tools or named
        self._note(path, content)

    def take_up(self, path: Path) -> None:
        """Goes on with the conversation of a journal, in a new one; a file of messages stays as it is, for another
        conversation. Raises UsageError."""
        kept = read_journal(path)
        self.messages, self.tools, self.file = kept.messages, kept.tools, None
        self.choices = kept.choices or self.choices
        self.journal = SessionJournal(self.journal.folder, path.stem)

    def begin_anew(self) -> None:
        """Begins another session with the same system message; this one stays as it is, in its journal and its file."""
        self.clear()
        self.journal, self.file = SessionJournal(self.journal.folder), None

    def prompt(self) -> "list[Message]":
        """What the model is asked: the messages, with the tools in the system message."""
        from dsv4cli.engine.text.prompt import with_tools

        return with_tools(self.messages, self.tools)

    @property
    def system(self) -> str:
        """The text of the system message, empty without one."""
        from dsv4cli.engine.text.turns import text_of

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
        text = self.last_question()
        while self.messages.pop()["role"] != "user":
            pass
        return text

    def take_back_answer(self) -> None:
        """Remove what follows the last results of calls."""
        while self.messages[-1]["role"] != "tool":
            self.messages.pop()

    def has_results(self) -> bool:
        """Whether calls of the last turn were carried out."""
        roles = [message["role"] for message in self.messages]
        return "tool" in roles and "user" not in roles[len(roles) - roles[::-1].index("tool") :]

    def last_question(self) -> str:
        """What was asked last. Raises UsageError when nothing was."""
        from dsv4cli.engine.text.turns import text_of

        for message in reversed(self.messages):
            if message["role"] == "user":
                return text_of(message["content"])
        raise UsageError("there is no question yet", "type a question, or /help")

    def last_answer(self) -> "Message":
        """The assistant's last message. Raises UsageError when there is none."""
        for message in reversed(self.messages):
            if message["role"] == "assistant":
                return message
        raise UsageError("there is no answer yet", "ask something first")


def _tools_without_messages(text: str) -> "list[Tool] | None":
    """The tools of a file of a session without messages, as before its first question: an empty file, an empty list, or
    no messages beside tools; None for any other. Raises UsageError."""
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
    """No other chat looks at a file of the folder and then writes it meanwhile; a file system without locks has none.

    Raises OSError.
    """
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
