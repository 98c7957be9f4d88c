"""What begins with a slash in `dsv4 chat`: one table of commands, and what each does."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from dsv4cli.commands.chat_turn import Chat
from dsv4cli.commands.run_experts import tell_traffic
from dsv4cli.errors import UsageError
from dsv4cli.output import counted


class Slash(NamedTuple):
    """A command: its arguments as help shows them, its help, and what it does; a text that it returns is asked."""

    arguments: str
    help: str
    function: Callable[[Chat, str], str | None]


def obey(chat: Chat, line: str) -> str | None:
    """Carries out a line that begins with a slash; what is to be asked, if it is anything: `//` stands for one slash
    of a question. Raises UsageError, and EOFError to leave."""
    if line.startswith("//"):
        return line[1:]
    name, *rest = re.split(r"\s", line[1:], maxsplit=1)
    argument = "".join(rest)
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, 1, 0.5) or [one for one in COMMANDS if name and one.startswith(name)]
        remedy = f"did you mean /{near[0]}? " if near else ""
        raise UsageError(f"there is no command /{name}", f"{remedy}/help lists them; // begins a question with a slash")
    command = COMMANDS[name]
    if argument.strip() and not command.arguments:
        raise UsageError(f"/{name} takes nothing behind it", f"write /{name}")
    return command.function(chat, argument.strip())


def _help(chat: Chat, _: str) -> None:
    chat.out.table([[f"/{name} {command.arguments}".rstrip(), command.help] for name, command in COMMANDS.items()])
    chat.out.table([[line] for line in (*KEYS, *(EDITOR_KEYS if chat.edits else ()))])


def _exit(chat: Chat, _: str) -> None:
    raise EOFError


def _clear(chat: Chat, _: str) -> None:
    chat.session.clear()
    chat.save()
    chat.out.status("the conversation begins anew" + ("; the system message stays" if chat.session.system else ""))


def _undo(chat: Chat, _: str) -> None:
    question = chat.session.take_back()
    chat.save()
    chat.out.status(f"taken back: {_excerpt(question)}")


def _retry(chat: Chat, _: str) -> str:
    return chat.session.take_back()


def _edit(chat: Chat, text: str) -> str | None:
    if not text and not chat.edits:
        raise UsageError("there is no line editor here", "write the new text behind /edit")
    question = chat.session.take_back()
    if not text:
        chat.draft = question
        chat.save()
    return text or None


def _system(chat: Chat, text: str) -> None:
    if text:
        chat.session.system = text
        chat.save()
    chat.out.status(f"system message: {chat.session.system or 'none'}")


def _read(chat: Chat, words: str) -> str:
    from dsv4cli.engine.inputs import read_text

    name, _, question = words.partition(" ")
    text = read_text(_path(name)).removesuffix("\n")
    return "\n\n".join(part for part in (question.strip(), text) if part)


def _save(chat: Chat, name: str) -> None:
    path = _path(name)
    try:
        chat.session.write_file(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}", "name another file") from None
    chat.out.status(f"{counted(len(chat.session.messages), 'message')} in {path}")


def _load(chat: Chat, name: str) -> None:
    chat.session.load_file(_path(name))
    chat.save()
    chat.out.status(f"{counted(len(chat.session.messages), 'message')} from {name}")


def _think(chat: Chat, level: str) -> None:
    from dsv4cli.engine.prompt import think_options

    dialogue = chat.talk.dialogue
    if level:
        thinking, effort = think_options(dialogue.release, level)
        chat.talk.dialogue = dialogue = replace(dialogue, thinking=thinking, effort=effort)
    chat.out.status(f"thinking: {dialogue.effort or 'off'}")


def _show_thinking(chat: Chat, word: str) -> None:
    if not word:
        thought = chat.session.last_answer().get("reasoning_content")
        chat.out.aside(f"{thought or 'there was no thinking'}\n")
        return
    if word not in ("on", "off"):
        raise UsageError(f"/show-thinking cannot be {word}", "write on, off, or nothing to see the last thoughts")
    chat.show_thinking = word == "on"


def _set(chat: Chat, words: str) -> None:
    name, _, value = words.replace("=", " ").partition(" ")
    name = name.replace("_", "-")
    kinds: Mapping[str, type[int] | type[float]] = SETTINGS
    if not words:
        chat.out.table([[name, str(_setting(chat, name))] for name in kinds])
        return
    if name not in kinds:
        raise UsageError(f"there is no setting {name!r}", f"use one of {', '.join(kinds)}")
    try:
        number = kinds[name](value)
    except ValueError:
        raise UsageError(f"{name} cannot be {value.strip()!r}", f"write a number, as in /set {name}=1") from None
    if name == "max-tokens":
        chat.talk.limits = replace(chat.talk.limits, max_tokens=int(number))
    elif name == "think-budget":
        chat.think_budget = check_budget(int(number))
    else:
        chat.sampling = chat.sampling.chosen(
            number if name == "temperature" else chat.sampling.temperature,
            number if name == "top-p" else chat.sampling.top_p,
            int(number) if name == "seed" else chat.sampling.seed,
        )
    chat.out.status(f"{name}: {_setting(chat, name)}")


KEYS = (
    'A message of several lines: Alt-Enter, or between """ and """. //text sends /text.',
    "Ctrl-C stops an answer or clears the line; twice quits, as Ctrl-D does.",
)
EDITOR_KEYS = ("Ctrl-R searches the history, Tab completes a command, Ctrl-X Ctrl-E opens $EDITOR and sends its text.",)
SETTINGS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top-p": float,
    "seed": int,
    "max-tokens": int,
    "think-budget": int,
}


def _setting(chat: Chat, name: str) -> object:
    if name == "max-tokens":
        return chat.talk.limits.max_tokens
    if name == "think-budget":
        return "none" if chat.think_budget is None else chat.think_budget
    return getattr(chat.sampling, name.replace("-", "_"))


def check_budget(tokens: int | None) -> int | None:
    """A number of tokens to think with. Raises UsageError."""
    from dsv4cli.engine.settings import require

    require(tokens is None or tokens >= 0, "--think-budget", tokens, "use 0 or more tokens")
    return tokens


def _stats(chat: Chat, _: str) -> None:
    count, last = chat.count, chat.last
    rows = [
        ["answers", f"{count.turns:,}"],
        ["tokens written", f"{count.drawn:,}"],
        ["tokens read", f"{count.prefilled:,}"],
        ["tokens found in the cache", f"{count.reused:,}"],
    ]
    if last.tokens:
        rows.append(["first token of the last answer", f"{last.first:.2f} s"])
    if last.rate:
        rows.append(["then", f"{last.rate:.1f} tokens/s"])
    chat.out.table(rows)
    tell_traffic(chat.out, chat.talk.model.host_experts)


def _tokens(chat: Chat, text: str) -> None:
    if text:
        ids = chat.talk.dialogue.tokenizer.encode(text)
        chat.out.line(f"{counted(len(ids), 'token')}: {' '.join(map(str, ids))}")
        return
    before = 0
    messages = chat.session.prompt()
    for number, message in enumerate(messages, 1):
        tokens = chat.talk.tokens(messages[:number])
        chat.out.line(f"{tokens - before:7,}  {message['role']}: {_excerpt(str(message.get('content') or ''))}")
        before = tokens
    chat.out.line(f"{before:7,}  in all")


def _context(chat: Chat, _: str) -> None:
    used, room = chat.talk.tokens(chat.prompt()) if chat.session.messages else 0, chat.talk.context
    chat.out.line(f"{used:,} of {room:,} tokens used, {max(room - used, 0):,} left")
    if chat.left_out:
        chat.out.line(f"the oldest {counted(chat.left_out, 'message')} are left out of the prompt")


def _copy(chat: Chat, _: str) -> None:
    if not chat.copies:
        raise UsageError("there is no terminal that could copy", "use /save FILE or /json")
    text = str(chat.session.last_answer().get("content") or "")
    chat.out.clipboard(text)
    chat.out.status(f"{counted(len(text), 'character')} sent to the terminal's clipboard")


def _json(chat: Chat, _: str) -> None:
    chat.out.stream(json.dumps(chat.session.document(), ensure_ascii=False, indent=1) + "\n")


def _path(name: str) -> Path:
    if not name:
        raise UsageError("there is no file name", "write one behind the command")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # ~somebody who is not there
        raise UsageError(f"{name} is no path: {error}", "write it in full") from None


def _excerpt(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"


COMMANDS: Mapping[str, Slash] = {
    "help": Slash("", "This list.", _help),
    "undo": Slash("", "Take back the last question and its answer.", _undo),
    "retry": Slash("", "Ask the last question again.", _retry),
    "edit": Slash("[TEXT]", "Change the last question, to TEXT or in the next input.", _edit),
    "clear": Slash("", "Begin anew; the system message stays.", _clear),
    "system": Slash("[TEXT]", "Show or set the system message.", _system),
    "think": Slash("[LEVEL]", "Show or set how hard to reason: off, low, high, max.", _think),
    "show-thinking": Slash("[on|off]", "Show reasoning as it comes, or the last one now.", _show_thinking),
    "set": Slash("[NAME=VALUE]", f"Show or set {', '.join(SETTINGS)}.", _set),
    "read": Slash("FILE [QUESTION]", "Ask with the text of a file below the question.", _read),
    "save": Slash("FILE", "Write the conversation as JSON messages.", _save),
    "load": Slash("FILE", "Take the conversation of such a file instead.", _load),
    "json": Slash("", "Print the conversation as JSON messages.", _json),
    "copy": Slash("", "Copy the last answer to the clipboard, through the terminal.", _copy),
    "stats": Slash("", "What this session has cost.", _stats),
    "tokens": Slash("[TEXT]", "The tokens of a text, or of each message.", _tokens),
    "context": Slash("", "How full the context is.", _context),
    "exit": Slash("", "Leave; the session is kept, --continue takes it up.", _exit),
}
