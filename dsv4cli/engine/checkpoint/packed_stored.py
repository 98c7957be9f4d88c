"""Reads of compressed-tensors exports, with integers and e4m3 as fp32 values; numpy, no torch."""

from collections.abc import Mapping

import numpy as np

from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.packed import E4M3, PACKED, SCALE
from dsv4cli.engine.checkpoint.remedies import look
from dsv4cli.engine.checkpoint.stored import NUMPY_DTYPES, Raw, StoredModel
from dsv4cli.engine.checkpoint.values import decode, e4m3_values
from dsv4cli.errors import CheckpointError

# supported widths of packed integers
BITS = (4, 8)
# rows and columns of e4m3 that share a scale
BLOCK = 128
DTYPES = {name: np.dtype(kind) for name, kind in NUMPY_DTYPES.items()}
DTYPES |= {"I32": np.dtype(np.int32), "F16": np.dtype(np.float16)}


class PackedStoredModel(StoredModel):
    """The tensors of a compressed-tensors export, with integers and e4m3 as fp32 values."""

    def read(self, spec: TensorSpec, rows: slice = slice(None), copy: int = 0) -> Raw:
        """Read rows as `StoredModel.read`."""
        locations = self.identity.naming.locations(spec)
        if len(locations) == 1:
            return super().read(spec, rows, copy)
        infos = {info.name.rpartition(".")[2]: info for info in map(self._info, locations)}
        start, stop, _ = rows.indices(spec.shape[0])
        if PACKED not in infos:
            return self._e4m3(infos, spec, start, stop)
        return self._integers(infos, spec, start, stop)

    def _band(self, info: TensorInfo, start: int, stop: int) -> Raw:
        """Return the rows [start, stop) of a stored matrix."""
        wanted = np.empty((stop - start, *info.shape[1:]), DTYPES.get(info.dtype, np.dtype(np.uint8)))
        width = wanted[:1].nbytes
        self._files.read(info, start * width, wanted.reshape(-1).view(np.uint8).data)
        return wanted

    def _scales(self, info: TensorInfo, start: int, stop: int) -> Raw:
        raw = self._band(info, start, stop)
        return decode("bf16", {"weight": raw}) if info.dtype == "BF16" else raw.astype(np.float32)

    def _integers(self, infos: Mapping[str, TensorInfo], spec: TensorSpec, start: int, stop: int) -> Raw:
        """Dequantize packed integers: (code - zero point) * scale.

        The first code of a word is in its lowest bits. Without zero points they are half the range of the codes.
        """
        columns, info = spec.shape[1], infos[PACKED]
        bits = 32 * info.shape[1] // columns
        if bits not in BITS or 32 * info.shape[1] % columns:
            raise self._odd(info, "integers of 4 or 8 bits")
        count, groups = 32 // bits, (*infos[SCALE].shape, 1)[1]
        self._expect(info, (spec.shape[0], columns // count))
        self._expect(infos[SCALE], (spec.shape[0], groups))
        if columns % groups:
            raise self._odd(infos[SCALE], f"scales of equal groups of {columns} columns")
        codes = _unpacked(self._band(info, start, stop), bits)
        scales = self._scales(infos[SCALE], start, stop)
        group = columns // groups
        zero: Raw = np.full((1, 1), 1 << (bits - 1), np.float32)
        if "weight_zero_point" in infos:
            # packed along the rows
            self._expect(infos["weight_zero_point"], (-(-spec.shape[0] // count), groups))
            words = self._band(infos["weight_zero_point"], start // count, -(-stop // count))
            points = _unpacked(np.ascontiguousarray(words.T), bits).T[start % count :][: stop - start]
            zero = points.repeat(group, axis=1)
        return (codes - zero) * scales.repeat(group, axis=1)

    def _e4m3(self, infos: Mapping[str, TensorInfo], spec: TensorSpec, start: int, stop: int) -> Raw:
        """Dequantize e4m3: code * scale, with a scale per tensor, row or block."""
        info, scale = infos["weight"], infos[SCALE]
        if info.dtype != E4M3:
            raise self._odd(info, E4M3)
        self._expect(info, spec.shape)
        high, wide = (*scale.shape, 1, 1)[:2]
        if (high, wide) not in ((1, 1), (spec.shape[0], 1), tuple(-(-size // BLOCK) for size in spec.shape)):
            raise self._odd(scale, f"a scale of the tensor, of each row or of blocks of {BLOCK} by {BLOCK}")
        codes = e4m3_values()[self._band(info, start, stop)]
        if high == 1 and wide == 1:
            return codes * self._scales(scale, 0, 1).reshape(1, 1)
        rows, columns = 1 if high == spec.shape[0] else BLOCK, spec.shape[1] if wide == 1 else BLOCK
        first = start // rows
        scales = self._scales(scale, first, -(-stop // rows)).reshape(-1, wide)
        scales = scales.repeat(rows, axis=0)[start - first * rows :][: stop - start]
        return codes * scales.repeat(columns, axis=1)[:, : spec.shape[1]]

    def _expect(self, info: TensorInfo, shape: tuple[int, ...]) -> None:
        if info.shape != shape:
            raise self._odd(info, str([*shape]))

    def _odd(self, info: TensorInfo, expected: str) -> CheckpointError:
        folder = self.identity.checkpoint.folder
        found = f"{info.dtype} {list(info.shape)}"
        return CheckpointError(f"{folder}: {info.name} is {found}, expected {expected}", f"{look(folder)} shows more")


def _unpacked(words: Raw, bits: int) -> Raw:
    """Unpack int32 words [n, k] into codes as float32 [n, k * 32 / bits]."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(len(words), -1).astype(np.float32)
