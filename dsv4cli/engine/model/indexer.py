"""The indexer of CSA layers: which compressed entries a token attends to."""

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.compressor import Compressor
from dsv4cli.engine.model.linear import Linear
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import CompressorState
from dsv4cli.kernels import indexer
from dsv4cli.kernels.indexer import IndexEntries, IndexKeys, IndexQueries, WindowList

RATIO = 4


class Indexer(nn.Module):
    """Scores entries with small heads of its own and keeps the best `index_topk`."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.width = config.index_head_dim
        self.topk = config.index_topk
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.wq_b = Linear(numerics)
        self.weights_proj = Linear(numerics)
        self.compressor = Compressor(config, numerics, RATIO)

    def heads(self, q: torch.Tensor) -> torch.Tensor:
        """[T, H * d] -> [T, H, d]."""
        return q.unflatten(-1, (-1, self.width))

    def forward(
        self, q: torch.Tensor, weights: torch.Tensor, batch: Batch, state: CompressorState, rows: slice
    ) -> torch.Tensor:
        """A list of window rows and chosen entries for each of R rows of the step: int64 [R, window + k], -1 in unused
        columns.

        q: prepared queries [R, H, d]; weights: of the heads [R, H]; rows: which of the step's they are.
        """
        step, stored = batch.entries[RATIO], state.tensors()
        queries, keys = IndexQueries(q, weights, self.scale), IndexKeys(stored.entries, stored.scale)
        entries = IndexEntries(step.table, batch.sequence[rows], step.visible[rows], len(batch.ids))
        window = WindowList(batch.window_index[rows], batch.window_columns[rows], batch.window_rows)
        return indexer.best_entries(queries, keys, self.topk, entries, window)
