"""A download from plan to end: the wanted files, those that exist, the disk space, and fetching them all."""

import logging
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from huggingface_hub import constants

from dsv4cli.engine.checkpoint.gguf.variants import Variant
from dsv4cli.engine.checkpoint.headers import INDEX, read_index
from dsv4cli.engine.hub.cached import cached_listing
from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.destination import CacheDestination, Destination, FolderDestination, free_bytes
from dsv4cli.engine.hub.fetch import REPAIRS, Outcome, settle
from dsv4cli.engine.hub.files import Listing, RemoteFile, list_files
from dsv4cli.engine.hub.repository import repository_of, variant_of
from dsv4cli.engine.hub.retry import AGAIN, RetryPolicy
from dsv4cli.engine.hub.selection import Selection, select_files
from dsv4cli.engine.hub.xet import written
from dsv4cli.engine.system.threads import Meter, do_all
from dsv4cli.errors import DISK_FULL, CheckpointError, Dsv4Error, HubError, NotEnoughDisk, UsageError

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class DownloadPlan:
    """The plan of a download.

    name: the user's name of the model. held: bytes of each wanted file that exist already, judged by size. variant: the
    GGUF model that is wanted, None for files chosen otherwise.
    """

    name: str
    listing: Listing
    selection: Selection
    destination: Destination
    wanted: tuple[RemoteFile, ...]
    held: Mapping[str, int]
    free: int
    variant: Variant | None = None

    @property
    def model(self) -> Path:
        """The downloaded model: the folder, or the first file of a GGUF variant."""
        return self.destination.folder / (self.variant.files[0] if self.variant else "")

    @property
    def model_name(self) -> str:
        """The name of the downloaded model as MODEL, with its revision."""
        if self.listing.revision is None or "@" in self.name:
            return self.name
        return str(repository_of(self.name, self.listing.revision))

    @cached_property
    def left_out(self) -> tuple[RemoteFile, ...]:
        """The files of the repository that are not wanted."""
        names = {file.name for file in self.wanted}
        return tuple(file for file in self.listing.files if file.name not in names)

    @property
    def is_folder(self) -> bool:
        """Whether the files go into a folder of the user instead of the cache."""
        return isinstance(self.destination, FolderDestination)

    @property
    def nbytes(self) -> int:
        """Size of the wanted files in bytes."""
        return sum(file.size for file in self.wanted)

    @property
    def missing(self) -> int:
        """Bytes to download."""
        return self.nbytes - sum(self.held.values())

    @property
    def fits(self) -> bool:
        """Whether the disk has enough space for the missing bytes."""
        return self.missing <= self.free

    def raise_if_it_does_not_fit(self) -> None:
        """Raise NotEnoughDisk, with the numbers, if the disk is too small."""
        if not self.fits:
            raise NotEnoughDisk(
                f"{self.name} needs {_size(self.missing)} more at {self.destination.folder}, "
                f"and {_size(self.free)} are free there",
                f"free {_size(self.missing - self.free)} (`hf cache prune` removes unfinished downloads), "
                "use another disk with --local-dir or HF_HOME, or download a part with --layers",
            )


def plan(
    text: str, revision: str | None, selection: Selection, local_dir: Path | None, policy: RetryPolicy
) -> DownloadPlan:
    """List the repository, select files by its index and find those that exist; downloads only the index.

    If huggingface_hub is offline, the cached snapshot is used as the listing. Raises UsageError, also for a file in the
    way that was not downloaded, HubError, and CheckpointError for an invalid index.
    """
    name = repository_of(text, revision)
    of_hub = (name.repository, name.revision)
    listing = cached_listing(*of_hub) if constants.HF_HUB_OFFLINE else list_files(*of_hub, policy)
    variant = variant_of(listing, name, selection)
    if variant is not None:
        wanted = tuple(listing.by_name[file] for file in variant.files)
    else:
        wanted = select_files(listing, selection, _index_of(listing, selection, policy))
    destination = CacheDestination(listing) if local_dir is None else FolderDestination(listing, local_dir.expanduser())
    held = {file.name: _held(destination, file) for file in wanted}
    return DownloadPlan(text, listing, selection, destination, wanted, held, free_bytes(destination), variant)


def _index_of(listing: Listing, selection: Selection, policy: RetryPolicy) -> Mapping[str, str]:
    """Fetch the weight index if the selection needs it, and return the file of each tensor."""
    file = listing.by_name.get(INDEX)
    if file is None or (selection.is_all_weights and not listing.cached):
        return {}
    with tempfile.TemporaryDirectory(prefix="dsv4-") as folder:
        fetch_small(listing, [file], Path(folder), policy)
        return index_in(Path(folder), listing)


def index_in(folder: Path, listing: Listing) -> dict[str, str]:
    """Return the index in a temporary folder that it was fetched into, empty if the repository has none.

    Raises CheckpointError, naming the repository, for an invalid index.
    """
    try:
        return read_index(folder / INDEX)
    except CheckpointError as error:
        raise CheckpointError(error.message.replace(str(folder), listing.repository), another(listing)) from None


def another(listing: Listing) -> str:
    """Return the remedy for a repository with damaged files."""
    return f"use another revision, for example {listing.repository}@REVISION"


def _held(destination: Destination, file: RemoteFile) -> int:
    found, part = destination.find(file), destination.part(file)
    if found is not None and found.stat().st_size == file.size:
        return file.size
    destination.guard(file)
    begun = part.stat().st_size if part.is_file() else max(map(written, destination.leftovers(file)), default=0)
    return min(begun, file.size)


def fetch_small(listing: Listing, files: Collection[RemoteFile], folder: Path, policy: RetryPolicy) -> None:
    """Fetch and verify a few files into a folder; cached files are copied."""
    _fetch(listing, FolderDestination(listing, folder), files, len(files), policy, lambda done, total: None)


def carry_out(job: DownloadPlan, workers: int, policy: RetryPolicy, report: Report) -> dict[str, Outcome]:
    """Download and verify every wanted file, including those that exist, and return the outcome of each.

    On return, every wanted file is at the destination with the listed size and hash. Raises HubError, NotEnoughDisk,
    and UsageError for a destination that cannot be written.
    """
    # the small files first: a refusal shows at once
    files = sorted(job.wanted, key=lambda file: (file.size, file.name))
    outcomes = _fetch(job.listing, job.destination, files, workers, policy, report)
    broken = sorted(name for name, outcome in outcomes.items() if outcome == "broken")
    if broken:
        others = f" and {len(broken) - 1} more" if broken[1:] else ""
        raise HubError(
            f"{broken[0]}{others} came with wrong bytes {1 + REPAIRS} times; the other files are complete",
            f"the hub or a proxy damages them: {AGAIN}",
        )
    try:
        job.destination.close()
    except OSError as error:
        raise _explained(error, job.destination) from error
    return outcomes


def _fetch(
    listing: Listing,
    destination: Destination,
    files: Collection[RemoteFile],
    workers: int,
    policy: RetryPolicy,
    report: Report,
) -> dict[str, Outcome]:
    stop = threading.Event()
    meter = Meter(sum(file.size for file in files), report)
    context = DownloadContext(listing, destination, policy, meter, stop)
    jobs = {file.name: partial(settle, context, file) for file in files}
    try:
        with quiet():
            return do_all(jobs, workers, stop)
    except OSError as error:
        raise _explained(error, destination) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Silence huggingface_hub's log unless HF_DEBUG is set: its warnings are handled here."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    if not constants.HF_DEBUG:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _explained(error: OSError, destination: Destination) -> Dsv4Error:
    if error.errno in DISK_FULL:
        return NotEnoughDisk(f"the disk of {destination.folder} is full", f"free some space, then {AGAIN}")
    reason = error.strerror or str(error)
    return UsageError(f"{error.filename or destination.folder} cannot be written: {reason}", "use another --local-dir")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:,.2f} MB"
