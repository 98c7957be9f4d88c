"""Attention over listed rows in plain PyTorch."""

import torch

BLOCK = 64


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    queries = q.float()
    tokens, heads, width = q.shape
    maximum = queries.new_full((tokens, heads, 1), float("-inf"))
    denominator = queries.new_zeros(tokens, heads, 1)
    weighted = queries.new_zeros(tokens, heads, width)
    for block in index.split(BLOCK, 1):
        rows = listed_rows(window, entries, block).float()
        scores = torch.einsum("thd,tkd->thk", queries, rows) * scale
        scores = scores.masked_fill((block < 0)[:, None], float("-inf"))
        larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        shrink = torch.exp(maximum - larger)
        chances = torch.exp(scores - larger)
        denominator = denominator * shrink + chances.sum(-1, keepdim=True)
        weighted = weighted * shrink + torch.einsum("thk,tkd->thd", chances.to(q.dtype).float(), rows)
        maximum = larger
    denominator = denominator + torch.exp(sink.float()[:, None] - maximum)
    return (weighted / denominator).to(q.dtype)


def listed_rows(window: torch.Tensor, entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows [T, L, d] that an index [T, L] names; some row of the window where it says -1."""
    count = window.shape[0]
    rows = window[index.clamp(0, count - 1)]
    if not entries.shape[0]:
        return rows
    return torch.where((index >= count)[..., None], entries[(index - count).clamp_min(0)], rows)
