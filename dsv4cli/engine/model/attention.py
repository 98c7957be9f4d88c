"""Attention: low-rank queries over a sliding window and compressed entries, with one shared key/value head.

A layer's compression ratio selects its kind: 0 attends to the window only, 4 (CSA) to the window and the indexer's
top-k entries, 128 (HCA) to the window and all entries.
"""

import torch
from torch import nn

from dsv4cli.engine.config.layer_kind import CSA, WINDOW
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.compressor import Compressor, compress_both
from dsv4cli.engine.model.indexer import Indexer
from dsv4cli.engine.model.linear import Fp32Linear, GroupedLinear, Linear, RMSNorm, project, project_normed, unfilled
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.state import LayerCache, Ring
from dsv4cli.engine.parallel.world import World
from dsv4cli.kernels import attention, qk_norm_rope
from dsv4cli.kernels.qk_norm_rope import KeyCells, KeyNorm


class Attention(nn.Module):
    """Attention of one layer. Each rank holds its shard of the heads and output groups."""

    def __init__(self, config: ModelConfig, numerics: Numerics, ratio: int, world: World) -> None:
        super().__init__()
        self.config = config
        self.numerics = numerics
        self.ratio = ratio
        self.world = world
        self.wq_a = Linear(numerics)
        self.q_norm = RMSNorm(config.rms_norm_eps)
        self.wq_b = Linear(numerics)
        self.wkv = Linear(numerics)
        self.kv_norm = RMSNorm(config.rms_norm_eps)
        self.attn_sink = unfilled()
        self.wo_a = GroupedLinear()
        self.wo_b = Linear(numerics)
        if ratio != WINDOW:
            self.compressor = Compressor(config, numerics, ratio)
        if ratio == CSA:
            self.indexer = Indexer(config, numerics)

    def forward(self, x: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """Return attention's output for x and update the cache. x: normed hidden state [T, D], or this rank's rows
        of it.
        """
        latent, kv, *rows = self.projected(x, len(batch.ids))
        rings = None if batch.in_rings else cache.window.data[batch.slots].flatten(0, 1)
        q, kv, index_q = self.queries_and_keys(latent, kv, batch, cache.window, len(x))
        window = cache.window.data.flatten(0, 1) if rings is None else torch.cat((rings, kv))
        entries, lists = self.entries(rows, index_q, batch, cache)
        scale, rotation = self.config.head_dim**-0.5, batch.rotations[self.ratio]
        o = attention.sparse_attention(q, window, entries, lists, self.attn_sink, scale, rotation)
        return self.output(o, len(x))

    def projected(self, x: torch.Tensor, tokens: int) -> list[torch.Tensor]:
        """Return the outputs of `linears` for all tokens of the step, gathered from all ranks.

        In a CSA layer the last output, the indexer's head weights, covers only this rank's rows.
        """
        parts = project(x, self.linears())
        own = [parts.pop()] if self.ratio == CSA else []
        return [*self.world.gather_rows(parts, tokens), *own]

    def linears(self) -> list[Linear | Fp32Linear]:
        """Return the linears that project the hidden state, in the order of the outputs of `projected`.

        These are latent queries and keys, values and scores of each compressor, and the indexer's head weights.
        """
        own: list[Linear | Fp32Linear] = [self.wq_a, self.wkv]
        if self.ratio != WINDOW:
            own += [self.compressor.wkv, self.compressor.wgate]
        if self.ratio == CSA:
            own += [self.indexer.compressor.wkv, self.indexer.compressor.wgate, self.indexer.weights_proj]
        return own

    def queries_and_keys(
        self, latent: torch.Tensor, kv: torch.Tensor, batch: Batch, ring: Ring, rows: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return normed and rotated queries [T, H, d] and keys [T, d]; store the keys in the ring.

        In a CSA layer the third result is the indexer's queries [rows, Hi, di], of all rows or of this rank's; else
        None.
        """
        if self.ratio != CSA:
            (q,) = project_normed(latent, self.q_norm, [self.wq_b])
            return *self.prepare(self.heads(q), kv, batch, ring), None
        own = self.world.rows_held(rows, len(latent))
        if rows == len(latent):
            q, index_q = project_normed(latent, self.q_norm, [self.wq_b, self.indexer.wq_b])
        else:
            (q,) = project_normed(latent, self.q_norm, [self.wq_b])
            (index_q,) = project_normed(latent[own], self.q_norm, [self.indexer.wq_b])
        norm, cells = self.key_norm(), KeyCells(ring.data.flatten(0, 1), batch.window_cells)
        q, kv, stored, index_q = qk_norm_rope.queries_keys_and_index(
            self.heads(q), kv, self.indexer.heads(index_q), norm, batch.rotations[self.ratio], cells, own.start
        )
        ring.data = stored.view(ring.data.shape)
        return q, kv, index_q

    def prepare(self, q: torch.Tensor, kv: torch.Tensor, batch: Batch, ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries [T, H, d] and keys [T, d], normed and rotated; store the keys in the ring."""
        cells = KeyCells(ring.data.flatten(0, 1), batch.window_cells)
        q, kv, stored = qk_norm_rope.queries_and_keys(q, kv, self.key_norm(), batch.rotations[self.ratio], cells)
        ring.data = stored.view(ring.data.shape)
        return q, kv

    def store_keys(self, x: torch.Tensor, batch: Batch, ring: Ring) -> None:
        """Compute the keys of x [T, D] and store them in the ring, without attention; for layers of ratio 0."""
        self.prepare(x.new_empty(len(x), 0, self.config.head_dim), self.wkv(x), batch, ring)

    def key_norm(self) -> KeyNorm:
        """Return the norm and rounding of the keys."""
        return KeyNorm(self.kv_norm.weight, self.config.rms_norm_eps, self.numerics.simulate)

    def heads(self, q: torch.Tensor) -> torch.Tensor:
        """Split the heads: [T, H * d] -> [T, H, d]."""
        return q.unflatten(-1, (-1, self.config.head_dim))

    def entries(
        self, rows: list[torch.Tensor], index_q: torch.Tensor | None, batch: Batch, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the pool of compressed entries [cells, d] and each token's list of rows to attend to, int64 [T, L].

        Args:
            rows: the outputs of `projected` after the first two.
            index_q: the indexer's queries, for the same rows as its head weights.
        """
        if cache.compressed is None:
            return self.attn_sink.new_zeros(0, self.config.head_dim, dtype=self.numerics.dtype), batch.window_index
        if cache.index is None or index_q is None:
            self.compressor(*rows, batch, cache.compressed)
            return cache.compressed.entries.data, batch.every_entry
        *rows, weights = rows
        compress_both((self.compressor, self.indexer.compressor), rows, batch, (cache.compressed, cache.index))
        tokens = len(batch.ids)
        chosen = self.indexer(index_q, weights, batch, cache.index, self.world.rows_held(len(index_q), tokens))
        (lists,) = self.world.gather_rows([chosen], tokens)
        return cache.compressed.entries.data, lists

    def output(self, o: torch.Tensor, rows: int) -> torch.Tensor:
        """Apply the grouped output projection to heads [T, H, d], already un-rotated: [rows, D], all or this rank's."""
        groups = self.config.o_groups // self.world.size
        inner = self.wo_a(o.flatten(1).unflatten(1, (groups, -1))).flatten(1)
        # the official code also sums the ranks' partial results in fp32
        return self.world.sum_rows(self.wo_b(inner), rows, o.dtype)
