"""Free space on the output's disk, and error messages for failed writes. No torch."""

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dsv4cli.errors import DiskError, Dsv4Error, NotEnoughDisk, UsageError
from dsv4cli.harmless import shell_word

FULL = {
    errno.ENOSPC: "no space left on its disk",
    errno.EDQUOT: "the quota on its disk is used up",
}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
AGAIN = "then run the same command again: it continues"


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a folder, which need not exist yet."""
    existing = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())
    return shutil.disk_usage(existing).free


def distinct_sizes(*counts: int) -> list[str]:
    """Format bytes as GB with enough digits that different numbers look different and none looks like zero."""
    texts: list[str] = []
    for digits in range(2, 10):
        texts = [f"{count / 1e9:,.{digits}f} GB" for count in counts]
        # each within a tenth of what it says, or to the byte
        close = all(abs(round(count / 1e9, digits) * 1e9 - count) <= count / 10 for count in counts)
        if close and len({*texts}) == len({*counts}):
            break
    return texts


@contextmanager
def disk_errors(output: Path, missing: Callable[[], int]) -> Iterator[None]:
    """Turn system errors about files of `output` into messages. missing: returns the bytes still to be written."""
    try:
        yield
    except OSError as error:
        raise _sentence(error, output, missing) from None


def _sentence(error: OSError, output: Path, missing: Callable[[], int]) -> Dsv4Error:
    target = error.filename or output
    reason = error.strerror or type(error).__name__
    if error.errno in FORBIDDEN:
        return UsageError(f"{target} cannot be written to: {reason}", "use a folder that you can write to")
    if error.errno == errno.EFBIG:
        remedy = f"raise `ulimit -f`, {AGAIN}; or `rm -r {shell_word(output)}` and use a smaller --max-shard-size"
        return NotEnoughDisk(f"{target}: {reason}: its disk or `ulimit -f` does not allow a file of that size", remedy)
    try:
        need, free = missing(), free_bytes(output)
    except OSError:
        return DiskError(f"{target}: {reason}", f"check the disk, {AGAIN}")
    texts = distinct_sizes(need, free)
    space = f"{texts[0]} still to be written, {texts[1]} free"
    if error.errno in FULL:
        return NotEnoughDisk(f"{output}: {FULL[error.errno]}: {space}", f"free some space, {AGAIN}")
    return DiskError(f"{target}: {reason}: {space}", f"check the disk, {AGAIN}")
