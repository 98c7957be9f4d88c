"""Sparse attention: many query heads over listed rows of one shared key/value head, with an attention sink.

Source: official kernel.py (`sparse_attn`), model.py (`Attention.forward`, for the inverse rotation). The official
kernel reads a list in blocks of 64 columns with a running maximum. It sums unrounded probabilities, but rounds
probabilities, relative to the maximum so far, to q's dtype before it multiplies them by the rows.
Triton: uses the same blocks and rounding. Lists may be split into parts that are combined in a fixed order, so only
fp32 sums and the last bit of exp differ. d must be a multiple of 2 up to 512; heads and rows can have any even stride
but need consecutive columns.
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
    """Return softmax over the listed rows and the sink, times the rows (keys are values), rotated back.

    Args:
        q: [T, H, d].
        window, entries: [rows, d] in q's dtype.
        index: int64 [T, L], rows of `window`, then (from window.shape[0] on) rows of `entries`; -1, anywhere, for none.
        sink: fp32 [H], an unscaled logit that only adds to the denominator.
        rotation: complex64 [T, R], the rotation of the queries.

    Returns [T, H, d] in q's dtype, rounded after the division; then the last 2 * R dims are rotated by the conjugate,
    as rope.rotate does, and rounded again. A token with an empty list gets 0.
    """
    return choose(q, ref).sparse_attention(q, window, entries, index, sink, scale, rotation)


def sparse_mqa_sink(
    q: torch.Tensor, kv: torch.Tensor, topk_indices: torch.Tensor, attn_sink: torch.Tensor, scale: float
) -> torch.Tensor:
    """Compute sparse_attention over one paged pool, without a rotation.

    Args:
        q: [tokens, heads, dim].
        kv: [blocks, block, dim] in q's dtype.
        topk_indices: int32 or int64 [tokens, topk], rows as block number * block + offset; -1, anywhere, for none.
        attn_sink: fp32 [heads].

    Returns q's shape and dtype.
    """
    return choose(q, ref).sparse_mqa_sink(q, kv, topk_indices, attn_sink, scale)
