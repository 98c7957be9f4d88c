"""Decides when `warp_specialized` multiplies FP8 codes. That module needs Gluon and is imported only when used."""

import torch

from dsv4cli.kernels.card import multiprocessors
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.launch import cdiv, takes_gluon

# rows of a program's tile
ROWS = 128
# least share of the multiprocessors' time that is spent on results; below, the Triton kernel's smaller tiles are faster
LEAST = 0.75


def suits(codes: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether `warp_specialized` supports codes [T, K] times weight [N, K] and is the fastest kernel for it."""
    (tokens, width), features = codes.shape, weight.shape[0]
    if width % FP8_BLOCK or features % FP8_BLOCK or not takes_gluon(codes.device):
        return False
    if any(not x.is_contiguous() or x.storage_offset() % 16 for x in (codes, weight)):
        return False
    count = multiprocessors(codes.device)
    return _used(tokens, features, blocks(tokens, features, count), count) >= LEAST


def blocks(tokens: int, features: int, count: int) -> int:
    """Return how many blocks of 128 features a tile has, one or two, with `count` multiprocessors.

    Two blocks read less shared memory per product. One is better only if two leave many more multiprocessors idle.
    """
    one, two = _used(tokens, features, 1, count), _used(tokens, features, 2, count)
    return 2 if features % (2 * FP8_BLOCK) == 0 and two >= 0.9 * one else 1


def _used(tokens: int, features: int, width: int, count: int) -> float:
    """Return the share of their time that multiprocessors spend on results, for tiles of `width` blocks of features."""
    columns = width * FP8_BLOCK
    turns = cdiv(cdiv(tokens, ROWS) * cdiv(features, columns), count)
    return tokens * features / (turns * count * ROWS * columns)


def linear(codes: torch.Tensor, scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """Return `tiled_fp8.linear` of operands that `suits` accepts."""
    from dsv4cli.kernels.gemm.kernel import warp_specialized

    tokens, features = len(codes), len(weight)
    y = torch.empty(tokens, features, dtype=torch.bfloat16, device=codes.device)
    width = blocks(tokens, features, multiprocessors(y.device))
    warp_specialized.linear(codes, scale, weight, weight_scale, y, width)
    return y
