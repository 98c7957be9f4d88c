"""The twin of nano-0731's DSpark drafter: blocks drafted at many places of a dense batch at once, differentiable."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.kernels.hyper_connections import Connection
from dsv4cli.kernels.hyper_connections import ref as hyper_connections
from dsv4cli.kernels.norm.ref import rms_norm
from tools.nano import layers, quantise
from tools.nano.layers import Turn, Weights
from tools.nano.model import Loads, Mode, Twin, make_batch, part_of


@dataclass(frozen=True)
class Seen:
    """What the trunk saw of ids [B, S]: the context [B, S, L * D] of the drafter, the normed input of the head
    [B, S, D]."""

    context: torch.Tensor
    main: torch.Tensor


@dataclass(frozen=True)
class Drafted:
    """For n blocks of k drafts in each of B rows. logits: of the shared head, fp32 [B, n, k, V]; bias: of the Markov
    head, to be added, fp32 [B, n, k, V]; confidence: a logit fp32 [B, n, k]; loads: as Output.loads."""

    logits: torch.Tensor
    bias: torch.Tensor
    confidence: torch.Tensor
    loads: Loads


@dataclass(frozen=True)
class _Place:
    """Where the blocks are: turns of their rows [B * n * k, 1, R] and of the context's [B * S, 1, R]; seen bool
    [B, n * k, S], the context that each row attends to; own bool [k, k], all of it."""

    turn: Turn
    old: Turn
    seen: torch.Tensor
    own: torch.Tensor


class DrafterTwin:
    """The functions of trunk and drafter; it holds no weights. Calls of the drafter can be captured as a graph."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        assert config.dspark is not None
        self.config, self.dspark = config, config.dspark
        self.twin = Twin(config, device)
        self.turn = layers.turn(config, 0, torch.arange(config.max_position_embeddings, device=device))

    @torch.no_grad()
    def see(self, trunk: Weights, ids: torch.Tensor, mode: Mode) -> Seen:
        """The trunk over ids int64 [B, S], rows from position 0."""
        batch, length = make_batch(self.config, ids), ids.shape[1]
        after = self.twin.layers(trunk, batch, mode, [], {})
        means = [after[layer].float().mean(1).to(after[layer].dtype) for layer in self.dspark.target_layer_ids]
        main = self.twin.collapse(trunk, "", after[-1])
        return Seen(*(x.unflatten(0, batch.size)[:, :length] for x in (torch.cat(means, -1), main)))

    def __call__(
        self, trunk: Weights, weights: Weights, context: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor,
        mode: Mode,
    ) -> Drafted:  # fmt: skip
        """Drafts at `places` int64 [B, n]: a block there sees what the trunk saw before its place.

        context: of Seen; tokens: int64 [B, n, k], the token at the place and those after it that the drafts follow.
        """
        ids = torch.full_like(tokens, self.dspark.noise_token_id)
        ids[..., 0] = tokens[..., 0]
        place = self._place(context.shape[1], places, tokens.shape[-1])
        loads: Loads = {}
        main = F.linear(
            quantise.linear_input(context.flatten(0, 1), mode.activations), weights["mtp.0.main_proj.weight"]
        )
        main = rms_norm(main, weights["mtp.0.main_norm.weight"], self.config.rms_norm_eps)
        streams = self.twin.embed(trunk, ids.flatten())
        for stage in range(self.config.draft_stages):
            attend = partial(self._attention, main, place, mode)
            streams = self.twin.around(weights, f"mtp.{stage}.", streams, attend, ids, mode, loads)
        last = f"mtp.{self.config.draft_stages - 1}."
        x, normed = _collapse(self.config, part_of(weights, last), streams)
        # not F.embedding, whose gradient cannot be captured
        memory = weights[last + "markov_head.markov_w1.weight"].index_select(0, tokens.flatten()).float()
        confidence = F.linear(torch.cat((x.float(), memory), -1), weights[last + "confidence_head.proj.weight"])
        logits = F.linear(normed.float(), trunk["head.weight"])
        bias = F.linear(memory, weights[last + "markov_head.markov_w2.weight"])
        logits, bias = (each.view(*tokens.shape, -1) for each in (logits, bias))
        return Drafted(logits, bias, confidence.view(tokens.shape), loads)

    def _place(self, length: int, places: torch.Tensor, size: int) -> _Place:
        positions = (places[..., None] + torch.arange(size, device=places.device)).flatten()
        key, place = torch.arange(length, device=places.device), places[..., None]
        seen = (key < place) & (key >= place - self.config.sliding_window)
        own = torch.ones(size, size, dtype=torch.bool, device=places.device)
        turn = Turn(self.turn.cos[positions][:, None], self.turn.sin[positions][:, None])
        old = Turn(*(table[:length].repeat(len(places), 1)[:, None] for table in (self.turn.cos, self.turn.sin)))
        return _Place(turn, old, seen.repeat_interleave(size, 1), own)

    def _attention(self, main: torch.Tensor, place: _Place, mode: Mode, w: Weights, x: torch.Tensor) -> torch.Tensor:
        """Normed hidden states [B * n * k, D] of the blocks -> the same shape; main: [B * S, D]."""
        twin, turn, scale = self.twin, place.turn, self.config.head_dim**-0.5
        _, q, kv = twin.project(w, x, turn.cos, turn.sin, mode.activations)
        keys = self._keys(w, main, place.old, mode.activations).unflatten(0, (len(place.seen), -1))
        size = len(place.own)
        before = twin.every_entry_part(q.unflatten(0, place.seen.shape[:2]), keys, place.seen, scale)
        beside = twin.every_entry_part(q.unflatten(0, (-1, size)), kv.unflatten(0, (-1, size)), place.own, scale)
        o = twin.joined([before, beside], w["attn_sink"])
        return twin.output(w, o, turn.cos, -turn.sin, mode.activations)

    def _keys(self, w: Weights, main: torch.Tensor, turn: Turn, rounded: bool) -> torch.Tensor:
        """The keys of the context [T, D] as the ring holds them [T, d]."""
        kv = F.linear(quantise.linear_input(main, rounded), w["wkv.weight"])
        kv = rms_norm(kv, w["kv_norm.weight"], self.config.rms_norm_eps)
        return quantise.keys(
            layers.rotate(kv, turn.cos.squeeze(1), turn.sin.squeeze(1)), self.config.qk_rope_head_dim, rounded
        )


def _collapse(config: ModelConfig, w: Weights, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams [T, N, D] -> the state that the confidence head reads, and the normed input of the head, both [T, D]."""
    connection = Connection(
        w["hc_head_fn"], w["hc_head_scale"], w["hc_head_base"], 0, config.hc_eps, config.rms_norm_eps
    )
    x = hyper_connections.connect_head(streams, connection)
    return x, rms_norm(x, w["norm.weight"], config.rms_norm_eps)
