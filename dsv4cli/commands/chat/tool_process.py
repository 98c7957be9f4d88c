"""A command that carries out a call: what it prints is kept within bounds, nothing that it started outlives it."""

import os
import signal
import subprocess
import tempfile
from codecs import getincrementaldecoder
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import IO

# bytes at once; seconds for what is still in a pipe when the command has ended
CHUNK, DRAIN = 1 << 16, 1.0


@dataclass(frozen=True)
class Ended:
    """code: None after the time was up. out: what stdout began with; last_out, last_err: what came last."""

    code: int | None
    out: str
    last_out: str
    out_bytes: int
    last_err: str
    err_bytes: int


def carry_out(command: Sequence[str], text: str, seconds: float, kept: int) -> Ended:
    """Runs a command with a text on its stdin, for so many seconds at most, and keeps so many bytes of what it prints.

    It has a session of its own, so that whatever it has started ends with it. Raises OSError.
    """
    with tempfile.TemporaryFile() as stdin:  # no command is stuck with it, whether or not it reads
        stdin.write(text.encode(errors="replace"))
        stdin.seek(0)
        process = subprocess.Popen(
            command, bufsize=0, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = _Pipe(process.stdout, kept), _Pipe(process.stderr, kept)
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(seconds)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for pipe in (out, err):
        pipe.join(DRAIN)
    return Ended(code, _text(out.head), _text(out.tail), out.size, _text(err.tail), err.size)


class _Pipe(Thread):
    """Reads a pipe to its end, and keeps so many bytes of its beginning and as many of its end."""

    def __init__(self, stream: IO[bytes], kept: int) -> None:
        super().__init__(daemon=True)
        self.head = self.tail = b""
        self.size = 0
        self._stream, self._kept = stream, kept
        self.start()

    def run(self) -> None:
        """Until the last process that writes to it has ended."""
        with self._stream:
            while chunk := self._stream.read(CHUNK):
                self.size += len(chunk)
                self.head += chunk[: self._kept - len(self.head)]
                self.tail = (self.tail + chunk)[-self._kept :]


def _text(data: bytes) -> str:
    """The bytes as text, less a character that is cut at their end and the line break there."""
    return getincrementaldecoder("utf-8")("replace").decode(data).rstrip()
