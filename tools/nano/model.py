"""Nano's twin for training: the engine's forward pass over a dense batch, differentiable, with optional rounding."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.kernels.norm.ref import head_norm, rms_norm
from tools.nano import attention, layers, quantise
from tools.nano.layers import Turn, Weights

Loads = dict[str, torch.Tensor]
# a block's attention: (weights, normed states [T, D]) -> [T, D]
Attend = Callable[[Weights, torch.Tensor], torch.Tensor]

BLOCK = attention.WINDOW
# names of the weights that each function needs
KINDS = ("experts", "shared_experts")
PROJECTIONS = ("wq_a.weight", "q_norm.weight", "wq_b.weight", "wkv.weight", "kv_norm.weight")
OUTPUTS = ("wo_a.weight", "wo_b.weight")
INDEX_PROJECTIONS = ("wq_b.weight", "weights_proj.weight")
COMPRESSOR = ("wkv.weight", "wgate.weight", "ape", "norm.weight")


@dataclass(frozen=True)
class Output:
    """The output of a forward pass for [B, S] tokens.

    Attributes:
        main, draft: normed inputs of the shared head [B, S, D] of the model and of its MTP block.
        index_loss: fp32 [], the sum of the KL of the CSA layers.
        loads: share of tokens' choices that each expert got, fp32 [E], by block; only for blocks that route by score.
    """

    main: torch.Tensor
    draft: torch.Tensor
    index_loss: torch.Tensor
    loads: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """A dense batch, padded to blocks of 128.

    ids: int64 [B, S]; turns, by ratio: rotation of each token [T, R]; group_turns, by ratio: rotation of each
    group's first token [S / ratio, R]; visible, by ratio: bool [S, S / ratio]; first: bool [T / 128], whether a
    block begins a row.
    """

    ids: torch.Tensor
    turns: dict[int, Turn]
    group_turns: dict[int, Turn]
    visible: dict[int, torch.Tensor]
    first: torch.Tensor

    @property
    def size(self) -> tuple[int, int]:
        """B and S."""
        return self.ids.shape[0], self.ids.shape[1]


@dataclass(frozen=True)
class Mode:
    """How to run a forward pass.

    With `activations`, they are rounded as in the engine's reference. With `sparse`, CSA sees only chosen entries.
    """

    activations: bool
    sparse: bool


def make_batch(config: ModelConfig, ids: torch.Tensor) -> Batch:
    """Return the batch of ids int64 [B, S], every row from position 0."""
    ids = F.pad(ids, (0, -ids.shape[1] % BLOCK))
    rows, length = ids.shape
    positions = torch.arange(length, device=ids.device)
    turns, group_turns, visible = {}, {}, {}
    for ratio in sorted(set(config.compress_ratios)):
        one = layers.turn(config, ratio, positions)
        turns[ratio] = Turn(one.cos.repeat(rows, 1)[:, None], one.sin.repeat(rows, 1)[:, None])
        if ratio:
            group_turns[ratio] = layers.turn(config, ratio, positions[::ratio])
            entry = torch.arange(length // ratio, device=ids.device)
            visible[ratio] = entry < (positions[:, None] + 1) // ratio
    first = (torch.arange(ids.numel() // BLOCK, device=ids.device) % (length // BLOCK)) == 0
    return Batch(ids, turns, group_turns, visible, first)


class Twin:
    """The model's functions, compiled or not, without weights."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu", compiled: bool = False) -> None:
        wrap: Callable[..., Any] = partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self.config = config
        self.hadamard = quantise.hadamard_matrix(config.index_head_dim, device)
        self.connect_pre = wrap(partial(_connect, config))
        self.connect_post = wrap(layers.connect_post)
        self.project = wrap(partial(_project, config))
        self.output = wrap(partial(_output, config))
        self.compress = wrap(partial(layers.compress, config))
        self.window_part = wrap(attention.window_part)
        self.every_entry_part = wrap(attention.every_entry_part)
        self.chosen_entry_part = wrap(attention.chosen_entry_part)
        self.joined = wrap(attention.joined)
        self.rest = wrap(_rest)
        self.index_queries = wrap(partial(_index_queries, config))
        self.index_scores = wrap(attention.index_scores)
        self.index_loss = wrap(attention.index_loss)
        self.route = wrap(partial(layers.route, config))
        self.experts = wrap(partial(layers.experts, config))
        self.collapse = wrap(partial(layers.collapse, config))

    def __call__(self, weights: Weights, ids: torch.Tensor, next_ids: torch.Tensor, mode: Mode) -> Output:
        """Run the model on ids int64 [B, S], rows from position 0, and the tokens after them, with working_weights."""
        config, length = self.config, ids.shape[1]
        batch = make_batch(config, ids)
        loads: Loads = {}
        losses = [torch.zeros((), device=ids.device)]
        streams = self.layers(weights, batch, mode, losses, loads)[-1]
        main = self.collapse(weights, "", streams)
        following = F.embedding(F.pad(next_ids, (0, -length % BLOCK)).flatten(), weights["embed.weight"])
        joined = self.join(weights, streams, following, mode)
        drafted = self.block(weights, "mtp.0.", 0, joined, batch, mode, losses, loads)
        draft = self.collapse(weights, "mtp.0.", drafted)
        main, draft = (x.view(*batch.size, -1)[:, :length] for x in (main, draft))
        return Output(main, draft, torch.stack(losses).sum(), loads)

    def layers(
        self, weights: Weights, batch: Batch, mode: Mode, losses: list[torch.Tensor], loads: Loads
    ) -> list[torch.Tensor]:
        """Return the streams [T, N, D] after each layer, and add to `losses` and `loads`."""
        # a copy: compiled functions have one version for all layers
        after = [self.embed(weights, batch.ids.flatten()).contiguous()]
        for number, ratio in enumerate(self.config.layer_ratios):
            after.append(self.block(weights, f"layers.{number}.", ratio, after[-1], batch, mode, losses, loads))
        return after[1:]

    def embed(self, weights: Weights, ids: torch.Tensor) -> torch.Tensor:
        """Return the streams before the first layer: ids int64 [T] -> [T, N, D]."""
        return F.embedding(ids, weights["embed.weight"])[:, None].expand(-1, self.config.hc_mult, -1)

    def join(self, weights: Weights, streams: torch.Tensor, following: torch.Tensor, mode: Mode) -> torch.Tensor:
        """Return the MTP block's input [T, N, D]: the streams joined with the embedding [T, D] of the next token."""
        eps = self.config.rms_norm_eps
        hidden = rms_norm(streams, weights["mtp.0.hnorm.weight"], eps)
        embedded = rms_norm(following, weights["mtp.0.enorm.weight"], eps)
        hidden = F.linear(quantise.linear_input(hidden, mode.activations), weights["mtp.0.h_proj.weight"])
        embedded = F.linear(quantise.linear_input(embedded, mode.activations), weights["mtp.0.e_proj.weight"])
        return embedded[:, None] + hidden

    def block(
        self,
        weights: Weights,
        prefix: str,
        ratio: int,
        streams: torch.Tensor,
        batch: Batch,
        mode: Mode,
        losses: list[torch.Tensor],
        loads: Loads,
    ) -> torch.Tensor:
        """Run one layer or the MTP block over streams [T, N, D], and add to `losses` and `loads`."""

        def attend(w: Weights, x: torch.Tensor) -> torch.Tensor:
            return self._attention(w, ratio, x, batch, mode, losses)

        return self.around(weights, prefix, streams, attend, batch.ids, mode, loads)

    def around(
        self,
        weights: Weights,
        prefix: str,
        streams: torch.Tensor,
        attend: Attend,
        ids: torch.Tensor,
        mode: Mode,
        loads: Loads,
    ) -> torch.Tensor:
        """Run a block over streams [T, N, D] with the given attention. ids: int64 [T], for routing by token id."""
        own = layers.part_of(weights, prefix)
        x, post, comb = self.connect_pre(streams, *layers.connection_of(own, "attn"))
        x = attend(layers.part_of(own, "attn."), x)
        streams = self.connect_post(x, streams, post, comb)
        x, post, comb = self.connect_pre(streams, *layers.connection_of(own, "ffn"))
        ffn = layers.part_of(own, "ffn.")
        table = ffn.get("gate.tid2eid")
        chosen = None if table is None else table[ids.flatten()]
        routed = self.route(x, ffn["gate.weight"], ffn.get("gate.bias"), chosen)
        if table is None:
            loads[prefix] = (routed.detach() > 0).float().mean(0) / self.config.num_experts_per_tok
        every, shared = ([ffn[f"{kind}.{name}.weight"] for name in ("w1", "w3", "w2")] for kind in KINDS)
        x = self.experts(x, routed, every, shared, mode.activations)
        return self.connect_post(x, streams, post, comb)

    def _attention(
        self, w: Weights, ratio: int, x: torch.Tensor, batch: Batch, mode: Mode, losses: list[torch.Tensor]
    ) -> torch.Tensor:
        """Compute attention: normed hidden states [T, D] -> [T, D]."""
        turn, scale = batch.turns[ratio], self.config.head_dim**-0.5
        latent, q, kv = self.project(_chosen(w, PROJECTIONS), x, turn.cos, turn.sin, mode.activations)
        window = self.window_part(q, kv, batch.first, scale)
        parts = [window]
        if ratio:
            visible, (rows, length) = batch.visible[ratio], batch.size
            queries, hidden = q.unflatten(0, (rows, length)), x.unflatten(0, (rows, length))
            entries = self._entries(layers.part_of(w, "compressor."), ratio, hidden, batch)
            entries = quantise.keys(entries, self.config.qk_rope_head_dim, mode.activations)
            if ratio == 4:
                rest = self.rest(window[1].detach(), window[2], w["attn_sink"].detach())
                scores = self._index_scores(layers.part_of(w, "indexer."), x, latent, batch, mode)
                narrow = mode.sparse and entries.shape[1] > self.config.index_topk
                chosen = attention.choose(scores, visible, self.config.index_topk) if narrow else None
                part, target = self.chosen_entry_part(queries, entries, visible, chosen, rest, scale)
                losses.append(self.index_loss(scores, target, visible))
            else:
                part = self.every_entry_part(queries, entries, visible, scale)
            parts.append(part)
        o = self.joined(parts, w["attn_sink"])
        return self.output(_chosen(w, OUTPUTS), o, turn.cos, -turn.sin, mode.activations)

    def _entries(self, w: Weights, ratio: int, hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
        turn = batch.group_turns[ratio]
        return self.compress(hidden, *_chosen(w, COMPRESSOR).values(), turn.cos, turn.sin)

    def _index_scores(
        self, w: Weights, x: torch.Tensor, latent: torch.Tensor, batch: Batch, mode: Mode
    ) -> torch.Tensor:
        """Return scores [B, S, E], also of entries that are not visible. No gradient reaches the trunk."""
        x, latent, turn = x.detach(), latent.detach(), batch.turns[4]
        entries = self._entries(layers.part_of(w, "compressor."), 4, x.unflatten(0, batch.size), batch)
        keys = quantise.index(entries, self.hadamard, mode.activations)
        matrices = _chosen(w, INDEX_PROJECTIONS)
        q, factors = self.index_queries(matrices, x, latent, turn.cos, turn.sin, self.hadamard, mode.activations)
        return self.index_scores(q.unflatten(0, batch.size), factors.unflatten(0, batch.size), keys)


def _chosen(weights: Weights, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    return {name: weights[name] for name in names}


def _connect(
    config: ModelConfig,
    streams: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    norm: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute layers.connect_pre, with the input normed."""
    x, post, comb = layers.connect_pre(config, streams, fn, scale, base)
    return rms_norm(x, norm, config.rms_norm_eps), post, comb


def _project(
    config: ModelConfig, w: Weights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Map hidden states [T, D] to normed latent [T, Q], rotated queries [T, H, d] and keys as in the cache [T, d]."""
    eps, inputs = config.rms_norm_eps, quantise.linear_input(x, rounded)
    latent = rms_norm(F.linear(inputs, w["wq_a.weight"]), w["q_norm.weight"], eps)
    q = F.linear(quantise.linear_input(latent, rounded), w["wq_b.weight"]).unflatten(-1, (-1, config.head_dim))
    kv = rms_norm(F.linear(inputs, w["wkv.weight"]), w["kv_norm.weight"], eps)
    kv = layers.rotate(kv, cos.squeeze(1), sin.squeeze(1))
    kv = quantise.keys(kv, config.qk_rope_head_dim, rounded)
    return latent, layers.rotate(head_norm(q, eps), cos, sin), kv


def _output(
    config: ModelConfig, w: Weights, o: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rounded: bool
) -> torch.Tensor:
    """Apply the inverse rotation and the grouped projection to heads [T, H, d] -> [T, D]."""
    o = layers.rotate(o, cos, sin).flatten(1).unflatten(1, (config.o_groups, -1))
    inner = torch.einsum("tgk,gnk->tgn", o, w["wo_a.weight"].unflatten(0, (config.o_groups, -1))).flatten(1)
    return F.linear(quantise.linear_input(inner, rounded), w["wo_b.weight"])


def _rest(total: torch.Tensor, top: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """Return the log of the weight of window and sink: total, top fp32 [T, H] of the window part -> [T, H]."""
    return torch.logaddexp(total.log() + top, sink.expand_as(top))


def _index_queries(
    config: ModelConfig,
    w: Weights,
    x: torch.Tensor,
    latent: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    hadamard: torch.Tensor,
    rounded: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indexer's queries [T, Hi, di] and the factor of each of its heads [T, Hi]."""
    q = F.linear(quantise.linear_input(latent, rounded), w["wq_b.weight"]).unflatten(-1, (-1, config.index_head_dim))
    q = quantise.index(layers.rotate(q, cos, sin), hadamard, rounded)
    factor = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
    return q, (F.linear(x, w["weights_proj.weight"]).float() * factor).to(x.dtype)
