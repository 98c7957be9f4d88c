"""The training loss and the accuracy of a batch: cross entropies of both heads, and the indexer's KL."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from tools.nano.model import Mode, Output, Twin

DRAFT_FACTOR, INDEX_FACTOR = 0.3, 1.0
# factor on the squared log-normalizer, which keeps logits from drifting
Z_FACTOR = 1e-4


@dataclass(frozen=True)
class Text:
    """A batch on its device.

    Attributes:
        ids: int64 [B, S + 2].
        weights: fp32 [B, S + 2], loss weight of predicting each token.
        rows: int64, the places in [B * S] whose next token has a weight.
        draft_rows: int64, the places in [B * S] for which the token after the next one has a weight.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor
    draft_rows: torch.Tensor

    @classmethod
    def of(cls, ids: np.ndarray, weights: np.ndarray, device: torch.device) -> "Text":
        """Copy the arrays of stream.packed without waiting for the device."""
        rows = np.flatnonzero(weights[:, 1:-1])
        draft_rows = np.flatnonzero(weights[:, 2:])
        arrays = (ids.astype(np.int64), weights.astype(np.float32), rows, draft_rows)
        tensors = [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
        if device.type == "cuda":
            tensors = [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
        return cls(*tensors)

    def run(self, twin: Twin, weights: Mapping[str, torch.Tensor], mode: Mode) -> Output:
        """Run the twin over all tokens except the last two."""
        return twin(weights, self.ids[:, :-2], self.ids[:, 1:-1], mode)


@dataclass(frozen=True)
class Loss:
    """The loss of a batch.

    Attributes:
        total: the loss to minimize.
        main, draft: mean cross entropies in nats.
        index: the KL of all CSA layers.
    """

    total: torch.Tensor
    main: torch.Tensor
    draft: torch.Tensor
    index: torch.Tensor


def loss_of(output: Output, text: Text, head: torch.Tensor) -> Loss:
    """Return the loss of a batch. head: fp32 [V, D]."""
    main, main_z = _cross_entropy(output.main, text.rows, text.ids[:, 1:-1], text.weights[:, 1:-1], head)
    draft, draft_z = _cross_entropy(output.draft, text.draft_rows, text.ids[:, 2:], text.weights[:, 2:], head)
    total = main + Z_FACTOR * main_z + DRAFT_FACTOR * (draft + Z_FACTOR * draft_z)
    return Loss(total + INDEX_FACTOR * output.index_loss, main.detach(), draft.detach(), output.index_loss.detach())


def _cross_entropy(
    x: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, head: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weighted means of cross entropy and squared log-normalizer: x [B, S, D], ids, weights [B, S]."""
    logits = F.linear(x.flatten(0, 1).index_select(0, rows).float(), head)
    weight, target = weights.flatten()[rows], ids.flatten()[rows]
    normaliser = logits.logsumexp(-1)
    entropy = normaliser - logits.gather(-1, target[:, None])[:, 0]
    total = weight.sum().clamp_min(1e-6)
    return (entropy * weight).sum() / total, (normaliser.square() * weight).sum() / total


@torch.no_grad()
def accuracy(output: Output, text: Text, head: torch.Tensor) -> dict[str, float]:
    """Return the share of tokens with full weight that are the model's first choice, and the drafter's.

    draft_match: how often the drafter's first choice is the model's own at the next position, where the token that it
    was given is the model's choice too. This approximates the acceptance rate of speculative decoding.
    """
    full = text.weights >= 1
    own = _first(output.main, head)  # the token at t + 1
    drafted = _first(output.draft, head)  # the token at t + 2
    right = (own == text.ids[:, 1:-1]) & full[:, 1:-1]
    draft_right = (drafted == text.ids[:, 2:]) & full[:, 2:]
    followed = right[:, :-1] & full[:, 2:-1]
    match = (drafted[:, :-1] == own[:, 1:]) & followed
    return {
        "main": _share(right, full[:, 1:-1]),
        "draft": _share(draft_right, full[:, 2:]),
        "draft_match": _share(match, followed),
    }


def _first(x: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return torch.stack([F.linear(row.float(), head).argmax(-1) for row in x])


def _share(right: torch.Tensor, of: torch.Tensor) -> float:
    return (right.sum() / of.sum().clamp_min(1)).item()
