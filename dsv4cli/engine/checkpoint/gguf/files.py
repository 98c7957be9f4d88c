"""The files of one GGUF model: one file, or several numbered ones; no torch."""

import os
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsv4cli.engine.checkpoint.gguf.header import GgufHeader, Metadata, read_gguf
from dsv4cli.engine.checkpoint.headers import Checkpoint, TensorInfo
from dsv4cli.engine.checkpoint.remedies import download_again
from dsv4cli.engine.system.regular_files import Stamp, is_there, stamp
from dsv4cli.errors import CheckpointError
from dsv4cli.harmless import shell_word

SUFFIX = ".gguf"
# as llama.cpp's gguf-split names them
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)


@dataclass(frozen=True)
class GgufModel:
    """The headers of a model: the metadata of the first file and the tensors of all files."""

    metadata: Metadata
    checkpoint: Checkpoint


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, or a folder with GGUF files and no safetensors."""
    if path.suffix == SUFFIX and is_there(path):
        return True
    if not path.is_dir():
        return False
    return bool(_names(path)) and not any(path.glob("*.safetensors"))


def read_model(path: Path) -> GgufModel:
    """Read the headers of the model in a file or folder, but no tensors.

    Raises CheckpointError for what `read_gguf` refuses, a folder with several models, a missing file, and files that do
    not belong together.
    """
    files = _files(path)
    stamps = {file: stamp(os.stat(file)) for file in files}
    return joined(path, {file: read_gguf(file) for file in files}, stamps)


def joined(path: Path, headers: Mapping[Path, GgufHeader], stamps: Mapping[Path, Stamp]) -> GgufModel:
    """Return the model in the headers of all its files, in order.

    Raises CheckpointError for files that do not belong together.
    """
    files, found = tuple(headers), list(headers.values())
    if len(files) > 1:
        _check_parts(files, found)
    return GgufModel(found[0].metadata, _checkpoint(path, headers, stamps))


def _check_parts(files: tuple[Path, ...], headers: list[GgufHeader]) -> None:
    """Raise CheckpointError, naming the file, unless the files are the parts of one model in order."""
    for number, (file, header) in enumerate(zip(files, headers, strict=True)):
        problem, count = "", header.metadata.get("split.count")
        if header.metadata.get("split.no") != number:
            problem = f"has part number {_part_number(header)}, but its name says {number + 1}"
        elif count is not None and count != len(files):
            problem = f"is one of {reprlib.repr(count)} parts, but its name says {len(files)}"
        if problem:
            raise CheckpointError(f"{file} {problem}", download_again(file.parent, file.name))
    stored, stated = sum(len(header.tensors) for header in headers), headers[0].metadata.get("split.tensors.count")
    if stated is not None and stated != stored:
        raise CheckpointError(
            f"{files[0]} states {reprlib.repr(stated)} tensors in all parts, but they hold {stored:,}",
            "one of the files belongs to another model: download all of them again",
        )


def scan_gguf(folder: Path, files: Iterable[Path]) -> Checkpoint:
    """Return the tensors of some files of a model. Raises as `read_gguf`."""
    stamps = {file: stamp(os.stat(file)) for file in files}
    return _checkpoint(folder, {file: read_gguf(file) for file in stamps}, stamps)


def _checkpoint(folder: Path, headers: Mapping[Path, GgufHeader], stamps: Mapping[Path, Stamp]) -> Checkpoint:
    tensors: dict[str, TensorInfo] = {}
    for info in (info for header in headers.values() for info in header.tensors):
        if info.name in tensors:
            raise CheckpointError(f"{info.file}: {info.name} is in {tensors[info.name].file.name} too")
        tensors[info.name] = info
    return Checkpoint(folder, tensors, tuple(headers), {}, {}, (), stamps)


def _part_number(header: GgufHeader) -> str:
    number = header.metadata.get("split.no")
    return str(number + 1) if isinstance(number, int) else "none"


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*" + SUFFIX))


def _files(path: Path) -> tuple[Path, ...]:
    """Return all files of the model, in order."""
    first = path if not path.is_dir() else path / _only_model(path)
    match = PART.fullmatch(first.name)
    if match is None:
        return (first,)
    count = int(match["count"])
    if not 1 <= int(match["number"]) <= count:
        raise CheckpointError(
            f"{first} is named part {int(match['number'])} of {count}",
            "give the file the name that it was published under",
        )
    files = tuple(first.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1))
    missing = [file for file in files if not is_there(file)]
    if missing:
        raise CheckpointError(
            f"{missing[0]} is missing, but {first.name} belongs to a set of {count} files",
            download_again(missing[0].parent, missing[0].name),
        )
    return files


def _only_model(folder: Path) -> str:
    """Return a file of the only model in a folder."""
    models = {(match["stem"] if (match := PART.fullmatch(name)) else name): name for name in _names(folder)}
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} holds {len(models)} GGUF models", f"choose one file: {shell_word(folder / min(models.values()))}"
        )
    return next(iter(models.values()))
