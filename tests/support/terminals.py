"""`dsv4` in a terminal of its own, forked from the tests, which have torch already; and a model that computes nothing
and says what it is told to, token by token."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

import pytest
import torch

from dsv4cli import cli
from dsv4cli.commands.chat import interrupts
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.runtime import leader_step as drawing
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.step import Chunk, ComputedStep
from dsv4cli.engine.weights import load
from dsv4cli.engine.weights.load import load_model
from tests.support.program import BYTES, SMALL, no_drafts_by_default

if TYPE_CHECKING:
    from dsv4cli.engine.model.batch import Batch

SECONDS = 60
# what a program imports when it begins
LATE = ("dsv4cli.commands.chat.editor", "dsv4cli.engine.compiling.process", "markdown_it", "rich.progress")
Sampler = Callable[..., torch.Tensor]
ESCAPES = re.compile(r"\x1b(\[[0-9;?]*[ -/]*[@-~]|\][^\x07]*\x07|[=>])")


def says(*answers: str, pause: float = 0.0) -> Sampler:
    """A sampler whose answers are these, byte by byte; after the last they begin anew."""

    def ids() -> Iterator[int]:
        while True:
            for answer in answers:
                yield from BYTES.encode(answer)
                yield BYTES.eos_id

    drawn = ids()

    def sample(*_: object) -> torch.Tensor:
        time.sleep(pause)
        return torch.tensor([next(drawn)])

    return sample


@cache
def _small() -> Transformer:
    return load_model(resolve_model(SMALL), Numerics.reference())


def speak(patch: pytest.MonkeyPatch, sample: Sampler, reading: float = 0.0) -> None:
    """Conversations draw from `sample`, and their model has nothing to do but to take `reading` seconds a token of a
    prompt."""

    def compute(runner: Runner, chunks: list[Chunk]) -> ComputedStep:
        time.sleep(reading * sum(chunk.tokens for chunk in chunks if chunk.tokens > 1))
        runner._advance(chunks)
        ready = [chunk for chunk in chunks if chunk.request.caught_up]
        logits = torch.zeros(len(ready), runner.model.config.vocab_size) if ready else None
        return ComputedStep(chunks, [], ready, HiddenStates(torch.empty(0), None), cast("Batch", None), logits=logits)

    model = _small()
    no_drafts_by_default(patch)
    patch.setattr(load, "load_model", lambda *_, **__: model)
    patch.setattr(Runner, "_compute", compute)
    patch.setattr(drawing, "sample", sample)


def speaking(sample: Sampler, reading: float, twice: float) -> Callable[[pytest.MonkeyPatch], None]:
    """Prepares a program to speak so, and to take Ctrl-C for the second within `twice` seconds."""
    _small()  # once for all programs

    def prepare(patch: pytest.MonkeyPatch) -> None:
        speak(patch, sample, reading)
        patch.setattr(interrupts, "TWICE", twice)

    return prepare


class Terminal:
    """A program in the foreground of a terminal, with all three streams on it."""

    def __init__(
        self,
        *arguments: str,
        prepare: Callable[[pytest.MonkeyPatch], None] = lambda patch: None,
        columns: int = 80,
        **environment: str,
    ) -> None:
        """prepare: what is changed in the program before it starts."""
        for module in LATE:
            with suppress(ModuleNotFoundError):  # the program is to say what is missing
                import_module(module)  # once for all programs
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's threads sleep
            self.program, self.master = pty.fork()
        if self.program == 0:
            prepare(pytest.MonkeyPatch())
            _be_the_program(arguments, columns, environment)
        self.shown = ""
        self._seen = 0

    def until(self, *words: str) -> str:
        """Waits until these have come, each behind the one before; what came since the last call."""
        before = self._seen
        for word in words:
            end = time.monotonic() + SECONDS
            while (at := self.plain.find(word, self._seen)) < 0:
                assert time.monotonic() < end, f"no {word!r} behind {self.plain[self._seen :]!r}"
                assert self._read(), f"ended without {word!r}: {self.plain[self._seen :]!r}"
            self._seen = at + len(word)
        return self.plain[before : self._seen]

    def settle(self, prompt: str) -> None:
        """Waits until the program has shown its prompt and then nothing more."""
        end = time.monotonic() + SECONDS
        while select.select([self.master], [], [], 0.2)[0] or not self.plain.endswith(prompt):
            assert time.monotonic() < end, f"no {prompt!r} at the end of {self.plain[self._seen :]!r}"
            assert self._read(), f"ended: {self.plain[self._seen :]!r}"
        self._seen = len(self.plain)

    @property
    def plain(self) -> str:
        """Everything shown, without escape codes and carriage returns."""
        return ESCAPES.sub("", self.shown).replace("\r", "")

    def _read(self) -> bool:
        if not select.select([self.master], [], [], 1)[0]:
            return True
        try:
            part = os.read(self.master, 65536)
        except OSError:  # EIO: the other end is closed
            return False
        self.shown += part.decode(errors="replace")
        return bool(part)

    def type(self, keys: str) -> None:
        """As a user does."""
        os.write(self.master, keys.encode())

    def resize(self, columns: int) -> None:
        """As a user does with a window's edge; the program gets SIGWINCH."""
        _size(self.master, columns)

    def kill(self) -> None:
        """Without a chance to say anything."""
        os.kill(self.program, signal.SIGKILL)
        self.leave()

    def end(self) -> None:
        """Ends the program, if it has not ended."""
        with suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.program, signal.SIGKILL)
            os.waitpid(self.program, 0)

    def leave(self) -> int:
        """Reads the rest; the exit code, or the signal as a negative number."""
        end = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < end, f"does not end: {self.plain[self._seen :]!r}"
        os.close(self.master)
        return os.waitstatus_to_exitcode(os.waitpid(self.program, 0)[1])


def _size(terminal: int, columns: int) -> None:
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))


def _be_the_program(arguments: tuple[str, ...], columns: int, environment: dict[str, str]) -> None:
    code = 70
    try:
        for number, mode in enumerate(("r", "w", "w")):
            setattr(sys, ("stdin", "stdout", "stderr")[number], open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 - open to the end
        _size(1, columns)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.pop("NO_COLOR", None)
        os.environ.update({"TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "PROMPT_TOOLKIT_NO_CPR": "1", **environment})
        sys.argv = ["dsv4", *arguments]
        cli.main()
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
