"""A download from its plan to its end: what is wanted, what is there, whether it fits, and all of it fetched."""

import logging
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from huggingface_hub import constants

from dsv4cli.engine.checkpoint.headers import INDEX, read_index
from dsv4cli.engine.checkpoint.names import ALIASES
from dsv4cli.engine.checkpoint.source import REPOSITORY
from dsv4cli.engine.hub.cached import cached_listing
from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.destination import CacheDestination, Destination, FolderDestination, free_bytes
from dsv4cli.engine.hub.fetch import REPAIRS, Outcome, settle
from dsv4cli.engine.hub.files import Listing, RemoteFile, list_files
from dsv4cli.engine.hub.retry import AGAIN, RetryPolicy
from dsv4cli.engine.hub.selection import Selection, select_files
from dsv4cli.engine.hub.xet import written
from dsv4cli.engine.system.threads import Meter, do_all
from dsv4cli.errors import DISK_FULL, CheckpointError, Dsv4Error, HubError, NotEnoughDisk, UsageError

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class DownloadPlan:
    """A download before it begins. name: what the user called the model. held: bytes of each wanted file that are there
    by size and need not come."""

    name: str
    listing: Listing
    selection: Selection
    destination: Destination
    wanted: tuple[RemoteFile, ...]
    held: Mapping[str, int]
    free: int

    @cached_property
    def left_out(self) -> tuple[RemoteFile, ...]:
        """What the repository holds and the user does not want."""
        names = {file.name for file in self.wanted}
        return tuple(file for file in self.listing.files if file.name not in names)

    @property
    def is_folder(self) -> bool:
        """Whether the files go into a folder of the user's, not into the cache."""
        return isinstance(self.destination, FolderDestination)

    @property
    def nbytes(self) -> int:
        """Bytes of the wanted files."""
        return sum(file.size for file in self.wanted)

    @property
    def missing(self) -> int:
        """Bytes that must come."""
        return self.nbytes - sum(self.held.values())

    @property
    def fits(self) -> bool:
        """Whether the disk has room for what is missing."""
        return self.missing <= self.free

    def raise_if_it_does_not_fit(self) -> None:
        """Raises NotEnoughDisk with the numbers."""
        if not self.fits:
            raise NotEnoughDisk(
                f"{self.name} needs {_size(self.missing)} more at {self.destination.folder}, "
                f"and {_size(self.free)} are free there",
                f"free {_size(self.missing - self.free)} (`hf cache prune` removes unfinished downloads), "
                "name another disk with --local-dir or HF_HOME, or take a part with --layers",
            )


def repository_of(text: str, revision: str | None) -> tuple[str, str | None]:
    """The repository and the revision that a user names. Raises UsageError for what is no repository."""
    match = REPOSITORY.fullmatch(ALIASES.get(text, text))
    if match is None:
        raise UsageError(
            f"{text!r} is not a repository on the hub", f"name it as org/name[@revision], or {', '.join(ALIASES)}"
        )
    if revision and match["revision"] and revision != match["revision"]:
        raise UsageError(f"{text} and --revision {revision} name two revisions", "name one")
    return match["name"], revision or match["revision"]


def plan(
    text: str, revision: str | None, selection: Selection, local_dir: Path | None, policy: RetryPolicy
) -> DownloadPlan:
    """Lists the repository, chooses by its index, and looks at what is there; downloads the index at most. Where
    huggingface_hub is offline, what its cache holds is the repository.

    Raises UsageError, also for what is in the way and no download has put there, HubError, and CheckpointError for an
    index that is none.
    """
    repository = repository_of(text, revision)
    listing = cached_listing(*repository) if constants.HF_HUB_OFFLINE else list_files(*repository, policy)
    index: Mapping[str, str] = {}
    file = listing.by_name.get(INDEX)
    if file is not None and (listing.cached or not selection.is_all_weights):
        with tempfile.TemporaryDirectory(prefix="dsv4-") as folder:
            fetch_small(listing, [file], Path(folder), policy)
            index = index_in(Path(folder), listing)
    wanted = select_files(listing, selection, index)
    destination = CacheDestination(listing) if local_dir is None else FolderDestination(listing, local_dir.expanduser())
    held = {file.name: _held(destination, file) for file in wanted}
    return DownloadPlan(text, listing, selection, destination, wanted, held, free_bytes(destination))


def index_in(folder: Path, listing: Listing) -> dict[str, str]:
    """The index of a repository from the temporary folder that it was fetched into, empty where it has none.

    Raises CheckpointError, naming the repository, for an index that is none.
    """
    try:
        return read_index(folder / INDEX)
    except CheckpointError as error:
        raise CheckpointError(error.message.replace(str(folder), listing.repository), another(listing)) from None


def another(listing: Listing) -> str:
    """The remedy for a repository that holds damaged files."""
    return f"name another revision, as in {listing.repository}@REVISION"


def _held(destination: Destination, file: RemoteFile) -> int:
    found, part = destination.find(file), destination.part(file)
    if found is not None and found.stat().st_size == file.size:
        return file.size
    destination.guard(file)
    begun = part.stat().st_size if part.is_file() else max(map(written, destination.leftovers(file)), default=0)
    return min(begun, file.size)


def fetch_small(listing: Listing, files: Collection[RemoteFile], folder: Path, policy: RetryPolicy) -> None:
    """Fetches a few files into a folder, verified; what the cache holds is copied."""
    _fetch(listing, FolderDestination(listing, folder), files, len(files), policy, lambda done, total: None)


def carry_out(job: DownloadPlan, workers: int, policy: RetryPolicy, report: Report) -> dict[str, Outcome]:
    """Fetches and verifies every wanted file, also those that are there, and tells for each how it came.

    When it returns, every wanted file lies in the place with the size and the hash of the listing. Raises HubError,
    NotEnoughDisk, UsageError for a place that cannot be written.
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
    """Silences huggingface_hub, unless HF_DEBUG asks for it: what it would say is handled here."""
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
    return UsageError(f"{error.filename or destination.folder} cannot be written: {reason}", "name another --local-dir")


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:,.2f} GB" if nbytes >= 10**8 else f"{nbytes / 1e6:,.2f} MB"
