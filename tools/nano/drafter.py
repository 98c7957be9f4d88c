"""The common base of the drafters' twins: what they read from the trunk, and shared functions."""

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.kernels.norm.ref import rms_norm
from tools.nano import layers, quantise
from tools.nano.drafting import Blocks, Drafted, Seen
from tools.nano.layers import Turn, Weights
from tools.nano.model import Mode, Twin, make_batch


class DrafterTwin(ABC):
    """The functions of trunk and drafter, without weights. Calls of the drafter can be captured as a CUDA graph."""

    def __init__(self, config: ModelConfig, device: torch.device | str = "cpu") -> None:
        self.config, self.twin = config, Twin(config, device)
        self._turn = layers.turn(config, 0, torch.arange(config.max_position_embeddings, device=device))

    @torch.no_grad()
    def see(self, trunk: Weights, ids: torch.Tensor, mode: Mode) -> Seen:
        """Run the trunk over ids int64 [B, S], rows from position 0."""
        batch, length = make_batch(self.config, ids), ids.shape[1]
        after = self.twin.layers(trunk, batch, mode, [], {})
        main = self.twin.collapse(trunk, "", after[-1])
        return Seen(*(x.unflatten(0, batch.size)[:, :length] for x in (self.context(after), main)))

    @abstractmethod
    def context(self, after: list[torch.Tensor]) -> torch.Tensor:
        """Return what the drafter reads, [T, C], from the streams after each layer [T, N, D]."""

    @abstractmethod
    def __call__(self, trunk: Weights, weights: Weights, context: torch.Tensor, blocks: Blocks, mode: Mode) -> Drafted:
        """Draft after the newest token of each block, at positions from 1 on, with the text's tokens as earlier drafts.

        A block sees what the trunk saw before its position (Seen.context), and all of `blocks.tokens` except the last.
        """

    def turn(self, positions: torch.Tensor) -> Turn:
        """Return the rotation of positions int64 [T]: [T, 1, R]."""
        return Turn(self._turn.cos[positions][:, None], self._turn.sin[positions][:, None])

    def keys(self, w: Weights, x: torch.Tensor, turn: Turn, rounded: bool) -> torch.Tensor:
        """Return the keys of normed hidden states [T, D] as in the ring buffer, [T, d]. w: weights of an attention."""
        kv = F.linear(quantise.linear_input(x, rounded), w["wkv.weight"])
        kv = rms_norm(kv, w["kv_norm.weight"], self.config.rms_norm_eps)
        kv = layers.rotate(kv, turn.cos.squeeze(1), turn.sin.squeeze(1))
        return quantise.keys(kv, self.config.qk_rope_head_dim, rounded)
