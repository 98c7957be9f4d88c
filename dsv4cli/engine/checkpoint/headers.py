"""Index and headers of safetensors files: name, dtype, shape, file and offset of every tensor; no torch.

Format: 8 bytes little-endian header length, a JSON header, the tensors' bytes without gaps (safetensors README).
"""

import json
import os
import re
import reprlib
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from dsv4cli.engine.checkpoint.remedies import download_again
from dsv4cli.engine.system.regular_files import Stamp, is_there, open_file, read_bytes, stamp
from dsv4cli.errors import CheckpointError

INDEX = "model.safetensors.index.json"
# inside a folder that `dsv4 convert` has not finished
UNFINISHED = ".dsv4-convert"
# bits per value of each dtype of the format
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64,
    "C64": 64,
}  # fmt: skip
# the safetensors library refuses longer headers too
MAX_HEADER = 100_000_000
# numpy has no tensors with more dimensions
MAX_DIMENSIONS = 64
LFS_POINTER = b"version https://git-lfs"
# files of the official convert.py: each holds one rank's part under the same names
MP_FILE = re.compile(r"model\d+-mp\d+\.safetensors")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as described by its file; `begin` and `end` are offsets in the file, not in its data section."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Size on disk in bytes."""
        return self.end - self.begin


@dataclass(frozen=True)
class Checkpoint:
    """All tensors of a folder.

    Attributes:
        tensors: by name, with their actual location.
        files: sorted by name.
        index: file name of each tensor according to the index; empty without an index.
        index_problems: a sentence for each tensor on which index and files disagree.
        missing_files: names of indexed files that the folder lacks.
        stamps: state of local files before their headers were read.
    """

    folder: Path
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]
    index: Mapping[str, str]
    index_problems: Mapping[str, str]
    missing_files: tuple[str, ...] = ()
    stamps: Mapping[Path, Stamp] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(info.nbytes for info in self.tensors.values())


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the index, if there is one, and every header, but no tensors.

    Raises CheckpointError, naming the file, for: no safetensors file, an index that is not JSON or names a missing
    file, a file that is truncated, too long or has a corrupt header, a tensor stored twice.
    """
    return whole(scan_checkpoint(folder))


def whole(checkpoint: Checkpoint) -> Checkpoint:
    """Return the same checkpoint. Raises CheckpointError if one of its files is missing."""
    if checkpoint.missing_files:
        path = checkpoint.folder / checkpoint.missing_files[0]
        raise CheckpointError(f"{path} is missing, but {INDEX} names it", download_again(path.parent, path.name))
    return checkpoint


def scan_checkpoint(folder: Path) -> Checkpoint:
    """Read a folder as `open_checkpoint`, but allow missing files and list them in `missing_files`.

    Tensors of the official files for N ranks are prefixed with their file: `model0-mp4/norm.weight`.
    """
    index = read_index(folder / INDEX)
    files, missing = _files(folder, index)
    tensors: dict[str, TensorInfo] = {}
    twice: dict[str, str] = {}
    stamps: dict[Path, Stamp] = {}
    for path in files:
        stamps[path] = stamp(os.stat(path))
        for info in read_header(path):
            other = tensors.get(info.name)
            if other is not None:
                twice[info.name] = f"{info.name} is stored twice, in {other.file.name} and in {path.name}"
            if other is None or index.get(info.name) == path.name:
                tensors[info.name] = info
    if twice and not index:
        sentence = next(iter(twice.values()))
        raise CheckpointError(f"{folder}: {sentence}", f"remove the file that is not part of the model, or add {INDEX}")
    absent = set(missing)
    present = {name: file for name, file in index.items() if file not in absent or name in tensors}
    problems = dict(index_problems(present, index, tensors)) if index else {}
    return Checkpoint(folder, tensors, files, index, problems | twice, missing, stamps)


def scan_file(path: Path) -> Checkpoint:
    """Read one file as a checkpoint whose other files, by its folder's index or by its shard number, are missing."""
    index = read_index(path.parent / INDEX)
    if path.name not in index.values():
        index = {}
    tensors = {info.name: info for info in read_header(path)}
    present = {name: file for name, file in index.items() if file == path.name}
    problems = dict(index_problems(present, index, tensors)) if index else {}
    others = {*index.values(), *_numbered(path.name)} - {path.name}
    return Checkpoint(path.parent, tensors, (path,), index, problems, tuple(sorted(others)))


def _numbered(name: str) -> Iterator[str]:
    """Yield the names of all shards in a set, from one such as model-00002-of-00046.safetensors."""
    match = re.fullmatch(r"(.*-)(\d{5})-of-(\d{5})(\.safetensors)", name, re.ASCII)
    if match:
        begin, _, count, end = match.groups()
        yield from (f"{begin}{number:05}-of-{count}{end}" for number in range(1, int(count) + 1))


def _files(folder: Path, index: Mapping[str, str]) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Return the files to read and the names of indexed files that are missing.

    Without an index: model.safetensors, else the files named like shards, else all.
    """
    if index:
        files = tuple(folder / name for name in sorted(set(index.values())))
    else:
        patterns = ("model.safetensors", "model*.safetensors", "*.safetensors")
        files = next(filter(None, (tuple(sorted(folder.glob(pattern))) for pattern in patterns)), ())
    if not files:
        raise CheckpointError(f"{folder} contains no safetensors file", "download the whole checkpoint into it")
    missing = tuple(path.name for path in files if not is_there(path))
    if missing and (not index or len(missing) == len(files)):
        why = f"{INDEX} names it" if index else "a link points to it"
        raise CheckpointError(f"{folder / missing[0]} is missing, but {why}", download_again(folder, missing[0]))
    return tuple(path for path in files if path.name not in missing), missing


def read_index(path: Path) -> dict[str, str]:
    """Return the file name of each tensor; empty without an index. Raises CheckpointError for an invalid index."""
    if not is_there(path):
        return {}
    remedy = download_again(path.parent, path.name)
    try:
        index = json.loads(read_bytes(path).decode(), object_pairs_hook=partial(_unique, path))
        weight_map = index["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a safetensors index: {type(error).__name__}: {error}", remedy) from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} is not a safetensors index: its weight_map is empty or not an object", remedy)
    for name in set(map(str, weight_map.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {name!r}, which is not a safetensors file of this folder", remedy)
    return weight_map


def index_problems(
    present: Mapping[str, str], index: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> Iterator[tuple[str, str]]:
    """Yield each tensor on which index and files disagree, with a sentence.

    present: index entries of existing files.
    """
    for name, file in present.items():
        info = tensors.get(name)
        if info is None:
            yield name, f"{name} is not in {file}, where the index puts it"
        elif info.file.name != file:
            yield name, f"{name} is in {info.file.name}, not in {file}, where the index puts it"
    for name, info in tensors.items():
        if name not in index:
            yield name, f"{name} is in {info.file.name}, but not in the index"


def read_header(path: Path) -> list[TensorInfo]:
    """Return the tensors of one file by offset, with offsets validated against dtype, shape and file size."""
    try:
        size, length, text = _read_header_text(path)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}", "check the file and its permissions"
        ) from None
    infos = parse_header(path, text, 8 + length)
    end = infos[-1].end if infos else 8 + length
    if end > size:
        raise _damaged(path, f"is truncated: it has {size:,} of {end:,} bytes")
    if end < size:
        raise _damaged(path, f"is longer than its header says: {size} bytes instead of {end}")
    return infos


def _read_header_text(path: Path) -> tuple[int, int, bytes]:
    """Return the file size, the header length and the header."""
    with open(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(len(LFS_POINTER))
        if start == LFS_POINTER:
            raise CheckpointError(
                f"{path} is a git-lfs pointer, not the weights", "fetch the real file with `git lfs pull`"
            )
        length = struct.unpack("<Q", start[:8])[0] if size >= 8 else 0
        if size < 8 or 8 + length > size:
            # a cut inside the header or a wrong length look alike
            raise _damaged(path, f"is truncated or corrupt: its header claims {length} bytes, the file has {size}")
        if not 2 <= length <= MAX_HEADER:
            raise _damaged(path, f"has a corrupt header: {length} bytes long")
        file.seek(8)
        return size, length, file.read(length)


def parse_header(path: Path, text: bytes, data: int) -> list[TensorInfo]:
    """Return the tensors of one header by offset; the data section starts at offset `data` of the file."""
    try:
        header = json.loads(text.decode(), object_pairs_hook=partial(_unique, path), parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise _damaged(path, "has a corrupt header: not JSON") from None
    if not isinstance(header, dict):
        raise _damaged(path, "has a corrupt header: not a JSON object")
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(type(v) is str for v in metadata.values())):
        raise _damaged(
            path, f"has a corrupt header: __metadata__ is {reprlib.repr(metadata)}, not an object of strings"
        )
    prefix = f"{path.stem}/" if MP_FILE.fullmatch(path.name) else ""
    infos = [_tensor(path, prefix + name, entry, data) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.begin, info.end))
    position = data
    for info in infos:
        if info.begin != position:
            word = "overlaps the tensor before it" if info.begin < position else "leaves a gap before it"
            raise _damaged(path, f"has a corrupt header: {info.name} {word}")
        position = info.end
    return infos


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises CheckpointError for a duplicate key, because readers differ in the value they
    use.
    """
    values = dict(pairs)
    if len(values) < len(pairs):
        double = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise _damaged(path, f"is corrupt: the key {double!r} appears twice")
    return values


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _tensor(path: Path, name: str, entry: Any, data: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sane = type(entry["shape"]) is list and len(shape) <= MAX_DIMENSIONS
        sane = sane and all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        bits = DTYPE_BITS[dtype] if sane else 0
    except (KeyError, TypeError, ValueError):
        sane, bits = False, 0
    if not sane:
        raise _damaged(path, f"has a corrupt header: the entry of {name} is {reprlib.repr(entry)}")
    if (end - begin) * 8 != prod(shape) * bits:
        what = f"{name} {dtype} {reprlib.repr([*shape])} does not fit in {reprlib.repr(end - begin)} bytes"
        raise _damaged(path, f"has a corrupt header: {what}")
    return TensorInfo(name, dtype, shape, path, data + begin, data + end)


def _damaged(path: Path, sentence: str) -> CheckpointError:
    return CheckpointError(f"{path} {sentence}", download_again(path.parent, path.name))
