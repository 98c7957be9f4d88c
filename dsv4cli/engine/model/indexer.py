"""The indexer of CSA layers: selects the compressed entries that each token attends to."""

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
        """Split the heads: [T, H * d] -> [T, H, d]."""
        return q.unflatten(-1, (-1, self.width))

    def forward(
        self, q: torch.Tensor, weights: torch.Tensor, batch: Batch, state: CompressorState, rows: slice
    ) -> torch.Tensor:
        """Return each row's list of window rows and selected entries: int64 [R, window + k], -1 in unused columns.

        Args:
            q: queries [R, H, d], rotated and rounded.
            weights: head weights [R, H].
            rows: the position of these R rows in the step.
        """
        step, stored = batch.entries[RATIO], state.tensors()
        queries, keys = IndexQueries(q, weights, self.scale), IndexKeys(stored.entries, stored.scale)
        entries = IndexEntries(step.table, batch.sequence[rows], step.visible[rows], len(batch.ids))
        window = WindowList(batch.window_index[rows], batch.window_columns[rows], batch.window_rows)
        return indexer.best_entries(queries, keys, self.topk, entries, window)
