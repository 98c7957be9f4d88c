"""The twin of nano's MTP block: drafts chains at many places of a dense batch at once, differentiably."""

from functools import partial

import torch
import torch.nn.functional as F

from tools.nano.drafter import DrafterTwin
from tools.nano.drafting import Blocks, Drafted
from tools.nano.layers import Weights, connection_of, part_of
from tools.nano.model import Loads, Mode

STAGE = "mtp.0."


class MTPTwin(DrafterTwin):
    """The MTP block, run again on its own streams for each further draft. Its context is the model's last streams."""

    def context(self, after: list[torch.Tensor]) -> torch.Tensor:
        """See `DrafterTwin`."""
        return after[-1].flatten(1)

    def __call__(self, trunk: Weights, weights: Weights, context: torch.Tensor, blocks: Blocks, mode: Mode) -> Drafted:
        """See `DrafterTwin`."""
        tokens, positions = blocks.tokens[..., :-1], blocks.places - 1
        embed = trunk["embed.weight"]
        streams = context.unflatten(-1, (self.config.hc_mult, -1))
        # a row's last token has no next token, and no block sees it
        following = F.embedding(blocks.ids.roll(-1, 1).flatten(), embed)
        absorbed = self._absorbed(weights, streams.flatten(0, 1), following, context.shape[1], mode)
        streams = streams[torch.arange(len(context), device=context.device)[:, None], positions].flatten(0, 1)
        normed, loads = [], []
        own: list[torch.Tensor] = []
        for number in range(tokens.shape[-1]):
            found: Loads = {}
            ids = tokens[..., number]
            joined = self.twin.join(weights, streams, F.embedding(ids.flatten(), embed), mode)
            attend = partial(self._attention, absorbed, own, positions, mode)
            streams = self.twin.around(weights, STAGE, joined, attend, ids, mode, found)
            normed.append(self.twin.collapse(weights, STAGE, streams))
            loads.append(found[STAGE])
        logits = F.linear(torch.stack(normed, 1).float(), trunk["head.weight"]).view(*tokens.shape, -1)
        # the engine uses a draft's probability as its confidence
        confidence = torch.logit(logits.detach().softmax(-1).amax(-1), 1e-6)
        return Drafted(logits, confidence, {STAGE: torch.stack(loads).mean(0)})

    def _absorbed(
        self, weights: Weights, streams: torch.Tensor, following: torch.Tensor, length: int, mode: Mode
    ) -> torch.Tensor:
        """Return the keys [B, S, d] of all positions: streams [B * S, N, D], next tokens' embeddings [B * S, D]."""
        own, joined = part_of(weights, STAGE), self.twin.join(weights, streams, following, mode)
        x, _, _ = self.twin.connect_pre(joined, *connection_of(own, "attn"))
        turn = self.turn(torch.arange(len(x), device=x.device) % length)
        return self.keys(part_of(own, "attn."), x, turn, mode.activations).unflatten(0, (-1, length))

    def _attention(
        self, absorbed: torch.Tensor, own: list[torch.Tensor], first: torch.Tensor, mode: Mode, w: Weights,
        x: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """Map normed hidden states [B * n, D] of one row of each chain to the same shape.

        Args:
            absorbed: [B, S, d].
            own: keys [B * n, d] of the chain's rows so far; this row's keys are appended.
            first: int64 [B, n], position of the first row of each chain.
        """
        twin, scale, position = self.twin, self.config.head_dim**-0.5, first + len(own)
        turn = self.turn(position.flatten())
        _, q, kv = twin.project(w, x, turn.cos, turn.sin, mode.activations)
        own.append(kv)
        key = torch.arange(absorbed.shape[1], device=x.device)
        seen = (key < first[..., None]) & (key > position[..., None] - self.config.sliding_window)
        every = torch.ones(1, len(own), dtype=torch.bool, device=x.device)
        before = twin.every_entry_part(q.unflatten(0, first.shape), absorbed, seen, scale)
        beside = twin.every_entry_part(q[:, None], torch.stack(own, 1), every, scale)
        o = twin.joined([before, beside], w["attn_sink"])
        return twin.output(w, o, turn.cos, -turn.sin, mode.activations)
