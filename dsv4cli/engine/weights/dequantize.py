"""Dequantize a loaded model's weights once, so that steps on a CPU need not."""

import torch

from dsv4cli.engine.model.linear import MatrixParameters
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.kernels.stored_matrix import StoredMatrix


def dequantize_weights(model: Transformer) -> None:
    """Replace each weight of a model with its fp32 values, one weight at a time.

    Every conversion is exact, so results keep their bits. Scales stay: a linear with a scale rounds its input.
    """
    for module in model.modules():
        if isinstance(module, MatrixParameters):
            module.weight.data, module.block_type = _values(module.matrix), None
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype in (torch.bfloat16, torch.float16):
                parameter.data = parameter.data.float()


def _values(stored: StoredMatrix) -> torch.Tensor:
    """Return the fp32 values of a stored matrix or of several stacked, one matrix at a time to save memory."""
    weight = stored.weight.data
    if weight.dim() == 2:
        return stored.values().contiguous()
    first = stored.row(0).values()
    values = first.new_empty(len(weight), *first.shape)
    for number in range(len(weight)):
        values[number] = stored.row(number).values()
    return values
