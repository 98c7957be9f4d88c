"""Writes a file in pieces from several threads, and computes its SHA-256 at the same time. No torch.

SHA-256 needs the bytes in order. A piece that is too early to hash waits in memory if the budget allows; other pieces,
and those that an earlier run has written, are read back from the file.
"""

import errno
import hashlib
import os
import threading
from pathlib import Path

from dsv4cli.engine.conversion.manifest import Stopped

# bytes read from the file at once
CHUNK = 1 << 20
# pieces that a thread hashes at most after it has written one: then it makes the next
AT_ONCE = 4


class ByteBudget:
    """A budget of bytes that may wait in memory, shared by all files."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> bool:
        """Take bytes from the budget. Return whether there were enough."""
        with self._lock:
            if nbytes > self._left:
                return False
            self._left -= nbytes
            return True

    def give(self, nbytes: int) -> None:
        """Return bytes to the budget."""
        with self._lock:
            self._left += nbytes


class HashedFile:
    """A file of `nbytes` bytes, open for writing. It may hold bytes of an earlier run."""

    def __init__(self, path: Path, nbytes: int, budget: ByteBudget) -> None:
        self.path, self.nbytes, self.budget = path, nbytes, budget
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._sha256, self._hashed = hashlib.sha256(), 0
        # pieces written but not hashed yet, by offset: end offset, and the content if it waits in memory
        self._pieces: dict[int, tuple[int, memoryview | None]] = {}
        self._turn = threading.Lock()
        try:
            os.truncate(self.descriptor, nbytes)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file and drop the pieces that wait."""
        os.close(self.descriptor)
        self.budget.give(sum(len(content) for _, content in self._pieces.values() if content is not None))
        self._pieces.clear()

    def write(self, content: memoryview, offset: int) -> int:
        """Write bytes to an offset, then hash what comes next in the file, unless another thread is hashing. Return
        their number.

        `content` must not change afterwards.
        """
        write_all(self.descriptor, content, offset)
        if content:
            self._pieces[offset] = offset + len(content), content if self.budget.take(len(content)) else None
            self._hash()
        return len(content)

    def has(self, begin: int, end: int) -> None:
        """Record that an earlier run has written these bytes."""
        if begin < end:
            self._pieces[begin] = end, None

    def sha256(self, stop: threading.Event) -> str:
        """Return the hash of the file once all of it is written. Raises OSError, and Stopped once `stop` is set."""
        while self._hashed < self.nbytes:
            if stop.is_set():
                raise Stopped
            if self._hashed not in self._pieces:
                # bytes of an earlier run, after bytes of this run
                following = (begin for begin in self._pieces if begin > self._hashed)
                self.has(self._hashed, min(following, default=self.nbytes))
            self._hash()
        return self._sha256.hexdigest()

    def _hash(self) -> None:
        if self._turn.acquire(blocking=False):
            try:
                for _ in range(AT_ONCE):
                    self._hash_next()
            finally:
                self._turn.release()

    def _hash_next(self) -> None:
        begin = self._hashed
        end, content = self._pieces.pop(begin, (begin, None))
        if content is not None:
            self._sha256.update(content)
            self._hashed = end
            self.budget.give(len(content))
        elif begin < end:
            found = self._read(begin, min(end - begin, CHUNK))
            self._sha256.update(found)
            self.has(begin + len(found), end)
            self._hashed = begin + len(found)

    def _read(self, begin: int, count: int) -> memoryview:
        found = memoryview(bytearray(count))
        count = os.preadv(self.descriptor, [found], begin)
        if not count:
            raise OSError(errno.EIO, "it has become shorter while it was written", str(self.path))
        return found[:count]


def write_all(descriptor: int, content: memoryview, offset: int) -> int:
    """Write all bytes at an offset of a file and return their number."""
    done = 0
    while done < len(content):
        done += os.pwrite(descriptor, content[done:], offset + done)
    return done
