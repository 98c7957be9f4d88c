"""Session journals of `dsv4 chat`: crash-safe files, one per session, and how to find them."""

import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4cli.errors import UsageError

if TYPE_CHECKING:
    from dsv4cli.engine.text.prompt import Message, Tool

SCHEMA = "dsv4.chat/1"
# maximum characters of the first question in a journal's name
NAME_LENGTH = 40
START = "start one with `dsv4 chat`; it is saved with its first answer"


def state_folder(state_home: Path | None) -> Path:
    """Return the folder of journals and input history. Ignores a relative XDG_STATE_HOME, as the XDG rules require."""
    home = state_home if state_home is not None and state_home.is_absolute() else Path.home() / ".local" / "state"
    return home / "dsv4"


@dataclass(frozen=True)
class SessionChoices:
    """Settings of a session. url: None for a model in this process; sampling parameters: None for the model's own."""

    model: str = "nano"
    think: str = "off"
    temperature: float | None = None
    top_p: float | None = None
    url: str | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


def _check_choices(value: Any) -> SessionChoices:
    """Return a journal's choices. Raises UsageError, ValueError or TypeError if they are invalid."""
    from dsv4cli.engine.settings import Sampling

    one = SessionChoices(**value)
    Sampling().chosen(one.temperature, one.top_p, 0, vars(one))
    if not (isinstance(one.model, str) and isinstance(one.think, str) and isinstance(one.url, str | None)):
        raise ValueError("the model, the thinking level or the URL is not a string")
    return one


@dataclass(frozen=True)
class Kept:
    """Contents of a journal. choices: None in journals of older versions."""

    messages: "list[Message]"
    tools: "list[Tool]"
    choices: SessionChoices | None


@dataclass
class SessionJournal:
    """A JSON-lines file of changes to a conversation. Each line says how many messages to keep and which to add.

    The first line creates the file, in a private folder, named after the time and the first question. A line is on the
    disk when `write` returns.

    Attributes:
        follows: Name of the journal that this one continues, which is then hidden from lists.
    """

    folder: Path
    follows: str = ""
    _path: Path | None = None
    _messages: "list[Message]" = field(default_factory=list)
    _tools: "list[Tool]" = field(default_factory=list)
    _choices: SessionChoices | None = None

    def write(self, messages: "Sequence[Message]", tools: "Sequence[Tool]", choices: SessionChoices) -> None:
        """Append the changes since the last line. A session without messages starts no journal. Raises OSError."""
        messages, tools = list(messages), list(tools)
        if (messages, tools, choices) == (self._messages, self._tools, self._choices):
            return
        if self._path is None and not messages:
            return
        keep = 0
        while keep < min(len(messages), len(self._messages)) and messages[keep] == self._messages[keep]:
            keep += 1
        line: dict[str, Any] = {"keep": keep, "add": messages[keep:]}
        if tools != self._tools:
            line["tools"] = tools
        if choices != self._choices:
            line["choices"] = asdict(choices)
        try:
            self._add(line)
        except OSError:  # the last line may be incomplete: the next write starts a new file with the whole conversation
            self._path, self._messages, self._tools, self._choices = None, [], [], None
            raise
        self._messages, self._tools, self._choices = messages, tools, choices

    @property
    def name(self) -> str:
        """Name of the session in `/sessions`; empty before the first line."""
        return "" if self._path is None else self._path.stem

    def _add(self, line: dict[str, Any]) -> None:
        from dsv4cli.engine.system.atomic import sync_folder

        if self._path is not None:
            _append(self._path, [line])
            return
        path = self._new_path(line["add"])
        try:
            _append(path, [{"schema": SCHEMA} | ({"follows": self.follows} if self.follows else {}), line])
            sync_folder(self.folder)
        except OSError:
            with suppress(OSError):
                path.unlink()
            raise
        self._path = path

    def _new_path(self, messages: "Sequence[Message]") -> Path:
        """Create an empty file with a unique name."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.parent.chmod(0o700)
        name = "-".join(part for part in (time.strftime("%Y%m%d-%H%M%S"), _slug(first_question(messages))) if part)
        for nth in range(1, 1000):
            path = self.folder / f"{name}{f'-{nth}' if nth > 1 else ''}.jsonl"
            try:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                continue
            return path
        raise FileExistsError(17, "a thousand journals have this name", str(self.folder / name))


def _append(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    from dsv4cli.engine.system.atomic import append

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        append(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    finally:
        os.close(file)


def first_question(messages: "Sequence[Message]") -> str:
    """Return the first user message on one line; empty if there is none."""
    from dsv4cli.engine.text.turns import text_of

    return next((" ".join(text_of(one["content"]).split()) for one in messages if one["role"] == "user"), "")


def _slug(text: str) -> str:
    """Return the letters and digits of a text as part of a file name."""
    kept = "".join(character if character.isalnum() else " " for character in text[: 4 * NAME_LENGTH].lower())
    encoding = sys.getfilesystemencoding()  # characters that file names cannot encode are dropped
    return "-".join(kept.encode(encoding, "ignore").decode(encoding).split())[:NAME_LENGTH].strip("-")


def read_journal(path: Path) -> Kept:
    """Return the conversation in a journal. An incomplete last line is ignored.

    Raises UsageError if the file is not a journal.
    """
    from dsv4cli.engine.text.prompt import check_messages, check_tools

    messages: list[Message] = []
    tools: list[Tool] = []
    choices = None
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # after the last newline there is nothing, or an incomplete line
        for line in map(json.loads, lines[1:]):
            messages = messages[: line["keep"]] + line["add"]
            tools = line.get("tools", tools)
            choices = line.get("choices", choices)
        checked = None if choices is None else _check_choices(choices)
        return Kept(check_messages(messages) if messages else [], check_tools(tools), checked)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, UsageError) as error:
        raise UsageError(
            f"cannot continue the session in {path}: {error}",
            "move the file away, or load a saved conversation with --session",
        ) from None


def journals(folder: Path) -> list[Path]:
    """Return the journals, most recently written first, without those continued by another one."""
    paths = {path.stem: path for path in folder.glob("*.jsonl")}
    followed = {_follows(path) for path in paths.values()}
    shown = [path for name, path in paths.items() if name not in followed]
    return sorted(shown, key=lambda path: (_changed(path), path.name), reverse=True)


def _changed(path: Path) -> int:
    """Return the time of the last write in ns; 0 if the file is gone."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _follows(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
        return str(first["follows"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def find_journal(folder: Path, which: str, listing: str = "dsv4 chat --sessions") -> Path:
    """Return the journal with this number in `journals`, this name, or this prefix of one name. Raises UsageError.

    Args:
        listing: The command that lists the sessions, for errors.
    """
    shown = journals(folder)
    if which.isdecimal() and 1 <= int(which) <= len(shown):
        return shown[int(which) - 1]
    names = sorted(path for path in folder.glob("*.jsonl") if which and path.stem.startswith(which))
    exact = [path for path in names if path.stem == which]
    if len(exact or names) == 1:
        return (exact or names)[0]
    if not shown:
        raise UsageError(f"there is no session to continue in {folder}", START)
    what = f"{len(names)} sessions begin with {which!r}" if names else f"there is no session {which!r}"
    raise UsageError(what, f"list them with `{listing}` and use a number or a name")


def session_rows(folder: Path, most: int | None = None) -> list[list[str]]:
    """Return the sessions as table rows: number, time of the last change, messages, model, first question."""
    return [[f"{number}", *_row(path)] for number, path in enumerate(journals(folder)[:most], 1)]


def _row(path: Path) -> list[str]:
    when = datetime.fromtimestamp(_changed(path) / 1e9).strftime("%Y-%m-%d %H:%M")
    try:
        kept = read_journal(path)
    except UsageError:
        return [when, "", "", f"{path.name} cannot be read"]
    question = first_question(kept.messages)
    model = kept.choices.model if kept.choices else ""
    return [when, f"{len(kept.messages)}", model, question if len(question) <= 60 else f"{question[:59]}…"]
