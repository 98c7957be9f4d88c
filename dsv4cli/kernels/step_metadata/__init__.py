"""Metadata of a step: positions, window rows, compressed entries and rotations, from a few numbers on the device.

Triton requires: int64 with consecutive columns, all values below 2 ** 31. It is one launch.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.step_metadata import ref
from dsv4cli.kernels.step_metadata.types import Chunks, Entries, Layout, StepMetadata

__all__ = ["Chunks", "Entries", "Layout", "StepMetadata", "step_metadata"]


def step_metadata(chunks: Chunks, layout: Layout, frequencies: dict[int, torch.Tensor]) -> StepMetadata:
    """Compute the metadata of a step's tokens, in sequence order, each sequence's tokens by position.

    frequencies: fp32 [R] per ratio, the same R for all; the rotation of a position is exp(i * angle), with angle =
    position * frequency rounded to fp32. Shapes depend only on the layout and the shapes of chunks; nothing
    synchronizes with the device.
    """
    return choose(chunks.slots, ref).step_metadata(chunks, layout, frequencies)
