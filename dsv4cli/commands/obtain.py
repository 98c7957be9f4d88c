"""The model that a command runs: found on this machine, or a GGUF model of the Hub that is downloaded first."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output, counted, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource

# number of parallel downloads, as --max-workers of `dsv4 download` has it
WORKERS = 8


def obtain_model(out: Output, name: str) -> "FolderSource | RandomSource":
    """Return the model with a name; download org/name:NAME if the cache lacks it.

    Raises as `resolve_model` and `job.plan`, and NotEnoughDisk.
    """
    from dsv4cli.engine.checkpoint.source import REPOSITORY, resolve_model
    from dsv4cli.errors import ModelNotFound

    try:
        return resolve_model(name)
    except ModelNotFound:
        match = REPOSITORY.fullmatch(name)
        if match is None or not match["variant"]:
            raise
    _download(out, name)
    return resolve_model(name)


def _download(out: Output, name: str) -> None:
    from dsv4cli.engine.hub import job, retry
    from dsv4cli.engine.hub.selection import Selection

    policy = retry.RetryPolicy(report=retry.Notices(out.status))
    plan = job.plan(name, None, Selection(), None, policy)
    plan.raise_if_it_does_not_fit()
    size = f"{counted(len(plan.wanted), 'file')}, {size_text(plan.missing)}"
    out.status(f"{name} is not in the Hugging Face cache: downloading {size}")
    try:
        with out.progress(f"downloading {name}") as report:
            job.carry_out(plan, WORKERS, policy, report)
    except KeyboardInterrupt:
        out.hint("run the same command again to continue the download")
        raise
