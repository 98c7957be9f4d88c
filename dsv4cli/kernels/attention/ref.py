"""Sparse attention in plain PyTorch."""

import torch
import torch.nn.functional as F

from dsv4cli.kernels.rope import ref as rope

BLOCK = 64
# initial maximum, below every score, so that a block without rows changes nothing
FLOOR = -1e30


def sparse_attention(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
    rotation: torch.Tensor,
) -> torch.Tensor:
    return rope.rotate(attended(q, window, entries, index, sink, scale), rotation.conj())


def sparse_mqa_sink(
    q: torch.Tensor, kv: torch.Tensor, topk_indices: torch.Tensor, attn_sink: torch.Tensor, scale: float
) -> torch.Tensor:
    rows = kv.flatten(0, 1)
    return attended(q, rows, rows[:0], topk_indices, attn_sink, scale)


def attended(
    q: torch.Tensor,
    window: torch.Tensor,
    entries: torch.Tensor,
    index: torch.Tensor,
    sink: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Return softmax over the listed rows and the sink, times the rows, rounded once."""
    queries = q.float()
    tokens, heads, width = q.shape
    maximum = queries.new_full((tokens, heads, 1), FLOOR)
    denominator = queries.new_zeros(tokens, heads, 1)
    weighted = queries.new_zeros(tokens, heads, width)
    # products of one shape, so that their rounding does not depend on the length of the lists
    for block in F.pad(index, (0, -index.shape[1] % BLOCK), value=-1).split(BLOCK, 1):
        holes = block < 0
        if block.is_cpu and holes.all():
            continue  # it would change nothing; on a GPU the check would synchronize
        rows = listed_rows(window, entries, block).float()
        scores = torch.bmm(queries, rows.mT) * scale
        scores = scores.masked_fill(holes.unsqueeze(1), float("-inf"))
        larger = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        shrink = torch.exp(maximum - larger)
        chances = torch.exp(scores - larger)
        denominator = denominator * shrink + chances.sum(-1, keepdim=True)
        weighted = weighted * shrink + torch.bmm(chances.to(q.dtype).float(), rows)
        maximum = larger
    denominator = denominator + torch.exp(sink.float()[:, None] - maximum)
    # the denominator is at least 1 if a row is listed
    return (weighted / denominator.clamp_min(1.0)).to(q.dtype)


def listed_rows(window: torch.Tensor, entries: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the rows [T, L, d] for an index [T, L]; an arbitrary window row for -1."""
    # F.embedding copies whole rows, seven times as fast as indexing on a CPU
    count = window.shape[0]
    rows = F.embedding(index.clamp(0, count - 1), window)
    if not entries.shape[0]:
        return rows
    named = index >= count
    if index.is_cpu and not named.any():
        return rows
    return torch.where(named[..., None], F.embedding((index - count).clamp_min(0), entries), rows)
