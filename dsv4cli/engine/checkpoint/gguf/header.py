"""Reading and writing the header of a GGUF file: metadata by key, tensors by name; no torch.

Format: "GGUF", version, numbers of tensors and of keys, each key with its value, each tensor with its dimensions (the
fastest first), type and offset, padding; then the tensors' bytes, each at a multiple of `general.alignment`. Versions 2
and 3, little-endian. Source: ggml's docs/gguf.md.
"""

import os
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.checkpoint.remedies import download_again
from dsv4cli.engine.system.regular_files import open_file
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import NAMES, TYPES, row_bytes

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32
# numbers of the value types, and how struct reads those of one size
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
# numbers are written as u32, except these keys of a model in several files (llama.cpp, gguf-split)
UINT16, UINT32, INT32, FLOAT32, BOOL = 2, 4, 5, 6, 7
SPLIT_TYPES = {"split.no": UINT16, "split.count": UINT16, "split.tensors.count": INT32}
# ggml has no more dimensions; no header of a real model has more keys, tensors or list items, or longer names
MAX_DIMENSIONS, MAX_KEYS, MAX_TENSORS, MAX_ITEMS, MAX_NAME = 4, 1 << 16, 1 << 16, 1 << 22, 1 << 12
# bytes of a header: a release's vocabulary, with tokenizer.json, has 20 million
MAX_HEADER = 1 << 28
# first number of ik_llama.cpp's own types
IK_TYPES = 133
UNKNOWN_TYPE = "use a file that llama.cpp itself wrote, or the release: `dsv4 download flash`"
Metadata = dict[str, Any]


@dataclass(frozen=True)
class GgufHeader:
    """The header of a file.

    metadata: numbers, strings, booleans and lists of these. tensors: by offset, with the fastest dimension last, as in
    the other formats.
    """

    metadata: Metadata
    tensors: tuple[TensorInfo, ...]


class Stream(Protocol):
    """The methods of a binary file that are used here."""

    def read(self, count: int, /) -> bytes: ...
    def tell(self) -> int: ...


def read_gguf(path: Path) -> GgufHeader:
    """Return the header of one file.

    Raises CheckpointError, naming the file, if it is not GGUF, damaged or truncated.
    """
    try:
        with open(open_file(path), "rb") as file:
            return read_header(path, file, os.fstat(file.fileno()).st_size)
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}", "check the file and its permissions"
        ) from None


def read_header(path: Path, file: Stream, size: int) -> GgufHeader:
    """Return the header of a file of `size` bytes, read from its first byte. Raises CheckpointError as `read_gguf`."""
    try:
        return _HeaderReader(path, file, size).header()
    except (struct.error, UnicodeDecodeError):
        raise _damaged(path, "is truncated or has a corrupt header") from None


class _HeaderReader:
    """A sequential reader of one file's header."""

    def __init__(self, path: Path, file: Stream, size: int) -> None:
        self.path, self.file, self.size = path, file, size

    def header(self) -> GgufHeader:
        start = self.file.read(len(MAGIC))
        if start != MAGIC:
            raise _damaged(self.path, f"is not a GGUF file: it begins with {start!r}")
        version = self._scalar("<I")
        if version not in VERSIONS:
            big = version in {known << 24 for known in VERSIONS}
            what = "is big-endian" if big else f"is of GGUF version {version}"
            raise CheckpointError(f"{self.path} {what}; dsv4 reads versions 2 and 3, little-endian", "convert it again")
        tensors, keys = self._scalar("<Q"), self._scalar("<Q")
        if keys > MAX_KEYS or tensors > MAX_TENSORS:
            raise _damaged(self.path, f"has a corrupt header: {keys} keys and {tensors} tensors")
        metadata: Metadata = {}
        for _ in range(keys):
            key = self._string(MAX_NAME)
            if key in metadata:
                raise _damaged(self.path, f"has a corrupt header: the key {key!r} appears twice")
            metadata[key] = self._value(self._scalar("<I"))
        entries = [self._entry() for _ in range(self._count(tensors, 24))]
        alignment = metadata.get("general.alignment", ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise _damaged(
                self.path, f"has a corrupt header: general.alignment is {reprlib.repr(alignment)}, not a power of two"
            )
        return GgufHeader(metadata, tuple(self._placed(entries, self.file.tell(), alignment)))

    def _scalar(self, code: str) -> Any:
        return struct.unpack(code, self.file.read(struct.calcsize(code)))[0]

    def _count(self, count: int, least: int) -> int:
        """Check that `count` entries of at least `least` bytes each fit into the file, and return `count`."""
        end = self.file.tell() + count * least
        if end > self.size:
            raise _damaged(
                self.path, f"is truncated or corrupt: {count * least} bytes of its header do not fit into it"
            )
        if end > MAX_HEADER:
            raise _damaged(self.path, f"has a corrupt header: one of its values has {count * least} bytes")
        return count

    def _string(self, longest: int | None = None) -> str:
        length = self._count(self._scalar("<Q"), 1)
        if longest is not None and length > longest:
            raise _damaged(self.path, f"has a corrupt header: a name of {length} bytes")
        return self.file.read(length).decode()

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise _damaged(self.path, f"has a corrupt header: a value of type {kind}")
            return self._scalar(SCALARS[kind])
        inner, count = self._scalar("<I"), self._scalar("<Q")
        if count > MAX_ITEMS:
            raise _damaged(self.path, f"has a corrupt header: a list of {count} values")
        if inner == STRING:
            return [self._string() for _ in range(self._count(count, 8))]
        if inner not in SCALARS:
            raise _damaged(self.path, f"has a corrupt header: a list of type {inner}")
        code = SCALARS[inner]
        raw = self.file.read(self._count(count, struct.calcsize(code)) * struct.calcsize(code))
        return [value for (value,) in struct.iter_unpack(code, raw)]

    def _entry(self) -> tuple[str, tuple[int, ...], str, int]:
        """Read name, dimensions, type and offset of a tensor."""
        name, dimensions = self._string(MAX_NAME), self._scalar("<I")
        if dimensions > MAX_DIMENSIONS:
            raise _damaged(self.path, f"has a corrupt header: {name} has {dimensions} dimensions")
        shape = tuple(reversed([self._scalar("<Q") for _ in range(dimensions)]))
        number, offset = self._scalar("<I"), self._scalar("<Q")
        if number not in NAMES:
            own = ", one of ik_llama.cpp's own" if number >= IK_TYPES else ""
            raise CheckpointError(f"{self.path}: {name} has the unknown tensor type {number}{own}", UNKNOWN_TYPE)
        if (shape[-1] if shape else 1) % TYPES[NAMES[number]].values:
            raise _damaged(self.path, f"has a corrupt header: {name} {list(shape)} is no whole {NAMES[number]} blocks")
        return name, shape, NAMES[number], offset

    def _placed(
        self, entries: list[tuple[str, tuple[int, ...], str, int]], header: int, alignment: int
    ) -> list[TensorInfo]:
        """Return the tensors by offset: each must begin right after the padding of the one before it."""
        infos: dict[str, TensorInfo] = {}
        data = end = _aligned(header, alignment)
        for name, shape, kind, offset in sorted(entries, key=lambda entry: entry[3]):
            begin, expected = data + offset, _aligned(end - data, alignment) + data
            if name in infos or begin != expected:
                problem = (
                    "overlaps the tensor before it" if begin < end else "does not begin at the next aligned offset"
                )
                problem = "appears twice" if name in infos else problem
                raise _damaged(self.path, f"has a corrupt header: {name} {problem}")
            end = begin + tensor_bytes(kind, shape)
            infos[name] = TensorInfo(name, kind, shape, self.path, begin, end)
        if infos and end > self.size:
            raise _damaged(self.path, f"is truncated: it has {self.size:,} of {end:,} bytes")
        if self.size > _aligned(end, alignment):
            raise _damaged(self.path, f"is longer than its header says: {self.size} bytes instead of {end}")
        return list(infos.values())


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor with this type and shape, fastest dimension last."""
    return prod(shape[:-1]) * row_bytes(kind, shape[-1] if shape else 1)


def gguf_header(metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Return the header of a file, padded to the start of the tensor data.

    tensors: type and shape by name, in the order of the data; `tensor_places` aligns each to a multiple of ALIGNMENT.
    """
    parts = [MAGIC, struct.pack("<IQQ", max(VERSIONS), len(tensors), len(metadata))]
    parts += [_packed_string(key) + _packed_value(key, value) for key, value in metadata.items()]
    for (name, (kind, shape)), (begin, _) in zip(tensors.items(), tensor_places(tensors), strict=True):
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        parts.append(_packed_string(name) + dimensions + struct.pack("<IQ", TYPES[kind].number, begin))
    text = b"".join(parts)
    return text + bytes(_aligned(len(text), ALIGNMENT) - len(text))


def tensor_places(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> list[tuple[int, int]]:
    """Return begin and end of each tensor's bytes, relative to the end of the header."""
    places, position = [], 0
    for kind, shape in tensors.values():
        begin = _aligned(position, ALIGNMENT)
        position = begin + tensor_bytes(kind, shape)
        places.append((begin, position))
    return places


def _aligned(position: int, alignment: int) -> int:
    return -(-position // alignment) * alignment


def _packed_string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _packed_value(key: str, value: Any) -> bytes:
    kind = SPLIT_TYPES.get(key) or _kind(value)
    if kind != ARRAY:
        return struct.pack("<I", kind) + _packed(kind, value)
    # lists of numbers are signed, as llama.cpp's converter writes them
    inner = {UINT32: INT32}.get(_kind(value[0]), _kind(value[0])) if value else STRING
    items = b"".join(_packed(inner, item) for item in value)
    return struct.pack("<IIQ", ARRAY, inner, len(value)) + items


def _packed(kind: int, value: Any) -> bytes:
    return _packed_string(value) if kind == STRING else struct.pack(SCALARS[kind], value)


def _kind(value: Any) -> int:
    for known, kind in ((bool, BOOL), (int, UINT32), (float, FLOAT32), (str, STRING)):
        if isinstance(value, known):
            return kind
    assert isinstance(value, list), value
    return ARRAY


def _damaged(path: Path, sentence: str) -> CheckpointError:
    return CheckpointError(f"{path} {sentence}", download_again(path.parent, path.name))
