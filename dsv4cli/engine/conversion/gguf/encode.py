"""Encodes rows of a matrix as GGUF blocks: numpy, no torch. `checkpoint/gguf/blocks.py` decodes them."""

from collections.abc import Mapping

import numpy as np

from dsv4cli.engine.checkpoint.values import Raw
from dsv4cli.engine.config.formats import Role
from dsv4cli.errors import CheckpointError
from dsv4cli.kernels.ggml.types import TYPES

# int8 codes of Q8_0 go to 127 on both sides, so that their scale is amax / 127 (ggml-quants.c, quantize_row_q8_0_ref)
LARGEST = 127


class NotFinite(Exception):
    """A value that has no code: NaN, or too large for an fp16 scale or for 32 bits."""


def encode_matrix(matrix: str, kind: str, arrays: Mapping[Role, Raw]) -> Raw:
    """Encode as `encode`. Raises CheckpointError, naming the matrix, for a value that the type cannot hold."""
    try:
        return encode(kind, arrays)
    except NotFinite:
        other = "" if kind == "I32" else "--attention bf16 can hold every value; "
        raise CheckpointError(
            f"{matrix} has values that {kind} cannot hold",
            f"{other}`dsv4 inspect SRC --values full` shows what is damaged",
        ) from None


def encode(kind: str, arrays: Mapping[Role, Raw]) -> Raw:
    """Return the bytes [n, row] of rows in a tensor type, or their values if it has no blocks.

    Args:
        arrays: codes and scales of FP4 for MXFP4; values for the others, float32 for Q8_0 and int64 for I32.

    Raises NotFinite.
    """
    weight = arrays["weight"]
    if kind == "MXFP4":
        return _mxfp4(weight, arrays["scale"])
    if kind == "Q8_0":
        return _q8_0(weight)
    return _i32(weight) if kind == "I32" else weight


def _i32(numbers: Raw) -> Raw:
    narrow = numbers.astype(np.int32)
    if not np.array_equal(narrow, numbers):
        raise NotFinite
    return narrow


def _mxfp4(packed: Raw, scales: Raw) -> Raw:
    """Reorder the codes of two columns per byte as ggml does: columns 0 to 15 of a block low, 16 to 31 high.
    Lossless.
    """
    rows, groups = scales.shape
    blocks = np.empty((rows, groups, TYPES["MXFP4"].nbytes), np.uint8)
    blocks[..., 0] = scales
    first, second = np.split(packed.view(np.uint8).reshape(rows, groups, -1), 2, axis=-1)
    blocks[..., 1::2] = first & 15 | second << 4
    blocks[..., 2::2] = first >> 4 | second & 0xF0
    return blocks.reshape(rows, -1)


def _q8_0(values: Raw) -> Raw:
    """Encode blocks of 32 as ggml does: an fp16 scale, and codes from the scale before rounding, halves away from
    zero.
    """
    rows, block = len(values), TYPES["Q8_0"]
    groups = values.reshape(rows, -1, block.values)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(LARGEST)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
        stored = scale.astype(np.float16)
    if not (np.isfinite(stored).all() and np.isfinite(inverse).all()):
        raise NotFinite
    scaled = groups * inverse
    whole = np.floor(np.abs(scaled))
    codes = np.copysign(whole + np.floor(2 * (np.abs(scaled) - whole)), scaled)
    blocks = np.empty((rows, groups.shape[1], block.nbytes), np.uint8)
    blocks[..., :2] = stored.view(np.uint8)
    blocks[..., 2:] = codes.astype(np.int8).view(np.uint8)
    return blocks.reshape(rows, -1)
