"""The indexer in plain PyTorch."""

import torch
import torch.nn.functional as F

from dsv4cli.kernels.block_scale.ref import dequantise

# entries scored at once: a product of one shape, so its rounding does not depend on the number of entries
BLOCK = 64


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    key_scale: torch.Tensor | None,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    entries = table.shape[1]
    cells = F.pad(table, (0, -entries % BLOCK))[sequence]  # [T, E]
    numbers = torch.arange(cells.shape[1], device=q.device)
    queries, weights = q.float(), (weights.float() * weight_scale).to(q.dtype).float()

    def scored(block: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        values = dequantise(keys[block], None if key_scale is None else key_scale[block])
        dots = torch.einsum("thd,ted->the", queries, values).to(q.dtype)
        scores = (dots.relu().float() * weights[..., None]).to(q.dtype).float().sum(1).to(q.dtype)
        return scores.masked_fill(number >= visible[:, None], float("-inf"))

    parts = [scored(*block) for block in zip(cells.split(BLOCK, 1), numbers.split(BLOCK), strict=True)]
    return torch.cat(parts, 1)[:, :entries] if entries else q.new_zeros(q.shape[0], 0)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
    order = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.where(order < visible[:, None], order, -1)


def choose_entries(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    table: torch.Tensor,
    sequence: torch.Tensor,
    window_index: torch.Tensor,
    window_columns: torch.Tensor,
    window_rows: int,
) -> torch.Tensor:
    numbers = top_entries(scores, visible, k)  # [T, K]
    cells = torch.where(numbers >= 0, table[sequence[:, None], numbers.clamp_min(0)] + window_rows, -1)
    lists = torch.cat((window_index, torch.full_like(cells, -1)), 1)
    columns = window_columns[:, None] + torch.arange(cells.shape[1], device=cells.device)
    return lists.scatter(1, columns, cells)


def best_entries(
    q: torch.Tensor,
    weights: torch.Tensor,
    weight_scale: float,
    keys: torch.Tensor,
    key_scale: torch.Tensor | None,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    window_index: torch.Tensor,
    window_columns: torch.Tensor,
    window_rows: int,
) -> torch.Tensor:
    scores = index_scores(q, weights, weight_scale, keys, key_scale, table, sequence, visible)
    return choose_entries(scores, visible, k, table, sequence, window_index, window_columns, window_rows)
