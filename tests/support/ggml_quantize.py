"""Quantization of matrices to Q4_K and Q2_K blocks of ggml: plain minima and maxima, no search for better scales."""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]
Bytes = NDArray[np.uint8]
SUPER = 256


def q4_k(values: Values) -> Bytes:
    """Return blocks of rows [n, K], K a multiple of 256: uint8 [n, K / 256 * 144]."""
    codes, scales, minima, halves = _affine(values, 32, 15, 63)
    low, high = codes.reshape(-1, 4, 2, 32)[:, :, 0], codes.reshape(-1, 4, 2, 32)[:, :, 1]
    packed = np.zeros((len(codes), 12), np.uint8)
    packed[:, :4] = scales[:, :4] | (scales[:, 4:] >> 4) << 6
    packed[:, 4:8] = minima[:, :4] | (minima[:, 4:] >> 4) << 6
    packed[:, 8:] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    blocks = np.concatenate([halves, packed, (low | high << 4).reshape(-1, 128)], axis=1)
    return blocks.reshape(len(values), -1)


def q2_k(values: Values) -> Bytes:
    """Return blocks of rows [n, K], K a multiple of 256: uint8 [n, K / 256 * 84]."""
    codes, scales, minima, halves = _affine(values, 16, 3, 15)
    quarters = codes.reshape(-1, 2, 4, 32)
    packed = quarters[:, :, 0] | quarters[:, :, 1] << 2 | quarters[:, :, 2] << 4 | quarters[:, :, 3] << 6
    blocks = np.concatenate([scales | minima << 4, packed.reshape(-1, 64), halves], axis=1)
    return blocks.reshape(len(values), -1)


def _affine(values: Values, group: int, most: int, most_scale: int) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Return codes [blocks, 256], scales and minima [blocks, 256 / group], and the bytes of d and dmin [blocks, 4]."""
    blocks = values.astype(np.float32).reshape(-1, SUPER // group, group)
    low = np.maximum(0, -blocks.min(axis=2))
    step = (blocks.max(axis=2) + low) / most
    scale, minimum = step.max(axis=1) / most_scale, low.max(axis=1) / most_scale
    halves = np.stack([scale, minimum], axis=1).astype(np.float16)
    d, dmin = halves.astype(np.float32).T[:, :, None]
    scales = np.clip(np.rint(_quotient(step, d)), 0, most_scale)
    minima = np.clip(np.rint(_quotient(low, dmin)), 0, most_scale)
    shifted = blocks + (dmin * minima)[:, :, None]
    codes = np.clip(np.rint(_quotient(shifted, (d * scales)[:, :, None])), 0, most).astype(np.uint8)
    return codes.reshape(-1, SUPER), scales.astype(np.uint8), minima.astype(np.uint8), halves.view(np.uint8)


def _quotient(values: Values, divisor: Values) -> Values:
    return np.divide(values, divisor, out=np.zeros_like(values), where=divisor > 0)
