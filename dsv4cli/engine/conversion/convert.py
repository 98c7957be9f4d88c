"""Runs a conversion: writes the files, verifies them, and last writes the configuration that makes them a model."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from dsv4cli.engine.checkpoint.gguf.files import scan_gguf
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming
from dsv4cli.engine.checkpoint.headers import UNFINISHED, scan_checkpoint
from dsv4cli.engine.checkpoint.identify import FolderIdentity, describe
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.conversion.disk_space import disk_errors
from dsv4cli.engine.conversion.finish import assemble, assembled, clear
from dsv4cli.engine.conversion.hashed_file import write_all
from dsv4cli.engine.conversion.job import Conversion
from dsv4cli.engine.conversion.journal import Journal, Verdict, write_file
from dsv4cli.engine.conversion.manifest import CHECKS, MANIFEST, Manifest, read_manifest
from dsv4cli.engine.conversion.plan import chunks
from dsv4cli.engine.conversion.recode import Recoder
from dsv4cli.engine.conversion.sources import open_source
from dsv4cli.engine.conversion.verify import Verification, verify
from dsv4cli.engine.conversion.write import FileDone, carry_out, step_bytes, write_rows
from dsv4cli.engine.settings import Part
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import CheckpointError, UnsoundResult
from dsv4cli.harmless import shell_word

Check = Literal["sample", "full", "off"]
# seconds of work that a rate is taken from
TRIAL = 1.0


@contextmanager
def begun(conversion: Conversion) -> Iterator[Journal]:
    """Check source, output and disk space, and hold the journal of this part until the block ends.

    Raises UsageError, CheckpointError or NotEnoughDisk before the first byte is written.
    """
    conversion.check_source()
    conversion.check_output()
    conversion.check_space()
    plan, times = conversion.description, conversion.source_times()
    opened = Journal(conversion.output, conversion.part).opened(plan, times)
    with _disk(conversion):
        journal = opened.__enter__()
    try:
        yield journal
    finally:
        opened.__exit__(None, None, None)


def write_files(
    conversion: Conversion, journal: Journal, device: torch.device, workers: int, progress: Progress | None = None
) -> Iterator[FileDone]:
    """Write the files of this part and yield each when it is complete. An interrupted conversion resumes.

    Raises:
        CheckpointError: a tensor does not fit the target, or the source has changed.
        UnsoundResult: a file of an earlier run has changed.
    """
    with _disk(conversion), open_source(conversion.source) as source:
        recoder = Recoder(source, conversion.specs, conversion.source_name, device)
        for file in carry_out(
            conversion.own_files, recoder, conversion.output, journal, workers=workers, progress=progress
        ):
            conversion.check_source_unchanged()
            yield file


def verify_files(
    conversion: Conversion, journal: Journal, *, check: Check, workers: int, progress: Progress | None = None
) -> Verification | None:
    """Read the files of this part again and compare them with the source; return None if nothing is to be compared.

    After a comparison that found a difference, everything is compared. Raises UnsoundResult, naming the tensor, if a
    value
    that the target can hold exactly differs, and for `off` if the last comparison found one.
    """
    bad = journal.verdict is not None and not journal.verdict.sound
    if check == "off":
        if bad:
            raise _unsound(conversion, f"{conversion.output} differs from the source, as a comparison found")
        return None
    check = "full" if bad else check
    found = _compared(conversion, full=check == "full", workers=workers, progress=progress)
    conversion.check_source_unchanged()
    with _disk(conversion):
        journal.judge(Verdict(not found.wrong, check, conversion.own_cut))
    if found.wrong:
        raise _differs(conversion, found)
    return found


def _compared(conversion: Conversion, *, full: bool, workers: int, progress: Progress | None) -> Verification:
    if not conversion.own_copies:
        return Verification()
    with open_source(conversion.source) as ours, open_stored(_output_of(conversion)) as theirs:
        return verify(
            ours, theirs, conversion.source_name, conversion.own_copies, full=full, workers=workers, progress=progress
        )


def _output_of(conversion: Conversion) -> FolderIdentity:
    """Return the identity of the output files that exist."""
    config, naming = conversion.config, conversion.target.naming
    identity = describe(config, conversion.target.formats)
    if isinstance(naming, GgufNaming):
        checkpoint = scan_gguf(conversion.output, [conversion.output / file.name for file in conversion.own_files])
        return GgufIdentity(identity.size, config, identity.formats, checkpoint, naming)
    checkpoint = scan_checkpoint(conversion.output)
    return FolderIdentity(identity.size, config, identity.formats, checkpoint, naming)


def _differs(conversion: Conversion, found: Verification) -> UnsoundResult:
    others = f" (and {len(found.wrong) - 1:,} more)" if len(found.wrong) > 1 else ""
    return _unsound(conversion, f"{conversion.output}: {found.wrong[0]} differs from the source{others}")


def _unsound(conversion: Conversion, sentence: str) -> UnsoundResult:
    return UnsoundResult(
        sentence,
        f"remove it with `rm -r {shell_word(conversion.output)}` and convert again; if it happens again, check "
        "the disk and the memory",
    )


def copy_files(conversion: Conversion, progress: Progress | None = None) -> None:
    """Copy the tokenizer and other files of the source that are neither weights nor configuration."""
    done, total = 0, sum(copy.nbytes for copy in conversion.copies)

    def report(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    with _disk(conversion):
        for copy in conversion.copies:
            copy.carry_out(conversion.output / UNFINISHED, report)


def finish_alone(conversion: Conversion, journal: Journal) -> None:
    """Make the files of a job that is not shared a model, right after they were written and compared."""
    with _disk(conversion):
        assemble(conversion.output, conversion.description, [journal])


def finished(conversion: Conversion) -> Manifest | None:
    """Return the output's manifest if exactly this conversion is complete and all files have their size, else None.

    Raises CheckpointError, naming it, for a file that is missing or has another size.
    """
    if not conversion.output.is_dir():
        return None
    unfinished = (conversion.output / UNFINISHED).exists()
    manifest = assembled(conversion.output) if unfinished else read_manifest(conversion.output)
    if manifest is None or manifest.origin is None or conversion.job not in manifest.origin.jobs:
        return None
    if unfinished:
        # killed at its very end
        with _disk(conversion):
            clear(conversion.output)
    sizes = {file.name: file.nbytes for file in conversion.files}
    for name in manifest.hashes:
        path = conversion.output / name
        if not path.is_file() or path.stat().st_size != sizes.get(name, path.stat().st_size):
            problem = "has changed since it was written" if path.is_file() else "is missing"
            raise CheckpointError(
                f"{path} {problem}, though this conversion has been finished",
                f"remove the output with `rm -r {shell_word(conversion.output)}`, then convert again",
            )
    return manifest


def compare_finished(
    conversion: Conversion, done: Manifest, *, check: Check, workers: int, progress: Progress | None = None
) -> Verification | None:
    """Compare a finished output with its source if no comparison was as thorough as `check`, and record it in the
    manifest.

    Returns None if one was. Raises UnsoundResult, naming the tensor, if a value differs.
    """
    if done.origin is None or CHECKS.index(check) <= CHECKS.index(done.origin.compared):
        return None
    whole = replace(conversion, part=Part())
    found = _compared(whole, full=check == "full", workers=workers, progress=progress)
    whole.check_source_unchanged()
    if found.wrong:
        raise _differs(whole, found)
    manifest = Manifest(done.hashes, replace(done.origin, compared=check))
    # if the folder is not writable, the next run compares again
    with suppress(OSError):
        write_file(whole.output / MANIFEST, manifest.content(), whole.output)
    return found


def trial(conversion: Conversion, device: torch.device, workers: int) -> float:
    """Return the bytes per second that `workers` threads would convert, extrapolated from one thread.

    Reads and converts for about a second and writes nothing. Infinite for a part without files.
    """
    items = [item for file in conversion.own_files for batch in file.batches for item in batch]
    if not items:
        return float("inf")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        with open_source(conversion.source) as source:
            recoder = Recoder(source, conversion.specs, conversion.source_name, device)
            started, written = time.monotonic(), 0
            for item in items[:: max(len(items) // 64, 1)]:
                steps = chunks(item, step_bytes(device))
                written += sum(write_rows(item, recoder.recipe(item.matrix), steps, partial(write_all, nowhere)))
                if time.monotonic() - started > TRIAL:
                    break
            return workers * written / (time.monotonic() - started)
    finally:
        os.close(nowhere)


def _disk(conversion: Conversion) -> AbstractContextManager[None]:
    return disk_errors(conversion.output, lambda: conversion.bytes_missing)
