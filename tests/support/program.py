"""Running `dsv4` in tests: within this process, through the boundary in `cli.main`; and a model that says what it is
told to."""

import io
import os
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
import typer.testing

from dsv4cli import cli
from dsv4cli.engine import settings
from dsv4cli.engine.model.attention import Attention
from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.runtime import leader_step as drawing
from dsv4cli.engine.text.prompt_text import calls_parts
from dsv4cli.engine.text.tokenizer import Tokenizer
from tests.support.shared_models import share_models
from tests.support.waiting import comes

ROOT = Path(__file__).resolve().parents[2]
# one layer: what a command does with the tokens is tested, not the model
SMALL = "random:tiny,layers=1"
# the commands' signatures, which Typer reads once for all calls (tests/support/every_test.py)
command = cache(typer.main.get_command)
BYTES = Tokenizer.byte_level()


def gone(pid: int) -> bool:
    """Wait until a process has ended and return True, or False where it goes on."""
    return comes(lambda: not Path(f"/proc/{pid}/cmdline").exists())


@dataclass(frozen=True)
class Done:
    """How a call ended."""

    code: int
    out: str
    err: str


class Program:
    """`dsv4` as a function; it sees no GPU."""

    def __init__(self, patch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self.patch = patch
        self.capture = capture
        patch.setattr(torch.cuda, "is_available", lambda: False)
        share_models(patch)

    def __call__(self, *arguments: str, stdin: bytes | None = None, readable: bool = True) -> Done:
        """Runs one command; stdin is a file of these bytes, or /dev/null, which is open for writing only where it is
        not readable, as under nohup."""
        null = os.open(os.devnull, os.O_RDONLY if readable else os.O_WRONLY)
        with tempfile.TemporaryFile() if stdin is not None else open(null, "rb") as file:
            if stdin is not None:
                file.write(stdin)
                file.seek(0)
            self.patch.setattr(sys, "stdin", io.TextIOWrapper(file, encoding="utf-8"))
            self.patch.setattr(sys, "argv", ["dsv4", *arguments])
            with pytest.raises(SystemExit) as left:
                cli.main()
        return Done(int(left.value.code or 0), *self.capture.readouterr())

    def model_says(self, text: str, *, ends: bool = True) -> None:
        """The next run of one prompt is answered with `text`, a byte a token, and the end token if it `ends`.

        What would be computed is not asked for, and the sublayers compute nothing. It makes no drafts by itself.
        """
        no_drafts_by_default(self.patch)
        self.patch.setattr(Attention, "forward", lambda self, x, batch, cache: x)
        self.patch.setattr(MoE, "forward", lambda self, x, batch: x)
        ids = iter([*BYTES.encode(text), *([BYTES.eos_id] if ends else [])])
        self.patch.setattr(drawing, "sample", lambda *_: torch.tensor([next(ids)]))


def inside(*arguments: str, columns: int = 80) -> typer.testing.Result:
    """One command within this process, not through the boundary in `cli.main`."""
    return typer.testing.CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, arguments, prog_name="dsv4")


def no_drafts_by_default(patch: pytest.MonkeyPatch) -> None:
    """`--draft auto` makes no drafts: for models whose draws do not follow from what they compute."""
    parse = settings.parse_drafting
    patch.setattr(settings, "parse_drafting", lambda text: settings.NO_DRAFTS if text == "auto" else parse(text))


def calls_block(calls: list[dict[str, Any]]) -> str:
    """What an answer with these calls ends with."""
    return "".join(calls_parts(calls))


def save_tokenizer(folder: Path) -> None:
    """Gives a folder the tokenizer of the built-in models."""
    BYTES._backend.save(str(folder / "tokenizer.json"))
