"""What training a drafter minimises: the model's own distribution at each place of many blocks, and the confidence."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tools.nano.drafter import Drafted

# weight of a draft against that of the one before it, and of the confidence's loss
FADE, CONFIDENCE_FACTOR = 0.9, 0.1


@dataclass(frozen=True)
class Blocks:
    """n blocks of k drafts in each of B rows. places: int64 [B, n], of the newest token of each; tokens: int64
    [B, n, k + 1], that token and those after it; wanted: bool [B, n, k], the drafts that count: those of an answer."""

    places: torch.Tensor
    tokens: torch.Tensor
    wanted: torch.Tensor

    @classmethod
    def choose(cls, ids: torch.Tensor, learned: torch.Tensor, count: int, size: int) -> "Blocks":
        """`count` blocks of `size` drafts at random places of answers: ids int64 and learned bool [B, S], of `pool`."""
        last = ids.shape[1] - size
        open_to = learned[:, 1:last] & learned[:, 2 : last + 1]
        # the highest random numbers; places outside of answers come last
        chance = open_to + torch.rand(open_to.shape, device=ids.device)
        places = chance.topk(count).indices + 1
        index = places[..., None] + torch.arange(size + 1, device=ids.device)
        rows = torch.arange(len(ids), device=ids.device)[:, None, None]
        return cls(places, ids[rows, index], learned[rows, index].cumprod(-1)[..., 1:].bool())


@dataclass(frozen=True)
class DraftLoss:
    """total is what is minimised. entropy, confidence: its parts, in nats; wanted, right, accepted: fp32 [k], how many
    drafts counted at each place of a block, how many were the model's first choice, and how many were so with all
    before them."""

    total: torch.Tensor
    entropy: torch.Tensor
    confidence: torch.Tensor
    wanted: torch.Tensor
    right: torch.Tensor
    accepted: torch.Tensor

    def numbers(self) -> torch.Tensor:
        """All but the total in a row: fp32 [2 + 3 k]."""
        return torch.cat((self.entropy[None], self.confidence[None], self.wanted, self.right, self.accepted))


def draft_loss(drafted: Drafted, blocks: Blocks, main: torch.Tensor, head: torch.Tensor) -> DraftLoss:
    """main: normed inputs of the head [B, S, D], head: fp32 [V, D], both of the model."""
    rows = torch.arange(len(main), device=main.device)[:, None, None]
    step = torch.arange(blocks.wanted.shape[-1], device=main.device)
    with torch.no_grad():
        given = F.linear(main[rows, blocks.places[..., None] + step].float(), head)  # [B, n, k, V]
        first, chances = given.argmax(-1), given.softmax(-1)
    logits, wanted = drafted.logits + drafted.bias, blocks.wanted.float()
    drafts = logits.detach().argmax(-1)
    right = (drafts == first).float()
    entropy = logits.logsumexp(-1) - (chances * logits).sum(-1)
    weight = wanted * torch.exp(step * math.log(FADE))
    mean = (entropy * weight).sum() / weight.sum().clamp_min(1e-6)
    # a confidence is asked for where the drafts before were the text's
    follows = (drafts == blocks.tokens[..., 1:]).float()
    asked = F.pad(follows[..., :-1], (1, 0), value=1.0).cumprod(-1) * wanted
    doubt = F.binary_cross_entropy_with_logits(drafted.confidence, right, reduction="none")
    confidence = (doubt * asked).sum() / asked.sum().clamp_min(1e-6)
    counts = [count.sum((0, 1)) for count in (wanted, right * wanted, right * asked)]
    return DraftLoss(mean + CONFIDENCE_FACTOR * confidence, mean.detach(), confidence.detach(), *counts)
