"""Drafts from one step to the next: which of them the model drew itself, and what the drafter makes of that.

A draft is drawn with the noise of its place, the model draws at each row as it does without drafts, and a draft is
accepted where both are one token: what comes out is what comes out without drafts. Nothing here waits for the device.
"""

from dataclasses import dataclass, replace

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates
from dsv4cli.engine.runtime.drafts.drafters import Drafter, Newest
from dsv4cli.engine.runtime.sampling.sampler import Draws, sample


@dataclass(frozen=True)
class Verified:
    """Where a step has verified drafts of B sequences, which have caught up.

    slots: int64 [B]. starts: int64 [B], the position of the token that was the newest. rows: int64 [B], the row of the
    step where it stands. drafted: int64 [B], how many drafts behind it may be accepted. drafts: int64 [B, n], anything
    behind the last.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    drafted: torch.Tensor
    drafts: torch.Tensor

    def accepted(self, next_ids: torch.Tensor) -> torch.Tensor:
        """How many drafts of each are what the model drew, up to the first that is not: int64 [B].

        next_ids: int64 [T], the token after each row, of these rows what the model drew.
        """
        number = torch.arange(self.drafts.shape[1], device=next_ids.device)
        drawn = next_ids[self.rows[:, None] + torch.minimum(number, self.drafted[:, None])]
        same = (drawn == self.drafts) & (number < self.drafted[:, None])
        return same.long().cumprod(1).sum(1)


def speculate(
    drafter: Drafter,
    step: tuple[HiddenStates, Batch],
    next_ids: torch.Tensor,
    verified: Verified,
    draws: Draws,
    count: int,
) -> torch.Tensor:
    """Has the drafter take in a step and draft `count` tokens for each verified sequence: fp64 [B, 2 * count].

    A row has the drafts and then how likely each is to be accepted. step: what the model gave, and its batch. next_ids:
    as of `Verified.accepted`. draws: how each sequence draws, a row a sequence; its positions play no part.
    """
    hidden, batch = step
    drafter.absorb(hidden, next_ids, batch)
    if not count:
        return next_ids.new_empty(len(verified.slots), 0, dtype=torch.float64)
    accepted = verified.accepted(next_ids)
    last = verified.rows + accepted
    newest = Newest(next_ids[last], verified.starts + 1 + accepted, verified.slots, hidden.streams[last])

    def choose(logits: torch.Tensor, number: int) -> torch.Tensor:
        return sample(logits, replace(draws, positions=newest.positions + 1 + number))

    made = drafter.draft(newest, count, choose)
    return torch.cat((made.tokens.double(), made.chances.double()), 1)
