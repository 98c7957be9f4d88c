"""The tokens of one step, flattened over sequences, and the cache rows that they read and write.

Everything that depends only on the batch is computed once per step (runtime/batch_builder.py); layers index with it.
"""

from dataclasses import dataclass

import torch

from dsv4cli.kernels.compressor import EntryPlan
from dsv4cli.kernels.step_metadata import StepMetadata


@dataclass(frozen=True)
class Batch(StepMetadata):
    """T tokens of B sequences, in sequence order, and the cache indices of StepMetadata.

    Attributes:
        ids: int64 [T].
        slots: int64 [B], ring slot of each sequence.
        in_rings: whether window keys are read from the flat rings of all slots, after the step's keys are stored; if
            False, they are the rings of the step's sequences before the step, followed by the step's keys.
        window_rows: number of rows of window keys.
        routed: int64 [T], the row whose experts each row uses. A padding row uses those of another row, so that it
            loads no experts of its own.
    """

    ids: torch.Tensor
    slots: torch.Tensor
    in_rings: bool
    window_rows: int
    routed: torch.Tensor

    def entry_plan(self, ratio: int) -> EntryPlan:
        """Return the entries of a ratio that the step may complete. Its shape depends only on the token counts."""
        entries = self.entries[ratio]
        return EntryPlan(entries.groups, entries.cells, entries.rotation, self.positions)
