"""Decoding of GGUF rows in NumPy to the formats of the tensor table; no torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.kernels.ggml.types import TYPES, decode

Raw = NDArray[Any]


def mxfp4_codes(rows: Raw) -> Raw:
    """Return the codes [n, K / 2] of MXFP4 rows [n, bytes], two per byte with the even column in the low nibble."""
    codes = _blocks(rows)[..., 1:]
    low, high = codes & 15, codes >> 4
    packed = np.concatenate((low[..., ::2] | low[..., 1::2] << 4, high[..., ::2] | high[..., 1::2] << 4), axis=-1)
    return packed.reshape(len(rows), -1)


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
