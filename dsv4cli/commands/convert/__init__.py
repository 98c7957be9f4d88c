"""`dsv4 convert`: convert a checkpoint to another layout. Streams, resumes, and compares the output with its source."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from dsv4cli.commands.convert.join import ComparisonOptions, facts, join, next_step, notes, time_text, verdict
from dsv4cli.commands.convert.options import (
    AgainstOpt,
    AttentionOpt,
    CheckOpt,
    DryRunOpt,
    ExpertsOpt,
    FinishOpt,
    JsonOpt,
    OutputArg,
    RanksOpt,
    ShardOpt,
    SizeOpt,
    SourceArg,
    ToOpt,
    VerifyOpt,
    WorkersOpt,
)
from dsv4cli.commands.convert.rounding import report_rounding
from dsv4cli.commands.hidden_folder import note_hidden_folder
from dsv4cli.commands.starting import import_torch
from dsv4cli.errors import UsageError
from dsv4cli.harmless import shell_word
from dsv4cli.options import DeviceOpt, LayersOpt, NoMtpOpt, QuietOpt
from dsv4cli.output import Output, counted, duration_text, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.conversion.job import Conversion
    from dsv4cli.engine.conversion.manifest import Manifest
    from dsv4cli.engine.conversion.options import ConversionOptions
    from dsv4cli.engine.conversion.verify import Verification
    from dsv4cli.engine.conversion.write import FileDone

SCHEMA = "dsv4.convert/1"
CONVERT_EXAMPLES = (
    "dsv4 convert flash OUT --to bf16 --dry-run",
    "dsv4 convert ~/models/DeepSeek-V4-Flash OUT --to mp --ranks 4",
    "dsv4 convert flash OUT --to official --layers 0-3 --no-mtp",
    "dsv4 convert flash OUT --to nvfp4 --shard 2/8",
    "dsv4 convert --finish OUT",
    "dsv4 convert --check OUT --against flash",
)


def convert(
    context: typer.Context,
    source: SourceArg = None,
    output: OutputArg = None,
    to: ToOpt = None,
    ranks: RanksOpt = None,
    layers: LayersOpt = None,
    no_mtp: NoMtpOpt = False,
    experts: ExpertsOpt = None,
    attention: AttentionOpt = None,
    max_shard_size: SizeOpt = "5GB",
    workers: WorkersOpt = None,
    device: DeviceOpt = "auto",
    check: VerifyOpt = "sample",
    dry_run: DryRunOpt = False,
    shard: ShardOpt = None,
    finish: FinishOpt = None,
    look: CheckOpt = None,
    against: AgainstOpt = None,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Convert a checkpoint to another layout, and verify that the values are the same.

    \b
    Layouts (--to); SRC may be in any of them:
      official      as published: FP4 experts, other matrices FP8, official names
      bf16          everything dequantized to BF16, official names; for fine-tuning
      fp8           experts in FP8 blocks of 128 x 128; only if lossless
      base          all matrices in FP8 with FP32 scales; only if lossless
      nvfp4         experts in NVFP4, ModelOpt's layout; only if lossless
      mp            model{i}-mp{N}.safetensors for the official scripts; needs --ranks N
      transformers  names and stacked experts of Hugging Face transformers, BF16
      gguf          for llama.cpp: MXFP4, Q8_0 or, on request, BF16; no drafter
      compressed-tensors  experts in MXFP4 or (--experts nvfp4) NVFP4, others BF16

    Each thread holds only a few tensors in memory. A file gets its final name once it is complete; the index and the
    configuration come last. To continue after an interruption, run the command again. SRC is never modified.
    """
    out = Output(context.obj.colours, as_json, quiet)
    if finish is not None or look is not None:
        given = [source, output, to, ranks, layers, experts, attention, shard, no_mtp or None, dry_run or None]
        return join(out, finish, look, ComparisonOptions(against, check, workers), given)
    source, output = _required(out, source, output, to, against)
    from dsv4cli.engine.conversion.options import ConversionOptions

    options = ConversionOptions(
        to=to or "official", ranks=ranks, layers=layers, drafter=not no_mtp, experts=experts, attention=attention,
        max_shard_size=max_shard_size, shard=shard, workers=workers, device=device)  # fmt: skip
    return _begin(out, source, output, options, check, dry_run=dry_run)


def _required(
    out: Output, source: str | None, output: Path | None, to: str | None, against: str | None
) -> tuple[str, Path]:
    """Return SRC and DST, with PyTorch imported. Raises UsageError if an argument is missing."""
    if against is not None:
        raise UsageError("--against needs --finish or --check", "remove it: a conversion is compared with its SRC")
    if source is None or output is None:
        raise UsageError("convert needs SRC, DST and --to", "for example: dsv4 convert flash OUT --to bf16")
    if to is None and not source.startswith("random:"):
        raise UsageError(
            "convert needs --to, the layout to write",
            "for example --to bf16; dsv4 convert --help describes the layouts",
        )
    import_torch(out)
    return source, output


def _begin(
    out: Output,
    source: str,
    output: Path,
    options: "ConversionOptions",
    check: Literal["sample", "full", "off"],
    *,
    dry_run: bool,
) -> None:
    """Convert, or report a finished conversion or the plan of a dry run."""
    from dsv4cli.engine.conversion.convert import finished
    from dsv4cli.engine.conversion.options import prepare

    note_hidden_folder(out, source)
    conversion, threads, device = prepare(source, output, options)
    done = finished(conversion)
    if done is not None:
        _done(out, conversion, done, source, threads, "off" if dry_run else check)
    elif dry_run:
        _plan(out, conversion, device, threads)
    else:
        _convert(out, conversion, device, threads, check)


def _done(
    out: Output,
    conversion: "Conversion",
    manifest: "Manifest",
    source: str,
    workers: int,
    check: Literal["sample", "full", "off"],
) -> None:
    """Compare the complete output of an earlier run, unless that was done before, and report it."""
    from dsv4cli.engine.conversion.convert import compare_finished

    nbytes, folder = sum(file.nbytes for file in conversion.files), conversion.output
    with out.progress("comparing") as progress:
        found = compare_finished(conversion, manifest, check=check, workers=workers, progress=progress)
    compared = check if found else manifest.origin.compared if manifest.origin else "off"
    if out.as_json:
        out.record(
            {
                "schema": SCHEMA, "event": "complete", "output": str(folder), "to": conversion.target.name,
                "files": len(conversion.files), "bytes": nbytes, "compared": compared,
                "verified": facts(found),
            }
        )  # fmt: skip
    text = f"{folder} is complete: {counted(len(conversion.files), 'file')}, {size_text(nbytes)}; nothing to write"
    out.line(text, strong=True)
    if found is not None:
        out.line(verdict(found))
        return
    if compared == "off":
        out.warning("part of the output has not been compared with the source")
    command = f"dsv4 convert --check {shell_word(folder)} --against {shell_word(source)}"
    out.hint(f"to compare it with the source: {command}")


def _plan(out: Output, conversion: "Conversion", device: Any, workers: int) -> None:
    """Print the plan of a dry run, after the same checks as for a conversion."""
    from dsv4cli.engine.conversion.convert import trial
    from dsv4cli.engine.conversion.disk_space import free_bytes
    from dsv4cli.engine.conversion.write import memory_bytes

    conversion.check_source()
    conversion.check_output()
    rate = trial(conversion, device, workers)
    free, missing = free_bytes(conversion.output), conversion.bytes_missing
    others = sum(copy.nbytes for copy in conversion.copies)
    memory = memory_bytes(conversion.matrices.values(), device, workers)
    facts = {
        "tensors": sum(len(file.keys) for file in conversion.own_files),
        "files": len(conversion.own_files),
        "bytes_in": conversion.bytes_in,
        "bytes_out": conversion.bytes_out,
        "other_files": len(conversion.copies),
        "other_bytes": others,
        "bytes_to_write": missing,
        "free": free,
        "memory": memory,
        "workers": workers,
        "device": str(device),
        "bytes_per_second": round(rate) if isfinite(rate) else None,
        "seconds": round(missing / rate, 1) if missing else 0.0,
        "fits": missing <= free,
        "rounded": report_rounding(out, conversion, device, workers),
        "notes": [*conversion.notes],
    }
    out.document({"schema": SCHEMA, "event": "plan", "source": conversion.source.layout, **facts})
    rows = [
        ("from", f"{conversion.source.checkpoint.folder}, {conversion.source.layout}"),
        ("to", f"{conversion.output}, {conversion.target.name}"),
        ("tensors", f"{facts['tensors']:,} in {counted(len(conversion.own_files), 'file')}"),
        ("bytes", f"{size_text(conversion.bytes_in)} in, {size_text(conversion.bytes_out)} out"),
        ("other files", f"{len(conversion.copies):,}, {size_text(others)}"),
        ("disk", f"{size_text(missing)} to write, {size_text(free)} free"),
        ("memory", f"at most {size_text(memory)} with {workers} threads on {device}"),
        ("time", time_text(missing, rate)),
    ]
    out.table(rows)
    notes(out, conversion.notes)
    conversion.check_space()
    conversion.check_writable()


@contextmanager
def _resumable(out: Output) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        out.new_line()
        out.hint("run the same command again to continue")
        raise


def _convert(
    out: Output, conversion: "Conversion", device: Any, workers: int, check: Literal["sample", "full", "off"]
) -> None:
    from dsv4cli.engine.conversion.convert import begun, copy_files, finish_alone, verify_files, write_files

    started, files = time.monotonic(), []
    with _resumable(out), begun(conversion) as journal:
        rounded = report_rounding(out, conversion, device, workers)
        if out.as_json and rounded:
            out.record({"schema": SCHEMA, "event": "rounding", "tensors": rounded})
        with out.progress(f"to {conversion.target.name}") as progress:
            for file in write_files(conversion, journal, device, workers, progress):
                files.append(file)
                _file(out, conversion, file, len(files))
        seconds = time.monotonic() - started
        with out.progress("comparing") as progress:
            found = verify_files(conversion, journal, check=check, workers=workers, progress=progress)
        with out.progress("copying other files") as progress:
            copy_files(conversion, progress)
        if conversion.part.count == 1:
            finish_alone(conversion, journal)
    _summary(out, conversion, files, seconds, found)


def _file(out: Output, conversion: "Conversion", file: "FileDone", number: int) -> None:
    if out.as_json:
        out.record(
            {
                "schema": SCHEMA, "event": "file", "file": file.name, "bytes": file.nbytes, "tensors": file.tensors,
                "resumed": file.resumed,
            }
        )  # fmt: skip
    state = " already there" if file.resumed else ""
    out.status(f"{number}/{len(conversion.own_files)}  {file.name}  {size_text(file.nbytes)}{state}")


def _summary(
    out: Output, conversion: "Conversion", files: "list[FileDone]", seconds: float, found: "Verification | None"
) -> None:
    nbytes, part = sum(file.nbytes for file in files), conversion.part
    written = sum(file.written for file in files)
    if out.as_json:
        out.record(
            {
                "schema": SCHEMA, "event": "summary", "output": str(conversion.output), "to": conversion.target.name,
                "part": [part.index, part.count], "files": len(files), "bytes": nbytes, "seconds": round(seconds, 3),
                "verified": facts(found), "notes": [*conversion.notes],
            }
        )  # fmt: skip
    rate = f" in {duration_text(seconds)}, {size_text(round(written / max(seconds, 1e-3)))}/s" if written else ""
    out.line(f"{conversion.output}: {counted(len(files), 'file')}, {size_text(nbytes)}{rate}", strong=True)
    out.line(verdict(found))
    notes(out, conversion.notes)
    out.hint(next_step(conversion.output, conversion.target.name, part.index, part.count))
