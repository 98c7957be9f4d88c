"""A hub model read by its headers alone: a few hundred kilobytes of each weight file, and all small files."""

import shutil
import struct
import tempfile
import threading
import weakref
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dsv4cli.engine.checkpoint.gguf.files import GgufModel
from dsv4cli.engine.checkpoint.gguf.variants import Variant
from dsv4cli.engine.checkpoint.headers import (
    LFS_POINTER,
    MAX_HEADER,
    Checkpoint,
    TensorInfo,
    index_problems,
    parse_header,
)
from dsv4cli.engine.hub.context import DownloadContext
from dsv4cli.engine.hub.destination import FolderDestination
from dsv4cli.engine.hub.files import Listing, RemoteFile
from dsv4cli.engine.hub.gguf import read_models
from dsv4cli.engine.hub.job import another, fetch_small, index_in, quiet
from dsv4cli.engine.hub.ranges import fetch_range
from dsv4cli.engine.hub.retry import RetryPolicy
from dsv4cli.engine.hub.selection import kind_of
from dsv4cli.engine.system.threads import Meter, do_all
from dsv4cli.errors import CheckpointError, Dsv4Error

# bytes of the first request: the headers of Flash's files have about 200 kB, those of Pro's 300 kB
FIRST = 1 << 18
# a larger file is no configuration
MAX_SMALL = 1 << 26
WORKERS = 16


@dataclass(frozen=True, eq=False)
class RemoteHeaders:
    """The fetched headers and small files of a model on the hub; its weights are not downloaded.

    folder: temporary folder with config.json, the index and other small files; removed together with this object.
    checkpoint: the headers; its paths are names on the hub, not local files. gguf: the model, if it is a GGUF variant.
    """

    listing: Listing
    folder: Path
    checkpoint: Checkpoint
    gguf: GgufModel | None = None


def remote_headers(listing: Listing, variant: Variant | None, policy: RetryPolicy) -> RemoteHeaders:
    """Fetch headers and small files of a repository, without the weights. variant: its GGUF model, None for others.

    Raises HubError if the hub does not serve a file, CheckpointError, naming the file, for what `open_checkpoint` or
    `read_gguf` refuses.
    """
    small = [file for file in listing.files if kind_of(file.name) in ("config", "index") and file.size <= MAX_SMALL]
    folder = Path(tempfile.mkdtemp(prefix="dsv4-"))
    try:
        if variant is not None:
            source = _gguf_headers(listing, folder, variant, policy)
        else:
            fetch_small(listing, small, folder, policy)
            source = RemoteHeaders(listing, folder, read_remote(listing, index_in(folder, listing), policy))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(source, shutil.rmtree, folder, ignore_errors=True)
    return source


def _gguf_headers(listing: Listing, folder: Path, variant: Variant, policy: RetryPolicy) -> RemoteHeaders:
    model: GgufModel | Dsv4Error = read_models(listing, [variant], policy, lambda model: model)[0]
    if isinstance(model, Dsv4Error):
        raise model
    return RemoteHeaders(listing, folder, model.checkpoint, model)


def read_remote(listing: Listing, index: dict[str, str], policy: RetryPolicy) -> Checkpoint:
    """Return the headers of the weight files on the hub, validated as local files are, sizes included.

    index: file of each tensor, empty if the repository has no index.
    """
    folder = Path(listing.repository)
    files, missing = _files(listing, index)
    if not files:
        raise CheckpointError(f"{folder} contains no safetensors file", "use another repository or revision")
    stop = threading.Event()
    context = DownloadContext(
        listing, FolderDestination(listing, folder), policy, Meter(0, lambda done, total: None), stop
    )
    jobs = {file.name: partial(_read_header, context, file, folder / file.name) for file in files}
    with quiet():
        headers = do_all(jobs, WORKERS, stop)
    tensors: dict[str, TensorInfo] = {}
    problems: dict[str, str] = {}
    for info in (info for file in files for info in headers[file.name]):
        other = tensors.setdefault(info.name, info)
        if other is not info:
            problems[info.name] = f"{info.name} is stored twice, in {other.file.name} and in {info.file.name}"
            tensors[info.name] = info if index.get(info.name) == info.file.name else other
    if problems and not index:
        raise CheckpointError(f"{folder}: {next(iter(problems.values()))}", another(listing))
    if index:
        present = {name: file for name, file in index.items() if file not in missing}
        problems = dict(index_problems(present, index, tensors)) | problems
    return Checkpoint(folder, tensors, tuple(folder / file.name for file in files), index, problems, missing)


def _files(listing: Listing, index: dict[str, str]) -> tuple[list[RemoteFile], tuple[str, ...]]:
    """Return the weight files that `open_checkpoint` would read, and the indexed files that do not exist."""
    here = {file.name: file for file in listing.files if kind_of(file.name) == "weights" and "/" not in file.name}
    if index:
        names = sorted(set(index.values()))
        missing = tuple(name for name in names if name not in here)
        return [here[name] for name in names if name in here], missing
    if "model.safetensors" in here:
        return [here["model.safetensors"]], ()
    shards = [file for name, file in here.items() if name.startswith("model")]
    return shards or list(here.values()), ()


def _read_header(context: DownloadContext, file: RemoteFile, path: Path) -> list[TensorInfo]:
    start = fetch_range(context, file, 0, min(FIRST, file.size))
    if start.startswith(LFS_POINTER):
        raise CheckpointError(f"{path} is a git-lfs pointer, not the weights", another(context.listing))
    length = struct.unpack("<Q", start[:8])[0] if len(start) >= 8 else 0
    if not 2 <= length <= min(MAX_HEADER, file.size - 8):
        sentence = f"{path} is truncated or corrupt: its header claims {length} bytes, the file has {file.size}"
        raise CheckpointError(sentence, another(context.listing))
    end = 8 + length
    text = start[8:end] if end <= len(start) else start[8:] + fetch_range(context, file, len(start), end)
    try:
        infos = parse_header(path, text, end)
    except CheckpointError as error:
        raise CheckpointError(error.message, another(context.listing)) from None
    last = infos[-1].end if infos else end
    if last != file.size:
        raise CheckpointError(f"{path} has {file.size} bytes instead of {last}", another(context.listing))
    return infos
