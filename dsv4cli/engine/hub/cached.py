"""The cached files of a repository as a hub listing, to check a download offline."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from dsv4cli.engine.hub.files import SHA1, SHA256, Listing, RemoteFile
from dsv4cli.errors import HubError, UsageError

ONLINE = "unset HF_HUB_OFFLINE, then run the same command again"


def cached_listing(repository: str, revision: str | None) -> Listing:
    """Return the files of the cached snapshot, with the hashes that name their blobs.

    Raises UsageError for an invalid repository name, HubError if the cache has no such snapshot.
    """
    try:
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except HFValidationError:
        raise UsageError(f"{repository!r} is not the name of a repository", "write it as org/name") from None
    except LocalEntryNotFoundError:
        where = f"{repository} at {revision}" if revision else repository
        raise HubError(f"huggingface_hub is in offline mode, and {where} is not in its cache", ONLINE) from None
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    files = tuple(_file(path.relative_to(folder).as_posix(), path) for path in paths)
    return Listing(repository, revision, folder.name, files, cached=True)


def _file(name: str, path: Path) -> RemoteFile:
    etag = path.resolve().name
    if SHA256.fullmatch(etag):
        return RemoteFile(name, path.stat().st_size, "", etag)
    if SHA1.fullmatch(etag):
        return RemoteFile(name, path.stat().st_size, etag)
    raise HubError(f"{path} is not a link to a blob of the cache, so its hash is unknown offline", ONLINE)


def check_cache(listing: Listing, needed: set[str]) -> None:
    """Raise HubError for wanted weights that the cache lacks. needed: file names in the index."""
    absent = sorted(needed - listing.by_name.keys())
    if absent or not needed:
        what = absent[0] if absent else "its weights"
        others = f" and {len(absent) - 1} more files" if absent[1:] else ""
        raise HubError(
            f"huggingface_hub is offline, and the cache lacks {what}{others} of {listing.repository}", ONLINE
        )
