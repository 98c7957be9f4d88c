"""Runs a tool command: its output is limited in size, and no process that it starts outlives it."""

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

# bytes per read; seconds to read the rest of a pipe after the command has ended
CHUNK, DRAIN = 1 << 16, 1.0


@dataclass(frozen=True)
class Ended:
    """Result of a tool command.

    Attributes:
        code: Exit code; None after a timeout.
        out: Beginning of stdout.
        last_out, last_err: End of stdout and of stderr.
    """

    code: int | None
    out: str
    last_out: str
    out_bytes: int
    last_err: str
    err_bytes: int


def carry_out(command: Sequence[str], text: str, seconds: float, kept: int) -> Ended:
    """Run a command with a text on stdin, and return its result.

    The command gets a session of its own, so that all processes it starts end with it. Raises OSError.

    Args:
        seconds: Timeout.
        kept: Maximum bytes kept of the beginning, and of the end, of each stream.
    """
    # a file, unlike a pipe, never blocks a command or us, whether or not the command reads it
    with tempfile.TemporaryFile() as stdin:
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
    """Reads a pipe to its end and keeps at most `kept` bytes of its beginning and of its end."""

    def __init__(self, stream: IO[bytes], kept: int) -> None:
        super().__init__(daemon=True)
        self.head = self.tail = b""
        self.size = 0
        self._stream, self._kept = stream, kept
        self.start()

    def run(self) -> None:
        """Read until the last process that writes to the pipe has ended."""
        with self._stream:
            while chunk := self._stream.read(CHUNK):
                self.size += len(chunk)
                self.head += chunk[: self._kept - len(self.head)]
                self.tail = (self.tail + chunk)[-self._kept :]


def _text(data: bytes) -> str:
    """Decode bytes, without a character cut off at the end and without trailing line breaks."""
    return getincrementaldecoder("utf-8")("replace").decode(data).rstrip()
