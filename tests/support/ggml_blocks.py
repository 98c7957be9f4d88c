"""Rows of random GGUF blocks, with finite scales of plausible size."""

import numpy as np
import torch

from dsv4cli.kernels.ggml.types import TYPES, tile_height, to_tiles
from dsv4cli.kernels.stored_matrix import BlockMatrix


def random_rows(name: str, rows: int, blocks: int, seed: int, scale: float | None = None) -> np.ndarray:
    """Return uint8 [rows, bytes]. scale: magnitude of the block scales; None for any finite ones."""
    kind, rng = TYPES[name], np.random.default_rng(seed)
    raw = rng.integers(0, 256, (rows, blocks, kind.nbytes), np.uint8)
    shape = (rows, blocks)
    # the conversion of fp16 to fp32 may quiet a NaN, so that its bits depend on the library
    for offset in (0,) if name == "F16" and scale is None else kind.halves:
        if scale is None:
            # every finite fp16 number: an exponent below the largest
            raw[..., offset + 1] = np.where(raw[..., offset + 1] & 0x7C == 0x7C, 0x3B, raw[..., offset + 1])
        else:
            halves = (scale * rng.uniform(0.5, 1.5, shape)).astype(np.float16)
            raw[..., offset : offset + 2] = halves.view(np.uint8).reshape(*shape, 2)
    if kind.e8m0:
        low, high = (0, 255) if scale is None else (int(np.log2(scale)) + 127, int(np.log2(scale)) + 129)
        raw[..., 0] = rng.integers(low, high, shape)
    if not kind.has_scales and scale is not None:
        dtype = {"F32": np.float32, "F16": np.float16}.get(name)
        values = rng.normal(0, scale, shape).astype(np.float32)
        bits = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype is None else values.astype(dtype)
        raw = bits[..., None].view(np.uint8)
    return raw.reshape(rows, -1)


def block_matrix(rows: torch.Tensor, name: str) -> BlockMatrix:
    """Return the matrix of rows of blocks as files have them, uint8 [..., N, bytes]."""
    return BlockMatrix.of(to_tiles(name, rows, tile_height(name, rows.shape[-2])), name)
