"""Attention: low-rank queries over a sliding window and compressed entries of one shared key/value head.

Three kinds by ratio: 0 window only, 4 (CSA) window and the entries that the indexer chooses, 128 (HCA) window and all
entries.
"""

import torch
from torch import nn

from dsv4cli.engine.batch import Batch
from dsv4cli.engine.cache import LayerCache, Ring
from dsv4cli.engine.compressor import Compressor
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.indexer import Indexer
from dsv4cli.engine.linear import GroupedLinear, Linear, RMSNorm, unfilled
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import World
from dsv4cli.kernels import attention, keys


class Attention(nn.Module):
    """One layer's attention; a rank holds its share of heads and groups."""

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
        if ratio:
            self.compressor = Compressor(config, numerics, ratio)
        if ratio == 4:
            self.indexer = Indexer(config, numerics, world)

    def forward(self, x: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """x: normed hidden state [T, D] -> [T, D]; the step's keys and entries go into the cache."""
        rotation = batch.rotations[self.ratio]
        latent = self.q_norm(self.wq_a(x))
        q = self.wq_b(latent).unflatten(-1, (-1, self.config.head_dim))
        q, window = self.window(q, x, batch, cache.window)
        entries, index = self.entries(x, latent, batch, cache)
        scale = self.config.head_dim**-0.5
        return self.output(attention.sparse_attention(q, window, entries, index, self.attn_sink, scale, rotation))

    def window(self, q: torch.Tensor, x: torch.Tensor, batch: Batch, ring: Ring) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries that `prepare` gives, and the window's keys [window_rows, d], as the batch counts them."""
        if batch.in_rings:
            return self.prepare(q, x, batch, ring)[0], ring.data.flatten(0, 1)
        rings = ring.data[batch.slots].flatten(0, 1)
        q, kv = self.prepare(q, x, batch, ring)
        return q, torch.cat((rings, kv))

    def prepare(
        self, q: torch.Tensor, x: torch.Tensor, batch: Batch, window: Ring
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [T, H, d] normed and rotated, and keys [T, d] of the state x [T, D], which the ring takes too."""
        q, kv, stored = keys.queries_and_keys(
            q, self.wkv(x), self.kv_norm.weight, batch.rotations[self.ratio], window.data.flatten(0, 1),
            batch.window_cells, self.config.rms_norm_eps, self.numerics.simulate,
        )  # fmt: skip
        window.data = stored.view(window.data.shape)
        return q, kv

    def entries(
        self, x: torch.Tensor, latent: torch.Tensor, batch: Batch, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool of compressed entries [cells, d] and each token's list of window rows and entries, int64 [T, L]."""
        if cache.compressed is None:
            return x.new_zeros(0, self.config.head_dim), batch.window_index
        self.compressor(x, batch, cache.compressed)
        pool = cache.compressed.entries
        if cache.index is None:
            return pool.data, batch.every_entry
        return pool.data, batch.listed(self.indexer(x, latent, batch, cache.index))

    def output(self, o: torch.Tensor) -> torch.Tensor:
        """Un-rotated heads [T, H, d] through the grouped projection -> [T, D]."""
        groups = self.config.o_groups // self.world.size
        inner = self.wo_a(o.flatten(1).unflatten(1, (groups, -1))).flatten(1)
        # the official code sums the ranks' parts in fp32
        return self.world.all_reduce(self.wo_b(inner).float()).to(o.dtype)
