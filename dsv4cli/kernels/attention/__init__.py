"""Attention of many query heads over listed rows of one shared key/value head, with a sink.

Source: official kernel.py (`sparse_attn`), model.py (`Attention.forward`, for the rotation back).
The official kernel reads a list in blocks of 64 columns with a running maximum; sums are of unrounded probabilities,
which are rounded to q's dtype, relative to the maximum so far, for the product with the rows.
Triton: the same blocks and roundings, lists perhaps in parts that are put together in a fixed order, so that only sums
in fp32 and the last bit of exp differ; d a multiple of 2 up to 512, heads and rows of any even spacing with consecutive
columns.
"""

import torch

from dsv4cli.kernels.attention import ref
from dsv4cli.kernels.dispatch import choose


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    rotation: torch.Tensor,
) -> torch.Tensor:
    """softmax over the listed rows and the sink, times the rows themselves (keys are values), un-rotated.

    q: [T, H, d]; window, entries: [rows, d], q's dtype; index: int64 [T, L], rows of `window`, then (from
    window.shape[0] on) rows of `entries`, -1 for none, anywhere; sink: fp32 [H], an unscaled logit that only adds to
    the denominator; rotation: complex64 [T, R], that of the queries.
    Returns [T, H, d] in q's dtype, rounded after the division; then the last 2 * R dims are rotated by the conjugate as
    rope.rotate does, and rounded again. A token that lists nothing gets 0.
    """
    return choose(q, ref).sparse_attention(q, window, entries, index, sink, scale, rotation)


def sparse_mqa_sink(
    q: torch.Tensor, kv: torch.Tensor, topk_indices: torch.Tensor, attn_sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """The same over one paged pool, nothing un-rotated.

    q: [tokens, heads, dim]; kv: [blocks, block, dim], q's dtype; topk_indices: int32 or int64 [tokens, topk], rows as
    block number * block + offset, -1 for none, anywhere; attn_sink: fp32 [heads]. Returns q's shape and dtype.
    """
    return choose(q, ref).sparse_mqa_sink(q, kv, topk_indices, attn_sink, scale)
