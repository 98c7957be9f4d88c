"""Doing a conversion: the files, the proof, and last what makes a model of them."""

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from dsv4cli.engine.checkpoint import INDEX, UNFINISHED, scan_checkpoint
from dsv4cli.engine.conversion.job import Conversion
from dsv4cli.engine.conversion.journal import PLAN, Journal, read_plan, write_file, writing
from dsv4cli.engine.conversion.metadata import copied_files
from dsv4cli.engine.conversion.recode import Recoder
from dsv4cli.engine.conversion.verify import Verification, verify
from dsv4cli.engine.conversion.work import FileDone, carry_out, step_bytes, write_item
from dsv4cli.engine.identify import FolderIdentity, describe
from dsv4cli.engine.stored import StoredModel
from dsv4cli.errors import CheckpointError, UnsoundResult

Progress = Callable[[int, int], None]
# seconds of work that a rate is taken from
TRIAL = 1.0


def write_files(
    conversion: Conversion, device: torch.device, workers: int, progress: Progress | None = None
) -> Iterator[FileDone]:
    """Checks source, output and disk, then writes the files of this part and yields each when it is complete.

    Raises UsageError, CheckpointError or NotEnoughDisk before the first byte; CheckpointError for a tensor that does
    not fit the target. An interrupted conversion continues when it is called again.
    """
    conversion.check_source()
    conversion.check_output()
    conversion.check_room()
    journal = Journal(conversion.output, conversion.part)
    plan, times = conversion.description(), conversion.source_times()
    with StoredModel(conversion.source) as source, journal.opened(plan, times):
        recoder = Recoder(source, conversion.specs, conversion.source_name, device)
        yield from carry_out(
            conversion.own_files, recoder, conversion.output, journal, workers=workers, progress=progress
        )


def verify_files(conversion: Conversion, *, full: bool, workers: int, progress: Progress | None = None) -> Verification:
    """Reads the files of this part again and compares them with the source.

    Raises UnsoundResult, naming the tensor, where a value differs that the target has exactly.
    """
    if not conversion.own_copies:
        return Verification()
    identity = describe(conversion.config, conversion.target.formats)
    checkpoint = scan_checkpoint(conversion.output)
    output = FolderIdentity(identity.size, identity.config, identity.formats, checkpoint, conversion.target.naming)
    with StoredModel(conversion.source) as ours, StoredModel(output) as theirs:
        found = verify(
            ours, theirs, conversion.source_name, conversion.own_copies, full=full, workers=workers, progress=progress
        )
    if found.wrong:
        others = f" (and {len(found.wrong) - 1:,} more)" if len(found.wrong) > 1 else ""
        raise UnsoundResult(
            f"{conversion.output}: {found.wrong[0]} differs from the source{others}",
            f"remove {conversion.output} and convert again; if it happens again, check the disk and the memory",
        )
    return found


def copy_files(conversion: Conversion) -> None:
    """Copies the tokenizer and whatever else of the source is neither weights nor configuration."""
    folder = conversion.source.checkpoint.folder
    for path in copied_files(folder):
        target = conversion.output / path.relative_to(folder)
        write_file(target, path.read_bytes(), conversion.output / UNFINISHED)


def finish(output: Path) -> dict[str, Any]:
    """Makes a model of the files of all parts: configuration, then index; returns the plan.

    Raises UsageError where there is no unfinished conversion, CheckpointError, naming it, for a file that is not there
    or not the planned one.
    """
    plan = read_plan(output / UNFINISHED / PLAN)
    for name, expected in plan["files"].items():
        _check_file(output / name, expected)
    for name, text in plan["metadata"].items():
        write_file(output / name, text.encode(), output / UNFINISHED)
    if plan["index"] is not None:
        text = json.dumps(plan["index"], indent=2) + "\n"
        write_file(output / INDEX, text.encode(), output / UNFINISHED)
    for path in (output / UNFINISHED).iterdir():
        if path.name != PLAN:
            path.unlink()
    # the plan last: without it nothing could be finished
    shutil.rmtree(output / UNFINISHED)
    return plan


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    remedy = "run the `dsv4 convert … --shard I/N` that writes it, then --finish again"
    if not path.is_file():
        raise CheckpointError(f"{path} is not there yet", remedy)
    with path.open("rb") as file:
        start = file.read(8)
        header = start + file.read(int.from_bytes(start, "little"))
    if path.stat().st_size != expected["nbytes"] or sha256(header).hexdigest() != expected["header"]:
        raise CheckpointError(f"{path} is not the file of this conversion", f"remove it and {remedy}")


def trial(conversion: Conversion, device: torch.device, workers: int) -> float:
    """Bytes that `workers` threads would write in a second, if one of them did as well alone: converts for about a
    second into an unnamed file on the disk of the output."""
    place = next(folder for folder in (conversion.output, *conversion.output.absolute().parents) if folder.is_dir())
    items = [item for file in conversion.own_files for batch in file.batches for item in batch]
    with writing(place):
        unnamed = tempfile.TemporaryFile(dir=place)  # noqa: SIM115 - closed below
    with StoredModel(conversion.source) as source, unnamed as scratch:
        recoder = Recoder(source, conversion.specs, conversion.source_name, device)
        started, written = time.monotonic(), 0
        for item in items[:: max(len(items) // 64, 1)]:
            written += sum(write_item(item, recoder, scratch.fileno(), step_bytes(device)))
            if time.monotonic() - started > TRIAL:
                break
        scratch.flush()
    return workers * written / (time.monotonic() - started)
