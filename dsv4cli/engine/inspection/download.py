"""Verification of a download by its headers: as `inspect` for a whole model, by the wanted layers for a part."""

from dataclasses import dataclass, replace
from pathlib import Path

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.naming import stored_table
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.hub.job import DownloadPlan, another
from dsv4cli.engine.hub.selection import Selection, kind_of
from dsv4cli.engine.inspection.report import inspect_model
from dsv4cli.errors import CheckpointError, Dsv4Error, UnsupportedCheckpoint


@dataclass(frozen=True)
class DownloadVerdict:
    """The result of checking the headers.

    tensors: number of tensors that the model, or the part, must have; 0 if nothing was compared. problem: the first
    problem.
    """

    sentence: str
    tensors: int = 0
    problem: Dsv4Error | None = None


def judge(plan: DownloadPlan) -> DownloadVerdict:
    """Compare the headers of a finished download with the tensor table of the wanted layers."""
    found = _judge(plan)
    # every file is as the hub has it: to fetch it again changes nothing
    if type(found.problem) is CheckpointError and not plan.listing.cached and not _strangers(plan):
        where = f"{plan.listing.repository} is so at commit {plan.listing.commit[:12]}"
        remedy = f"{where}: {another(plan.listing)}, or ask its owners"
        return replace(found, problem=CheckpointError(found.problem.message, remedy))
    return found


def _strangers(plan: DownloadPlan) -> set[str]:
    """Return the names of weight files in the folder that are not in the repository."""
    return {path.name for path in plan.destination.folder.glob("*.safetensors")} - plan.listing.by_name.keys()


def _judge(plan: DownloadPlan) -> DownloadVerdict:
    folder = plan.destination.folder
    if plan.selection.is_whole:
        return _judge_whole(FolderSource(plan.name, plan.model))
    if not any(kind_of(file.name) == "weights" for file in plan.wanted):
        return DownloadVerdict("no weights were asked for, so there are no tensors to check")
    if not any((folder / name).is_file() for name in ("config.json", "inference/config.json")):
        return DownloadVerdict("the tensors are not checked: there is no config.json to compare them with")
    return check_part(folder, plan.selection)


def _judge_whole(source: FolderSource) -> DownloadVerdict:
    result = inspect_model(source)
    tensors = result.coverage.expected if result.coverage else 0
    if result.runs_elsewhere:
        return DownloadVerdict(f"{source.name} is complete, and dsv4 does not run its layout", tensors, result.problem)
    if result.problem:
        return DownloadVerdict(f"{source.name} would not load", tensors, result.problem)
    return DownloadVerdict(f"{source.name} would load: all {tensors:,} tensors are present and as expected", tensors)


def check_part(folder: Path, selection: Selection) -> DownloadVerdict:
    """Compare the headers in a partial folder with the tensor table of the wanted layers.

    Tensors of other layers in shared files are accepted if the table of the whole model has them.
    """
    try:
        found = recognise(folder)
    except (CheckpointError, UnsupportedCheckpoint) as error:
        return DownloadVerdict("the part is damaged", problem=error)
    table = stored_table(found.naming, expected_tensors(found.config, found.formats).values())
    wanted = {name: spec for name, spec in table.items() if selection.takes(name)}
    others = table.keys() - wanted.keys()
    checkpoint = replace(
        found.checkpoint,
        tensors={name: info for name, info in found.checkpoint.tensors.items() if name not in others},
        index_problems={name: text for name, text in found.checkpoint.index_problems.items() if name not in others},
    )
    problem = check_coverage(checkpoint, wanted).problem()
    if problem:
        return DownloadVerdict("the part is damaged", len(wanted), problem)
    return DownloadVerdict(f"all {len(wanted):,} tensors of the part are present and as expected", len(wanted))
