"""Where a step's tokens lie: positions, window rows, compressed entries and rotations, from few numbers on the device.

Triton: int64 with consecutive columns, all of it below 2 ** 31; one launch.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.step_metadata import ref
from dsv4cli.kernels.step_metadata.types import Chunks, Entries, Layout, StepMetadata

__all__ = ["Chunks", "Entries", "Layout", "StepMetadata", "step_metadata"]


def step_metadata(chunks: Chunks, layout: Layout, frequencies: dict[int, torch.Tensor]) -> StepMetadata:
    """Where a step's tokens lie, sequence after sequence, each one's tokens in order.

    frequencies: fp32 [R] of each ratio; the rotation of a position is exp(i * angle), position * frequency rounded to
    fp32, the same R for all. Shapes depend on the layout and on those of chunks only; nothing waits for the device.
    """
    return choose(chunks.slots, ref).step_metadata(chunks, layout, frequencies)
