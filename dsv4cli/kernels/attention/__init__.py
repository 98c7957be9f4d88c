"""Attention of many query heads over listed rows of one shared key/value head, with a sink.

Source: official kernel.py (`sparse_attn`).
"""

import torch

from dsv4cli.kernels.attention import ref


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """softmax over the listed rows and the sink, times the rows themselves (keys are values).

    q: [T, H, d]; window, entries: [rows, d], q's dtype; index: int64 [T, L], rows of `window`, then (from
    window.shape[0] on) rows of `entries`, -1 for none; sink: fp32 [H], an unscaled logit that only adds to the
    denominator. Every token lists at least one row within the first 64 columns.
    The list is read in blocks of 64 columns with a running maximum; probabilities are summed unrounded and rounded to
    q's dtype for the product with the rows. Returns [T, H, d] in q's dtype, one rounding after the division.
    """
    return ref.sparse_attention(q, window, entries, index, sink, scale)
