"""`dsv4 convert`: a checkpoint in another layout, streamed, resumable, and compared with its source."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsv4cli.errors import UsageError
from dsv4cli.options import DeviceOpt, LayersOpt, NoMtpOpt
from dsv4cli.output import Output, counted, duration_text, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.conversion.job import Conversion
    from dsv4cli.engine.conversion.verify import Verification
    from dsv4cli.engine.conversion.work import FileDone

SCHEMA = "dsv4.convert/1"
SOURCE_HELP = "The checkpoint: a folder in any of the layouts, or flash, pro, org/name in the Hugging Face cache."
SourceArg = Annotated[str | None, typer.Argument(metavar="SRC", help=SOURCE_HELP)]
OutputArg = Annotated[Path | None, typer.Argument(metavar="DST", help="The folder to write: new, empty or unfinished.")]
ToOpt = Annotated[
    Literal["official", "bf16", "fp8", "nvfp4", "mp", "transformers"] | None,
    typer.Option("--to", help="The layout to make, see above."),
]
RanksOpt = Annotated[int | None, typer.Option(min=1, help="For --to mp: cut for this many GPUs.")]
ExpertsOpt = Annotated[
    Literal["fp4", "fp8", "bf16"] | None, typer.Option(help="Store the routed experts in this format instead.")
]
AttentionOpt = Annotated[
    Literal["fp8", "bf16"] | None,
    typer.Option(help="Store attention and the other matrices outside the routed experts in this format instead."),
]
SizeOpt = Annotated[str, typer.Option(metavar="SIZE", help="Largest output file; a tensor is never cut.")]
WorkersOpt = Annotated[int | None, typer.Option(min=1, help="Threads; as many as there are cores, up to 16.")]
VerifyOpt = Annotated[
    Literal["sample", "full", "off"],
    typer.Option("--verify", help="Compare the output with the source: a sixteenth of each large tensor, or all."),
]
DryRunOpt = Annotated[bool, typer.Option("--dry-run", help="Show the plan and its rate; write nothing.")]
ShardOpt = Annotated[str | None, typer.Option(metavar="I/N", help="Do the I-th of N parts, as one of N machines.")]
FinishOpt = Annotated[
    Path | None, typer.Option(metavar="DST", help="Join the parts of a shared job: checks, configuration, index.")
]
JsonOpt = Annotated[bool, typer.Option("--json", help="Print one JSON object per file and a summary, line by line.")]


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
    as_json: JsonOpt = False,
) -> None:
    """Convert a checkpoint to another layout, and prove that the values are the same.

    \b
    Layouts (--to); SRC may be any of them:
      official      as published: experts FP4, other matrices FP8, official names
      bf16          everything dequantised, official names; for fine-tuning
      fp8           experts FP8 in blocks of 128 x 128, refused where not exact
      nvfp4         experts NVFP4 in ModelOpt's layout, refused where not exact
      mp            model{i}-mp{N}.safetensors of the official scripts; --ranks N
      transformers  names and stacked experts of Hugging Face transformers, bf16

    Memory stays at a few tensors per thread, whatever the size. Files appear under their names when they are complete,
    index and configuration last. Interrupted, the same command continues. The source is never written to.
    """
    out = Output(context.obj, as_json)
    if finish is not None:
        given = [source, output, to, ranks, layers, experts, attention, workers, shard]
        _finish(out, finish, others=[*given, no_mtp or None, dry_run or None, None if check == "sample" else check])
        return
    if source is None or output is None or to is None:
        raise UsageError("convert needs SRC, DST and --to", "as in `dsv4 convert flash OUT --to bf16`")
    from dsv4cli.engine.conversion.options import Choices, prepare

    choices = Choices(to, ranks, layers, not no_mtp, experts, attention, max_shard_size, shard, workers, device)
    conversion, threads, place = prepare(source, output, choices)
    if dry_run:
        _plan(out, conversion, place, threads)
        return
    _convert(out, conversion, place, threads, check)


def _finish(out: Output, folder: Path, others: list[Any]) -> None:
    if any(other is not None for other in others):
        raise UsageError("--finish takes the output folder alone", "as in `dsv4 convert --finish OUT`")
    from dsv4cli.engine.conversion.convert import finish

    plan = finish(folder)
    nbytes = sum(file["nbytes"] for file in plan["files"].values())
    out.document(
        {"schema": SCHEMA, "event": "finished", "output": str(folder), "bytes": nbytes, "files": plan["files"]}
    )
    out.line(f"{folder} is complete: {counted(len(plan['files']), 'file')}, {size_text(nbytes)}", strong=True)
    out.hint(f"look at it with `dsv4 inspect {folder}`")


def _plan(out: Output, conversion: "Conversion", device: Any, workers: int) -> None:
    """Shows what would be done, checked as the doing checks it."""
    from dsv4cli.engine.conversion.convert import trial
    from dsv4cli.engine.conversion.job import free_bytes
    from dsv4cli.engine.conversion.work import memory_bytes

    conversion.check_source()
    conversion.check_output()
    rate = trial(conversion, device, workers)
    free, missing = free_bytes(conversion.output), conversion.bytes_missing
    memory = memory_bytes(conversion.matrices.values(), device, workers)
    facts = {
        "tensors": sum(len(file.keys) for file in conversion.own_files),
        "files": len(conversion.own_files),
        "bytes_in": conversion.bytes_in,
        "bytes_out": conversion.bytes_out,
        "bytes_to_write": missing,
        "free": free,
        "memory": memory,
        "workers": workers,
        "device": str(device),
        "bytes_per_second": round(rate),
        "seconds": round(missing / rate, 1),
        "fits": missing <= free,
    }
    out.document({"schema": SCHEMA, "event": "plan", "source": conversion.source.layout, **facts})
    rows = [
        ("from", f"{conversion.source.checkpoint.folder}, {conversion.source.layout}"),
        ("to", f"{conversion.output}, {conversion.target.name}"),
        ("tensors", f"{facts['tensors']:,} in {counted(len(conversion.own_files), 'file')}"),
        ("bytes", f"{size_text(conversion.bytes_in)} in, {size_text(conversion.bytes_out)} out"),
        ("disk", f"{size_text(missing)} to write, {size_text(free)} free"),
        ("memory", f"at most {size_text(memory)} with {workers} threads on {device}"),
        ("time", f"{duration_text(missing / rate)} at {size_text(round(rate))}/s, measured over a second"),
    ]
    out.table(rows)
    conversion.check_room()


@contextmanager
def _resumable(out: Output) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        out.new_line()
        out.hint("the same command continues where this one stopped")
        raise


def _convert(out: Output, conversion: "Conversion", device: Any, workers: int, check: str) -> None:
    from dsv4cli.engine.conversion.convert import copy_files, finish, verify_files, write_files

    started, files, found = time.monotonic(), [], None
    with _resumable(out):
        with out.progress(f"to {conversion.target.name}") as progress:
            for file in write_files(conversion, device, workers, progress):
                files.append(file)
                _file(out, conversion, file, len(files))
        seconds = time.monotonic() - started
        if check != "off":
            with out.progress("comparing") as progress:
                found = verify_files(conversion, full=check == "full", workers=workers, progress=progress)
        copy_files(conversion)
        if conversion.part.count == 1:
            finish(conversion.output)
    _summary(out, conversion, files, seconds, found)


def _file(out: Output, conversion: "Conversion", file: "FileDone", number: int) -> None:
    if out.as_json:
        out.record(
            {
                "schema": SCHEMA, "event": "file", "file": file.name, "bytes": file.nbytes, "tensors": file.tensors,
                "resumed": file.resumed,
            }
        )  # fmt: skip
    state = " was there" if file.resumed else ""
    out.status(f"{number}/{len(conversion.own_files)}  {file.name}  {size_text(file.nbytes)}{state}")


def _summary(
    out: Output, conversion: "Conversion", files: "list[FileDone]", seconds: float, found: "Verification | None"
) -> None:
    nbytes, part = sum(file.nbytes for file in files), conversion.part
    written = sum(file.nbytes for file in files if not file.resumed)
    if out.as_json:
        verified = found and {
            "values": found.values, "compared": found.compared, "exact": len(found.exact), "inexact": found.errors
        }  # fmt: skip
        out.record(
            {
                "schema": SCHEMA, "event": "summary", "output": str(conversion.output), "to": conversion.target.name,
                "part": [part.index, part.count], "files": len(files), "bytes": nbytes, "seconds": round(seconds, 3),
                "verified": verified,
            }
        )  # fmt: skip
    rate = f" in {duration_text(seconds)}, {size_text(round(written / max(seconds, 1e-3)))}/s" if written else ""
    out.line(f"{conversion.output}: {counted(len(files), 'file')}, {size_text(nbytes)}{rate}", strong=True)
    out.line(_verdict(found))
    if part.count > 1:
        out.hint(f"when all {part.count} parts are there: `dsv4 convert --finish {conversion.output}`")
    else:
        out.hint(f"look at it with `dsv4 inspect {conversion.output}`")


def _verdict(found: "Verification | None") -> str:
    if found is None:
        return "not compared with the source (--verify off)"
    if not found.values:
        return "nothing to compare with the source: this part has no whole tensor"
    share = (
        f"{found.compared / max(found.values, 1):.0%} of the values of" if found.compared < found.values else "all of"
    )
    text = f"compared with the source: {share} {len(found.exact) + len(found.errors):,} tensors; "
    if not found.errors:
        return text + "all are exact, bit for bit"
    name, error = next(iter(found.errors.items()))
    return text + f"{len(found.exact):,} are exact, the others within {error:.2g} (relative, {name})"
