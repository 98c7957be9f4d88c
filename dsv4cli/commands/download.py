"""`dsv4 download`: download a Hugging Face repository, or a part of it, and verify every byte."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4cli.harmless import brief_line, shell_word
from dsv4cli.model_names import complete_repository
from dsv4cli.options import JsonOpt, LayersOpt, NoMtpOpt, QuietOpt, RevisionOpt
from dsv4cli.output import UNIT_NOTE, Output, counted, duration_text, size_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dsv4cli.engine.hub.fetch import Outcome
    from dsv4cli.engine.hub.files import RemoteFile
    from dsv4cli.engine.hub.job import DownloadPlan
    from dsv4cli.engine.hub.retry import RetryPolicy
    from dsv4cli.engine.hub.selection import Selection
    from dsv4cli.engine.inspection.download import DownloadVerdict

SCHEMA = "dsv4.download/1"
RepositoryArg = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        autocompletion=complete_repository,
        help="flash, pro, flash-0731 or org/name[@revision] on the Hugging Face Hub; org/name:NAME for one of several "
        "GGUF models, such as org/name:Q4_K_M.",
    ),
]
OnlyOpt = Annotated[
    str | None,
    typer.Option(
        metavar="KINDS",
        help="Only these kinds of files, separated by commas: config, tokenizer, index, weights, other.",
    ),
]
LocalDirOpt = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Download to this folder instead of the Hugging Face cache.")
]
WorkersOpt = Annotated[int, typer.Option("--max-workers", min=1, max=64, help="Number of parallel downloads.")]
DryRunOpt = Annotated[
    bool, typer.Option("--dry-run", help="Show what would be downloaded and whether it fits; download nothing.")
]
DOWNLOAD_EXAMPLES = (
    "dsv4 download flash --dry-run",
    "dsv4 download flash-0731 --local-dir ~/models/DeepSeek-V4-Flash-0731",
    "dsv4 download pro --layers 0-3 --no-mtp",
    "dsv4 download deepseek-ai/DeepSeek-V4-Pro --only config,tokenizer,index",
    "dsv4 download unsloth/DeepSeek-V4-Flash-GGUF:UD-Q2_K_XL",
)


def download(
    context: typer.Context,
    model: RepositoryArg,
    revision: RevisionOpt = None,
    layers: LayersOpt = None,
    no_mtp: NoMtpOpt = False,
    only: OnlyOpt = None,
    local_dir: LocalDirOpt = None,
    max_workers: WorkersOpt = 8,
    dry_run: DryRunOpt = False,
    as_json: JsonOpt = False,
    quiet: QuietOpt = False,
) -> None:
    """Download a model, or a part of it, and verify every byte.

    The command first checks that everything fits on the disk. It compares every file with the Hub's hash, including
    files that are already there: to verify a download, run the command again. A file that does not match is downloaded
    again, unless it is a file in --local-dir that dsv4 did not download: those are never overwritten. An interrupted
    download continues where it stopped, even in the middle of a file.

    To download a part, select layers (--layers, --no-mtp; the weight index says which files have them) or kinds of
    files (--only): config and index are JSON files, tokenizer is everything that tokenization needs, weights are the
    .safetensors files, other is the rest. All files come from one commit. At the end, the command prints the verdict
    of `dsv4 inspect`; for a part, it covers only the layers that you selected.

    If a repository has several GGUF models, name one: org/name:Q4_K_M downloads all files of that model and no others.
    `dsv4 inspect org/name` lists them with their sizes.

    If huggingface_hub is offline (HF_HUB_OFFLINE=1), the command verifies the files in its cache in the same way.

    The cache, login (`hf auth login`), endpoint and proxies are those of huggingface_hub: HF_HOME, HF_HUB_CACHE,
    HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE, HF_HUB_DOWNLOAD_TIMEOUT.
    """
    from dsv4cli.engine.hub import job, retry

    out, started = Output(context.obj.colours, as_json, quiet), time.monotonic()
    policy = retry.RetryPolicy(report=retry.Notices(out.status))
    plan = job.plan(model, revision, _selection(layers, no_mtp, only), local_dir, policy)
    if plan.listing.cached:
        what = f"{plan.listing.repository} at commit {plan.listing.commit}"
        out.status(f"huggingface_hub is offline: checking the cached files of {what}")
    if dry_run:
        out.document(_document(plan, dry_run=True))
        _show_plan(out, plan)
    plan.raise_if_it_does_not_fit()
    if not dry_run:
        _carry_out(out, plan, max_workers, policy, started)


def _carry_out(out: Output, plan: "DownloadPlan", workers: int, policy: "RetryPolicy", started: float) -> None:
    """Download, verify and report. started: time.monotonic() at the start."""
    from dsv4cli.engine.hub import job
    from dsv4cli.engine.inspection.download import judge

    name = f"{plan.variant.name}: " if plan.variant else ""
    out.status(
        f"{name}{counted(len(plan.wanted), 'file')}, {size_text(plan.missing)} of {size_text(plan.nbytes)} to download"
    )
    try:
        with out.progress(f"downloading {plan.name}") as report:
            outcomes = job.carry_out(plan, workers, policy, report)
    except KeyboardInterrupt:
        out.hint("run the same command again to continue")
        raise
    verdict = judge(plan)
    out.document(_document(plan, outcomes, verdict, time.monotonic() - started))
    _show_end(out, plan, outcomes, verdict, time.monotonic() - started)
    if verdict.problem:
        raise typer.Exit(3)


def _selection(layers: str | None, no_mtp: bool, only: str | None) -> "Selection":
    from dsv4cli.engine.conversion.selection import parse_layers
    from dsv4cli.engine.hub.selection import Selection, parse_kinds

    kinds = {} if only is None else {"kinds": parse_kinds(only)}
    return Selection(None if layers is None else parse_layers(layers), not no_mtp, **kinds)


def _show_plan(out: Output, plan: "DownloadPlan") -> None:
    from dsv4cli.engine.hub.selection import KINDS, kind_of

    out.line(f"{plan.listing.repository} at commit {plan.listing.commit}", strong=True)
    rows = [("", "files", "bytes", "present", "to download")]
    for kind in KINDS:
        files = [file for file in plan.wanted if kind_of(file.name) == kind]
        rows += [_row(plan, f"  {kind}", files)] if files else []
    rows.append(_row(plan, "  total", plan.wanted))
    out.table(rows, numbers=True)
    _show_left_out(out, plan)
    out.line(f"{size_text(plan.free)} free on the disk: it {'fits' if plan.fits else 'does not fit'} ({UNIT_NOTE})")
    out.line(f"folder: {plan.destination.folder}")


def _row(plan: "DownloadPlan", name: str, files: "Iterable[RemoteFile]") -> tuple[str, str, str, str, str]:
    files = list(files)
    size, held = sum(file.size for file in files), sum(plan.held[file.name] for file in files)
    return name, f"{len(files)}", size_text(size), size_text(held), size_text(size - held)


def _show_left_out(out: Output, plan: "DownloadPlan") -> None:
    if plan.left_out:
        size = size_text(sum(file.size for file in plan.left_out))
        out.line(f"not selected: {len(plan.left_out)} of {len(plan.listing.files)} files, {size}")


def _show_end(
    out: Output, plan: "DownloadPlan", outcomes: "Mapping[str, Outcome]", verdict: "DownloadVerdict", seconds: float
) -> None:
    counts = {word: list(outcomes.values()).count(word) for word in ("fetched", "repaired", "there")}
    what = plan.name if plan.selection.is_whole else f"the part of {plan.name}"
    files = counted(len(outcomes), "file")
    out.line(f"{what} is complete: {files}, {size_text(plan.nbytes)}, every byte verified", strong=True)
    out.table(
        [
            ("  files", ", ".join(f"{count} {word}" for word, count in counts.items() if count)),
            ("  commit", plan.listing.commit),
            ("  folder", str(plan.destination.folder)),
            ("  time", duration_text(seconds)),
        ]
    )
    _show_left_out(out, plan)
    out.line(verdict.sentence, strong=True)
    if verdict.problem:
        out.line(f"  {brief_line(verdict.problem.message)}")
        out.line(f"→ {verdict.problem.remedy}")
    elif plan.selection.is_whole and verdict.tensors:
        out.hint(f"dsv4 inspect {_as_model(plan)}")
    elif plan.selection.layers and verdict.tensors:
        only = f"{plan.selection.layers.start}-{plan.selection.layers.stop - 1}" + (
            "" if plan.selection.mtp else " --no-mtp"
        )
        out.hint(f"to make a model of these layers: dsv4 convert {_as_model(plan)} OUT --to official --layers {only}")


def _as_model(plan: "DownloadPlan") -> str:
    """Return the download as a MODEL argument for a shell."""
    from dsv4cli.engine.checkpoint.names import folder_word

    return folder_word(plan.model) if plan.is_folder else shell_word(plan.model_name)


def _document(
    plan: "DownloadPlan",
    outcomes: "Mapping[str, Outcome] | None" = None,
    verdict: "DownloadVerdict | None" = None,
    seconds: float | None = None,
    *,
    dry_run: bool = False,
) -> dict[str, Any]:
    from dsv4cli.engine.hub.selection import KINDS, kind_of

    selection = plan.selection
    return {
        "schema": SCHEMA,
        "model": plan.name,
        "repository": plan.listing.repository,
        "revision": plan.listing.revision,
        "commit": plan.listing.commit,
        "folder": str(plan.destination.folder),
        "dry_run": dry_run,
        "offline": plan.listing.cached,
        "variant": plan.variant and plan.variant.name,
        "complete": outcomes is not None,
        "part": {
            "layers": None if selection.layers is None else [selection.layers.start, selection.layers.stop - 1],
            "mtp": selection.mtp,
            "kinds": [kind for kind in KINDS if kind in selection.kinds],
        },
        "files": [
            {
                "name": file.name,
                "kind": kind_of(file.name),
                "bytes": file.size,
                "sha256" if file.sha256 else "git_sha1": file.etag,
                "held_bytes": plan.held[file.name],
                "outcome": outcomes and outcomes[file.name],
            }
            for file in plan.wanted
        ],
        "left_out": [file.name for file in plan.left_out],
        "bytes": {"wanted": plan.nbytes, "held": plan.nbytes - plan.missing, "missing": plan.missing},
        "free_bytes": plan.free,
        "fits": plan.fits,
        "seconds": seconds,
        "verdict": verdict and _verdict(verdict),
    }


def _verdict(verdict: "DownloadVerdict") -> dict[str, Any]:
    problem = verdict.problem
    return {
        "sound": None if verdict.tensors == 0 and not problem else problem is None,
        "sentence": verdict.sentence,
        "tensors": verdict.tensors,
        "problem": problem and {"message": problem.message, "remedy": problem.remedy},
    }
