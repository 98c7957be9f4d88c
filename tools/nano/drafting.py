"""The loss of a drafter: the model's own distribution at each place of many blocks, and the confidence."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tools.nano.model import Loads

# weight of a draft relative to the one before it, and weight of the confidence's loss
FADE, CONFIDENCE_FACTOR = 0.9, 0.1


@dataclass(frozen=True)
class Seen:
    """The trunk's outputs for ids [B, S]: the drafter's input [B, S, C], and the normed input of the head [B, S, D]."""

    context: torch.Tensor
    main: torch.Tensor


@dataclass(frozen=True)
class Blocks:
    """n blocks of k drafts in each of B rows.

    Attributes:
        ids: int64 [B, S], the text.
        places: int64 [B, n], position of the newest token of each block.
        wanted: bool [B, n, k], drafts that count for the loss: those in an answer.
    """

    ids: torch.Tensor
    places: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def choose(cls, ids: torch.Tensor, learned: torch.Tensor, count: int, size: int) -> "Blocks":
        """Choose `count` blocks of `size` drafts at random places of answers.

        ids: int64 [B, S]; learned: bool [B, S]; both as in `pool`.
        """
        last = ids.shape[1] - size
        open_to = learned[:, 1:last] & learned[:, 2 : last + 1]
        # take the highest random numbers; places outside of answers are last
        chance = open_to + torch.rand(open_to.shape, device=ids.device)
        places = chance.topk(count).indices + 1
        return cls(ids, places, _behind(learned, places, size).cumprod(-1)[..., 1:].bool())

    @property
    def tokens(self) -> torch.Tensor:
        """The newest token of each block and those after it: int64 [B, n, k + 1]."""
        return _behind(self.ids, self.places, self.wanted.shape[-1])


@dataclass(frozen=True)
class Drafted:
    """The output for n blocks of k drafts in each of B rows.

    Attributes:
        logits: fp32 [B, n, k, V].
        confidence: logit of the probability that each draft is accepted, fp32 [B, n, k].
        loads: as Output.loads.
    """

    logits: torch.Tensor
    confidence: torch.Tensor
    loads: Loads


@dataclass(frozen=True)
class DraftLoss:
    """The loss of a drafter and its statistics.

    Attributes:
        total: the loss to minimize.
        entropy, confidence: its parts, in nats.
        wanted, right, accepted: fp32 [k], by place in a block: drafts that count, those that are the model's first
            choice, and those for which this holds for all before them as well.
    """

    total: torch.Tensor
    entropy: torch.Tensor
    confidence: torch.Tensor
    wanted: torch.Tensor
    right: torch.Tensor
    accepted: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """Return all values except the total as one row: fp32 [2 + 3 k]."""
        return torch.cat((self.entropy[None], self.confidence[None], self.wanted, self.right, self.accepted))


def draft_loss(drafted: Drafted, blocks: Blocks, main: torch.Tensor, head: torch.Tensor) -> DraftLoss:
    """Compute the loss. main: normed inputs of the model's head [B, S, D]; head: its weight, fp32 [V, D]."""
    rows = torch.arange(len(main), device=main.device)[:, None, None]
    step = torch.arange(blocks.wanted.shape[-1], device=main.device)
    with torch.no_grad():
        given = F.linear(main[rows, blocks.places[..., None] + step].float(), head)  # [B, n, k, V]
        first, chances = given.argmax(-1), given.softmax(-1)
    logits, wanted = drafted.logits, blocks.wanted.float()
    drafts = logits.detach().argmax(-1)
    right = (drafts == first).float()
    entropy = logits.logsumexp(-1) - (chances * logits).sum(-1)
    weight = wanted * torch.exp(step * math.log(FADE))
    mean = (entropy * weight).sum() / weight.sum().clamp_min(1e-6)
    # the confidence only counts where all earlier drafts match the text
    follows = (drafts == blocks.tokens[..., 1:]).float()
    asked = F.pad(follows[..., :-1], (1, 0), value=1.0).cumprod(-1) * wanted
    doubt = F.binary_cross_entropy_with_logits(drafted.confidence, right, reduction="none")
    confidence = (doubt * asked).sum() / asked.sum().clamp_min(1e-6)
    counts = [count.sum((0, 1)) for count in (wanted, right * wanted, right * asked)]
    return DraftLoss(mean + CONFIDENCE_FACTOR * confidence, mean.detach(), confidence.detach(), *counts)


def _behind(rows: torch.Tensor, places: torch.Tensor, count: int) -> torch.Tensor:
    """Return the values of rows [B, S] at places int64 [B, n] and the `count` after each: [B, n, count + 1]."""
    index = places[..., None] + torch.arange(count + 1, device=rows.device)
    return rows[torch.arange(len(rows), device=rows.device)[:, None, None], index]
