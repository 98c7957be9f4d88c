"""Decoding of GGUF rows in NumPy to the formats of the tensor table; no torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.kernels.ggml.types import TYPES, decode

Raw = NDArray[Any]
# MXFP4 blocks whose codes are paired at once, in a core's cache (AMD EPYC, GB per second of CPU time with 2,048, 4,096,
# 8,192 and 16,384: 1.3, 1.7, 1.9 and 1.9)
AT_ONCE = 8192
LOW_NIBBLES, FOUR = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(4)


def mxfp4_codes(rows: Raw, out: Raw | None = None) -> Raw:
    """Return the codes [n, K / 2] of MXFP4 rows [n, bytes], two per byte with the even column in the low nibble.

    Args:
        out: contiguous memory for the result.
    """
    nbytes = TYPES["MXFP4"].nbytes
    blocks = rows.reshape(-1, nbytes)
    found = np.empty((len(rows), rows.shape[1] // nbytes * (nbytes - 1)), np.uint8) if out is None else out
    # of each block: the codes of the first 16 columns, then those of the others
    codes = found.reshape(-1).view(np.uint64).reshape(-1, 2)
    for start in range(0, len(blocks), AT_ONCE):
        words = np.ascontiguousarray(blocks[start : start + AT_ONCE, 1:].view("V16")).view(np.uint64)
        _pair(words & LOW_NIBBLES, codes[start : start + AT_ONCE, 0])
        words >>= FOUR
        words &= LOW_NIBBLES
        _pair(words, codes[start : start + AT_ONCE, 1])
    return found


def _pair(nibbles: Raw, into: Raw) -> None:
    """Write codes in the low nibbles of 16 bytes, uint64 [n, 2], as 8 bytes: uint64 [n]."""
    nibbles |= nibbles >> FOUR
    into[:] = nibbles.view(np.uint16).astype(np.uint8).view(np.uint64)[:, 0]


def mxfp4_scales(rows: Raw) -> Raw:
    """Return the e8m0 scales [n, K / 32] of MXFP4 rows [n, bytes]."""
    return np.ascontiguousarray(_blocks(rows)[..., 0])


def values(kind: str, rows: Raw) -> Raw:
    """Return the values of rows [n, bytes]: exact float32, or int64 for I32."""
    if kind == "I32":
        return rows.view(np.int32).astype(np.int64)
    found: Raw = decode(kind, rows)
    return found


def _blocks(rows: Raw) -> Raw:
    return rows.reshape(len(rows), -1, TYPES["MXFP4"].nbytes)
