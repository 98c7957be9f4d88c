"""The indexer in plain PyTorch."""

import torch
import torch.nn.functional as F

from dsv4cli.kernels.block_scale.ref import dequantise
from dsv4cli.kernels.indexer.types import IndexEntries, IndexKeys, IndexQueries, WindowList

# entries per matrix product: with one fixed shape, rounding does not depend on the number of entries
BLOCK = 64


def index_scores(queries: IndexQueries, keys: IndexKeys, entries: IndexEntries) -> torch.Tensor:
    q, count = queries.q, entries.table.shape[1]
    cells = F.pad(entries.table, (0, -count % BLOCK))  # [S, E]
    numbers = torch.arange(cells.shape[1], device=q.device)
    wide, weights = q.float(), (queries.weights.float() * queries.weight_scale).to(q.dtype).float()

    def scored(block: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        # dequantize once for all tokens of a sequence
        values = dequantise(keys.keys[block], None if keys.scale is None else keys.scale[block])
        dots = torch.einsum("thd,ted->the", wide, values.index_select(0, entries.sequence)).to(q.dtype)
        scores = (dots.relu().float() * weights[..., None]).to(q.dtype).float().sum(1).to(q.dtype)
        return scores.masked_fill(number >= entries.visible[:, None], float("-inf"))

    parts = [scored(*block) for block in zip(cells.split(BLOCK, 1), numbers.split(BLOCK), strict=True)]
    return torch.cat(parts, 1)[:, :count] if count else q.new_zeros(q.shape[0], 0)


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible[:, None]
    order = scores.masked_fill(hidden, float("-inf")).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    return torch.where(order < visible[:, None], order, -1)


def choose_entries(scores: torch.Tensor, k: int, entries: IndexEntries, window: WindowList) -> torch.Tensor:
    numbers = top_entries(scores, entries.visible, k)  # [T, K]
    cells = entries.table[entries.sequence[:, None], numbers.clamp_min(0)] + window.rows
    cells = torch.where(numbers >= 0, cells, -1)
    lists = torch.cat((window.index, torch.full_like(cells, -1)), 1)
    columns = window.columns[:, None] + torch.arange(cells.shape[1], device=cells.device)
    return lists.scatter(1, columns, cells)


def best_entries(
    queries: IndexQueries, keys: IndexKeys, k: int, entries: IndexEntries, window: WindowList
) -> torch.Tensor:
    return choose_entries(index_scores(queries, keys, entries), k, entries, window)
