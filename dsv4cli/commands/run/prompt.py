"""The conversation of `dsv4 run`, from its arguments, files and piped text."""

import os
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dsv4cli.errors import UsageError

if TYPE_CHECKING:
    from dsv4cli.engine.text.prompt import Message


def conversation(
    prompt: str | None, files: Sequence[Path], messages: Path | None, system: str | None
) -> "list[Message]":
    """Return the conversation of --messages, or one user message: the prompt, the texts of files and piped text."""
    from dsv4cli.engine.text.inputs import from_prompt, read_messages, read_text

    if messages is not None:
        return read_messages(messages)
    texts = [read_text(file).removesuffix("\n") for file in files]
    piped = _read_stdin(demanded=prompt == "-")
    parts = [part for part in ("" if prompt == "-" else prompt or "", *texts, piped) if part]
    if not parts:
        raise UsageError("there is no prompt", 'add one: dsv4 run "What is 17 + 25?"')
    return from_prompt("\n\n".join(parts), system)


def _read_stdin(demanded: bool) -> str:
    """Return piped or redirected text; empty if stdin is a terminal or a device, unless the user requested stdin."""
    from dsv4cli.engine.text.inputs import STDIN, read_text

    if sys.stdin is None:
        return ""
    mode = os.fstat(sys.stdin.fileno()).st_mode
    if not demanded and not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode) or stat.S_ISSOCK(mode)):
        return ""
    return read_text(STDIN).removesuffix("\n")
