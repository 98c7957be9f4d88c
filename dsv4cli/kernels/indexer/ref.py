"""The indexer in plain PyTorch."""

import torch
import torch.nn.functional as F

# entries scored at once: a product of one shape, so its rounding does not depend on the number of entries
BLOCK = 64


def index_scores(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, sequence: torch.Tensor
) -> torch.Tensor:
    entries = table.shape[1]
    cells = F.pad(table, (0, -entries % BLOCK))[sequence]  # [T, E]
    queries, weights = q.float(), weights.float()
    scores = []
    for block in cells.split(BLOCK, 1):
        dots = torch.einsum("thd,ted->the", queries, keys[block].float()).to(q.dtype)
        scores.append((dots.relu().float() * weights[..., None]).to(q.dtype).float().sum(1).to(q.dtype))
    return torch.cat(scores, 1)[:, :entries] if scores else q.new_zeros(q.shape[0], 0)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
    order = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.where(order < visible[:, None], order, -1)
