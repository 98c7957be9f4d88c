"""Finishes a conversion: joins the parts of a shared job, and compares a whole output with its source."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from dsv4cli.engine.checkpoint.gguf.model import recognise_gguf
from dsv4cli.engine.checkpoint.headers import INDEX, MAX_HEADER, UNFINISHED, scan_checkpoint
from dsv4cli.engine.checkpoint.identify import FolderIdentity, identity_of
from dsv4cli.engine.checkpoint.layout import matrices
from dsv4cli.engine.checkpoint.opening import open_stored
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.conversion.disk_space import disk_errors
from dsv4cli.engine.conversion.job import job_of, whole_copies
from dsv4cli.engine.conversion.journal import PLAN, Journal, Verdict, read_plan, write_file
from dsv4cli.engine.conversion.manifest import (
    CHECKS,
    MANIFEST,
    Manifest,
    Origin,
    changed,
    hash_file,
    hash_files,
    read_manifest,
)
from dsv4cli.engine.conversion.metadata import CONFIG, copied_files
from dsv4cli.engine.conversion.selection import renumbered
from dsv4cli.engine.conversion.sources import open_source
from dsv4cli.engine.conversion.verify import Verification, verify
from dsv4cli.engine.settings import Part
from dsv4cli.engine.system.threads import Progress
from dsv4cli.errors import CheckpointError, UnsoundResult, UsageError
from dsv4cli.harmless import shell_word


@dataclass(frozen=True)
class Against:
    """A source to compare an output with, how much of it to compare, and with how many threads."""

    source: FolderIdentity
    check: Literal["sample", "full"]
    workers: int
    progress: Progress | None = None


@dataclass(frozen=True)
class Finished:
    """The result of joining the parts of a job.

    Attributes:
        cut: matrices that were not compared, because they are spread over several parts.
    """

    to: str
    files: Mapping[str, Any]
    found: Verification | None
    cut: int


def finish(output: Path, against: Against | None, workers: int, progress: Progress | None = None) -> Finished:
    """Make the files of all parts a model: write configuration and index.

    Every file is compared with its hash. Each part must have been compared with the source, or is compared now.

    Raises:
        UsageError: there is no unfinished conversion, or a part was never compared.
        CheckpointError: a file, which is named, is missing or not the planned one.
        UnsoundResult: a file has changed, or a part differs from the source.
    """
    with disk_errors(output, lambda: 0), ExitStack() as stack:
        plan = read_plan(output / UNFINISHED / PLAN)
        count = plan["parts"]
        for number, (name, expected) in enumerate(plan["files"].items()):
            _check_file(output / name, expected, Part(number % count + 1, count))
        parts = [Journal(output, Part(index, count)) for index in range(1, count + 1)]
        journals = [stack.enter_context(part.joined()) for part in parts]
        if against is None:
            _check_verdicts(output, journals)
        _check_hashes(output, plan, journals, workers, progress)
        found = None if against is None else _judge(output, plan, journals, against)
        assemble(output, plan, journals)
    cut = 0 if against else sum(journal.verdict.cut for journal in journals if journal.verdict)
    return Finished(plan["to"], plan["files"], found, cut)


def _check_file(path: Path, expected: Mapping[str, Any], part: Part) -> None:
    remedy = f"run the `dsv4 convert … --shard {part.index}/{part.count}` that writes it, then --finish again"
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist yet", remedy)
    with path.open("rb") as file:
        # a plan that came from another machine may say any number
        header = file.read(min(expected["header_bytes"], MAX_HEADER))
    if path.stat().st_size != expected["nbytes"] or sha256(header).hexdigest() != expected["header"]:
        raise CheckpointError(f"{path} is not the file of this conversion", f"remove it and {remedy}")


def _check_verdicts(output: Path, journals: Sequence[Journal]) -> None:
    """Raise UnsoundResult for a part that differs from the source, UsageError for one that was never compared."""
    command = f"`dsv4 convert --finish {shell_word(output)} --against SRC"
    for journal in journals:
        name = "it" if journal.part.count == 1 else f"part {journal.part.index} of {journal.part.count}"
        if journal.verdict is None:
            raise UsageError(
                f"{output}: {name} has not been compared with the source", f"compare all parts now: {command}`"
            )
        if not journal.verdict.sound:
            raise UnsoundResult(
                f"{output}: {name} differs from the source, as its comparison found",
                f"convert that part again into an empty folder; or compare all again: {command} --verify full`",
            )


def _check_hashes(
    output: Path, plan: Mapping[str, Any], journals: Sequence[Journal], workers: int, progress: Progress | None
) -> None:
    known = _known(journals)
    names = [*plan["files"]]
    for name, found in zip(names, hash_files([output / name for name in names], workers, progress), strict=True):
        if name not in known:
            part = names.index(name) % plan["parts"] + 1
            raise CheckpointError(
                f"{output / name}: no journal has its hash",
                f"run the `dsv4 convert … --shard {part}/{plan['parts']}` that writes it, then --finish again",
            )
        if found != known[name]:
            raise changed(output / name)


def _known(journals: Sequence[Journal]) -> dict[str, str]:
    return {name: value for journal in journals for name, value in journal.hashes.items()}


def _judge(output: Path, plan: Mapping[str, Any], journals: Sequence[Journal], against: Against) -> Verification:
    """Compare the files of all parts with a source, and record the verdict for each part."""
    identity = _output_of(output, plan)
    bad = any(journal.verdict and not journal.verdict.sound for journal in journals)
    check: Literal["sample", "full"] = "full" if bad else against.check
    found = compare(identity, plan["layer"], against, full=check == "full")
    for journal in journals:
        journal.judge(Verdict(not found.wrong, check))
    if found.wrong:
        others = f" (and {len(found.wrong) - 1:,} more)" if len(found.wrong) > 1 else ""
        raise UnsoundResult(
            f"{output}: {found.wrong[0]} differs from the source{others}",
            f"remove it with `rm -r {shell_word(output)}` and convert again",
        )
    return found


def _output_of(output: Path, plan: Mapping[str, Any]) -> FolderIdentity:
    """Return the identity of the files of all parts together, before they are a model."""
    if plan["to"] == "gguf":
        return recognise_gguf(output)
    values = json.loads(plan["metadata"][CONFIG])
    return identity_of(scan_checkpoint(output), parse_config(values, str(output / CONFIG)), values)


def compare(output: FolderIdentity, layer: int, against: Against, *, full: bool) -> Verification:
    """Compare a whole output with the source. layer: the source's layer that is the output's first.

    Raises UsageError if the source lacks what the output has, or has it in another shape.
    """
    source_name = renumbered(layer)
    theirs, ours = matrices(output.specs.values()), matrices(against.source.specs.values())
    folder, source = output.checkpoint.folder, against.source.checkpoint.folder
    for name, roles in theirs.items():
        origin = ours.get(source_name(name))
        if origin is None or _values(origin) != _values(roles):
            raise UsageError(
                f"{folder} cannot come from {source}, which lacks {source_name(name)} or has it in another shape",
                "give the source of the conversion with --against",
            )
    copies = whole_copies(theirs, output.naming, output.checkpoint.tensors.__contains__)
    with open_source(against.source) as first, open_stored(output) as second:
        return verify(first, second, source_name, copies, full=full, workers=against.workers, progress=against.progress)


def _values(roles: Mapping[Any, Any]) -> tuple[int, ...]:
    weight = roles["weight"]
    return (*weight.shape[:-1], weight.columns or weight.shape[-1])


def assemble(output: Path, plan: Mapping[str, Any], journals: Sequence[Journal]) -> None:
    """Write what makes the files of all parts a model (hashes, configuration, index), and remove the journals."""
    workshop = output / UNFINISHED
    texts = dict(plan["metadata"])
    if plan["index"] is not None:
        texts[INDEX] = json.dumps(plan["index"], indent=2) + "\n"
    known = _known(journals)
    hashes = {name: known[name] for name in plan["files"]}
    hashes |= {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}
    hashes |= {path.relative_to(output).as_posix(): hash_file(path) for path in copied_files(output)}
    jobs = tuple(sorted({job_of(plan, journal.times) for journal in journals}))
    origin = Origin(plan["to"], jobs, plan["layer"], _compared(journals))
    write_file(output / MANIFEST, Manifest(hashes, origin).content(), workshop)
    for name, text in texts.items():
        write_file(output / name, text.encode(), workshop)
    clear(output)


def assembled(output: Path) -> Manifest | None:
    """Return the manifest of a folder that `assemble` has finished, whether or not the journals were removed."""
    manifest = read_manifest(output)
    whole = manifest is not None and manifest.origin is not None and CONFIG in manifest.hashes
    if manifest is None or not whole or not all((output / name).is_file() for name in manifest.hashes):
        return None
    return manifest


def joined_before(output: Path) -> bool:
    """Return whether the parts were joined before, and remove journals that a kill at the very end left."""
    done, plan = assembled(output), output / UNFINISHED / PLAN
    if done is None or (plan.exists() and not read_plan(plan)["files"].keys() <= done.hashes.keys()):
        return False
    with disk_errors(output, lambda: 0):
        clear(output)
    return True


def clear(output: Path) -> None:
    """Remove the plan and the journals of a finished conversion."""
    workshop = output / UNFINISHED
    # another process may do the same
    with suppress(FileNotFoundError):
        for path in workshop.iterdir():
            if path.name != PLAN:
                path.unlink(missing_ok=True)
        # the plan last: without it nothing could be finished
        shutil.rmtree(workshop)


def _compared(journals: Sequence[Journal]) -> str:
    """Return the weakest comparison that covers all matrices."""
    verdicts = [journal.verdict for journal in journals]
    return min(("off" if found is None or found.cut else found.check for found in verdicts), key=CHECKS.index)
