"""One step's tokens, flat: which sequence and position each has, and where everything it reads and writes lies.

What depends only on the batch is computed once a step (runtime/batch_builder.py); layers index with it.
"""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.compressor import EntryPlan
from dsv4cli.kernels.step_metadata import StepMetadata


@dataclass(frozen=True)
class Batch(StepMetadata):
    """T tokens of B sequences, each sequence's tokens together and in order, and where they lie (StepMetadata).

    ids: int64 [T]. slots: int64 [B], of the sequences' rings.
    in_rings: the window's keys are the flat rings of all slots, which take the step's keys first; else they are [rings
        of the step's sequences as they were, the step's keys].
    window_rows: the rows of the window's keys.
    routed: int64 [T], the row whose experts each row goes to: its own, but that of another for rows that mean nothing,
        which so ask for none of their own.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    in_rings: bool
    window_rows: int
    routed: torch.Tensor

    def entry_plan(self, ratio: int) -> EntryPlan:
        """The entries of a ratio that the step may complete, as many as for any with the same numbers of tokens."""
        entries = self.entries[ratio]
        return EntryPlan(entries.groups, entries.cells, entries.rotation, self.positions)
