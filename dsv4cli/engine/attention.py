"""Attention: low-rank queries over a sliding window and compressed entries of one shared key/value head.

Three kinds by ratio: 0 window only, 4 (CSA) window and the entries that the indexer chooses, 128 (HCA) window and all
entries.
"""

import torch
from torch import nn

from dsv4cli.engine.batch import Batch
from dsv4cli.engine.cache import LayerCache
from dsv4cli.engine.compressor import Compressor
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.indexer import Indexer
from dsv4cli.engine.linear import GroupedLinear, Linear, RMSNorm, unfilled
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import World
from dsv4cli.kernels import attention, norm, rope


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
            self.compressor = Compressor(config, numerics, ratio, self.stored)
        if ratio == 4:
            self.indexer = Indexer(config, numerics, world)

    def stored(self, kv: torch.Tensor) -> torch.Tensor:
        """Normed and rotated keys [n, d] as the cache holds them."""
        return self.numerics.keys(kv, self.config.qk_rope_head_dim)

    def forward(self, x: torch.Tensor, batch: Batch, cache: LayerCache) -> torch.Tensor:
        """x: normed hidden state [T, D] -> [T, D]; the step's keys and entries go into the cache."""
        rotation = batch.rotations[self.ratio]
        latent = self.q_norm(self.wq_a(x))
        q = rope.rotate(self.queries(latent), rotation)
        kv = self.keys(x, rotation)
        # the ring is read before it is written
        window = cache.window.followed_by(batch.slots, kv)
        cache.window.store(batch.window_store.cells, kv[batch.window_store.rows])
        entries, index = self.entries(x, latent, batch, cache)
        scale = self.config.head_dim**-0.5
        o = attention.sparse_attention(q, window, entries, index, self.attn_sink, scale)
        return self.output(rope.rotate(o, rotation.conj()))

    def queries(self, latent: torch.Tensor) -> torch.Tensor:
        """Normed latent [T, Q] -> unrotated queries [T, H, d]."""
        q = self.wq_b(latent).unflatten(-1, (-1, self.config.head_dim))
        return norm.head_norm(q, self.config.rms_norm_eps)

    def keys(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        """Hidden state [T, D] -> keys [T, d] as the cache holds them."""
        return self.stored(rope.rotate(self.kv_norm(self.wkv(x)), rotation))

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
