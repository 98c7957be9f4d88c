"""The twin of nano-0731's DSpark drafter: drafts blocks at many places of a dense batch at once, differentiably."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.kernels.hyper_connections import Connection
from dsv4cli.kernels.hyper_connections import ref as hyper_connections
from dsv4cli.kernels.norm.ref import rms_norm
from tools.nano import quantise
from tools.nano.drafter import DrafterTwin
from tools.nano.drafting import Blocks, Drafted
from tools.nano.layers import Turn, Weights, part_of
from tools.nano.model import Loads, Mode


@dataclass(frozen=True)
class _Place:
    """The positions of the blocks.

    turns of their rows [B * n * k, 1, R] and of the context's [B * S, 1, R]; seen bool [B, n * k, S], the context that
    each row attends to; own bool [k, k], all of its block.
    """

    turn: Turn
    old: Turn
    seen: torch.Tensor
    own: torch.Tensor


class DSparkTwin(DrafterTwin):
    """The drafter's stages over blocks of a token and noise. Its context is the mean of the streams of some layers."""

    def context(self, after: list[torch.Tensor]) -> torch.Tensor:
        """See `DrafterTwin`."""
        assert self.config.dspark is not None
        return torch.cat(
            [after[layer].float().mean(1).to(after[layer].dtype) for layer in self.config.dspark.target_layer_ids], -1
        )

    def __call__(self, trunk: Weights, weights: Weights, context: torch.Tensor, blocks: Blocks, mode: Mode) -> Drafted:
        """See `DrafterTwin`."""
        assert self.config.dspark is not None
        tokens = blocks.tokens[..., :-1]
        ids = torch.full_like(tokens, self.config.dspark.noise_token_id)
        ids[..., 0] = tokens[..., 0]
        place = self._place(context.shape[1], blocks.places, tokens.shape[-1])
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
        logits = logits + F.linear(memory, weights[last + "markov_head.markov_w2.weight"])
        return Drafted(logits.view(*tokens.shape, -1), confidence.view(tokens.shape), loads)

    def _place(self, length: int, places: torch.Tensor, size: int) -> _Place:
        positions = (places[..., None] + torch.arange(size, device=places.device)).flatten()
        key, place = torch.arange(length, device=places.device), places[..., None]
        seen = (key < place) & (key >= place - self.config.sliding_window)
        own = torch.ones(size, size, dtype=torch.bool, device=places.device)
        return _Place(self.turn(positions), self.turn(key.repeat(len(places))), seen.repeat_interleave(size, 1), own)

    def _attention(self, main: torch.Tensor, place: _Place, mode: Mode, w: Weights, x: torch.Tensor) -> torch.Tensor:
        """Map normed hidden states [B * n * k, D] of the blocks to the same shape. main: [B * S, D]."""
        twin, turn, scale = self.twin, place.turn, self.config.head_dim**-0.5
        _, q, kv = twin.project(w, x, turn.cos, turn.sin, mode.activations)
        keys = self.keys(w, main, place.old, mode.activations).unflatten(0, (len(place.seen), -1))
        size = len(place.own)
        before = twin.every_entry_part(q.unflatten(0, place.seen.shape[:2]), keys, place.seen, scale)
        beside = twin.every_entry_part(q.unflatten(0, (-1, size)), kv.unflatten(0, (-1, size)), place.own, scale)
        o = twin.joined([before, beside], w["attn_sink"])
        return twin.output(w, o, turn.cos, -turn.sin, mode.activations)


def _collapse(config: ModelConfig, w: Weights, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map streams [T, N, D] to the input of the confidence head and the normed input of the head, both [T, D]."""
    connection = Connection(
        w["hc_head_fn"], w["hc_head_scale"], w["hc_head_base"], 0, config.hc_eps, config.rms_norm_eps
    )
    x = hyper_connections.connect_head(streams, connection)
    return x, rms_norm(x, w["norm.weight"], config.rms_norm_eps)
