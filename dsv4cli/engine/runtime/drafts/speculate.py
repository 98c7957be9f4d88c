"""Verifies draft tokens and drafts the next ones.

A draft token is sampled with the noise of its position, and the model samples at each row as it would without draft
tokens. A draft token is accepted if both agree, so the output is the same as without drafts. Nothing here waits for the
device.
"""

from dataclasses import dataclass, replace

import torch

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates
from dsv4cli.engine.runtime.drafts.drafters import Drafter, Newest
from dsv4cli.engine.runtime.sampling.sampler import Draws, sample


@dataclass(frozen=True)
class Verified:
    """The draft tokens that a step verified, of B sequences that have caught up.

    Attributes:
        slots: int64 [B].
        starts: int64 [B], the position of the token that was the newest.
        rows: int64 [B], its row in the step.
        drafted: int64 [B], how many draft tokens after it may be accepted.
        drafts: int64 [B, n], padded with any tokens.
    """

    slots: torch.Tensor
    starts: torch.Tensor
    rows: torch.Tensor
    drafted: torch.Tensor
    drafts: torch.Tensor

    def accepted(self, next_ids: torch.Tensor) -> torch.Tensor:
        """Return how many draft tokens of each sequence agree with the model's, up to the first that does not: int64
        [B].

        Args:
            next_ids: int64 [T], the token after each row; for these rows, what the model sampled.
        """
        number = torch.arange(self.drafts.shape[1], device=next_ids.device)
        sampled = next_ids[self.rows[:, None] + torch.minimum(number, self.drafted[:, None])]
        same = (sampled == self.drafts) & (number < self.drafted[:, None])
        return same.long().cumprod(1).sum(1)


def speculate(
    drafter: Drafter,
    step: tuple[HiddenStates, Batch],
    next_ids: torch.Tensor,
    verified: Verified,
    draws: Draws,
    count: int,
) -> torch.Tensor:
    """Let the drafter absorb a step, and draft `count` tokens for each verified sequence: fp64 [B, 2 * count].

    A row has the draft tokens, then the acceptance probability of each.

    Args:
        step: the model's output and its batch.
        next_ids: see `Verified.accepted`.
        draws: how each sequence samples, a row per sequence; its positions are not used.
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
