"""Reads of GGUF tensors, decoded to the official tensor table; numpy, no torch."""

import numpy as np

from dsv4cli.engine.checkpoint.gguf.blocks import mxfp4_codes, mxfp4_scales, values
from dsv4cli.engine.checkpoint.gguf.drafter import HalfInfo
from dsv4cli.engine.checkpoint.gguf.model import GgufIdentity
from dsv4cli.engine.checkpoint.gguf.naming import gguf_name
from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.remedies import download_again, look
from dsv4cli.engine.checkpoint.stored import Raw, StoredModel
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import damaged_blocks, row_bytes

# types whose values are read as the bits of 16-bit numbers, if the table has their dtype
HALVES = ("BF16", "F16")


class GgufStoredModel(StoredModel):
    """The tensors of GGUF files under official names, in the formats of the identity's table."""

    def __init__(self, identity: GgufIdentity) -> None:
        super().__init__(identity)
        identity.check_readable()
        self._naming = identity.stored_naming

    def read(self, spec: TensorSpec, rows: slice = slice(None), copy: int = 0) -> Raw:
        """Return rows of a tensor, decoded to the format of the table; arguments as in `StoredModel.read`."""
        info = self._info(self._naming.locations(spec)[0])
        if (spec.dtype == "I64") is not (info.dtype == "I32"):
            raise CheckpointError(f"{info.file}: {info.name} is {info.dtype}", look(self.identity.checkpoint.folder))
        *_, count, columns = (*self._naming.shape(spec), 1) if len(spec.shape) == 1 else self._naming.shape(spec)
        start, stop, _ = rows.indices(count)
        width = row_bytes(info.dtype, columns)
        raw = self._raw(info, self._naming.begin(spec), start, stop, width)
        if spec.form != "fp4":
            self._check_scales(spec, info, raw, start)
        return _seen(spec, info.dtype, raw).reshape(stop - start, *spec.shape[1:])

    def read_blocks(self, spec: TensorSpec) -> Raw:
        """Return a matrix as stored, uint8 [rows, bytes]. spec: with a dtype of BLOCK_DTYPES."""
        info = self.identity.checkpoint.tensors[gguf_name(spec)]
        raw = self._raw(info, 0, 0, *spec.shape)
        self._check_scales(spec, info, raw, 0)
        return raw

    def _raw(self, info: TensorInfo, begin: int, start: int, stop: int, width: int) -> Raw:
        """Return the bytes [rows, width] of rows start to stop of a matrix at `begin` of a stored tensor."""
        half = info.half if isinstance(info, HalfInfo) else 0
        stride = 2 * width if isinstance(info, HalfInfo) else width
        raw = np.empty((stop - start, stride), np.uint8)
        self._files.read(info, begin + start * stride, raw.reshape(-1).data)
        return np.ascontiguousarray(raw[:, half * width : (half + 1) * width])

    def _check_scales(self, spec: TensorSpec, info: TensorInfo, raw: Raw, start: int) -> None:
        """Raise CheckpointError, naming tensor and place, for a block scale that is not a finite number."""
        found = damaged_blocks(info.dtype, raw)
        if found.any():
            row, block = (int(place) for place in np.argwhere(found)[0])
            expert = "" if spec.expert is None else f"expert {spec.expert}, "
            raise CheckpointError(
                f"{info.file}: {info.name} ({info.dtype}) has a scale that is NaN or infinite: {expert}row "
                f"{start + row}, block {block}",
                f"the tensor is damaged: {download_again(info.file.parent, info.file.name)}",
            )


def _seen(spec: TensorSpec, kind: str, raw: Raw) -> Raw:
    """Convert rows of a tensor to the format of the table."""
    if spec.form == "fp4":
        return mxfp4_scales(raw) if spec.is_scale else mxfp4_codes(raw)
    return raw.view(np.uint16) if spec.dtype == kind and kind in HALVES else values(kind, raw)
