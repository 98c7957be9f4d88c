"""Decoding of GGUF blocks in numpy to the formats of the tensor table; no torch.

Q8_0: 32 values, an fp16 scale and int8 codes. MXFP4: 32 values, an e8m0 scale and e2m1 codes: the first 16 values in
the low nibbles of 16 bytes, the other 16 in the high ones. Source: ggml-common.h.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dsv4cli.engine.checkpoint.gguf.types import TYPES
from dsv4cli.engine.checkpoint.values import decode

Raw = NDArray[Any]


def mxfp4_codes(rows: Raw) -> Raw:
    """Return the codes [n, K / 2] of MXFP4 rows [n, bytes], two per byte with the even column in the low nibble."""
    codes = _blocks(rows, "MXFP4")[..., 1:]
    low, high = codes & 15, codes >> 4
    packed = np.concatenate((low[..., ::2] | low[..., 1::2] << 4, high[..., ::2] | high[..., 1::2] << 4), axis=-1)
    return packed.reshape(len(rows), -1)


def mxfp4_scales(rows: Raw) -> Raw:
    """Return the e8m0 scales [n, K / 32] of MXFP4 rows [n, bytes]."""
    return np.ascontiguousarray(_blocks(rows, "MXFP4")[..., 0])


def values(kind: str, rows: Raw) -> Raw:
    """Return the values of rows [n, bytes]: exact float32, or int64 for I32."""
    if kind == "I32":
        return rows.view(np.int32).astype(np.int64)
    if kind == "F32":
        return rows.view(np.float32)
    if kind == "F16":
        return rows.view(np.float16).astype(np.float32)
    if kind == "BF16":
        return decode("bf16", {"weight": rows.view(np.uint16)})
    if kind == "MXFP4":
        return decode("fp4", {"weight": mxfp4_codes(rows), "scale": mxfp4_scales(rows)})
    assert kind == "Q8_0", kind
    blocks = _blocks(rows, kind)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16).astype(np.float32)
    return (scales * blocks[..., 2:].view(np.int8).astype(np.float32)).reshape(len(rows), -1)


def _blocks(rows: Raw, kind: str) -> Raw:
    return rows.reshape(len(rows), -1, TYPES[kind].nbytes)
