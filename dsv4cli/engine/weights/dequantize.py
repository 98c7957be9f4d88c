"""Dequantize a loaded model's weights once, so that steps on a CPU need not."""

import torch
from torch import nn

from dsv4cli.engine.model.linear import MatrixParameters
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.kernels.block_scale import dequantise


def dequantize_weights(model: Transformer) -> None:
    """Replace each weight of a model with its fp32 values, one weight at a time.

    Every conversion is exact, so results keep their bits. Scales stay: a linear with a scale rounds its input.
    """
    for module in model.modules():
        if isinstance(module, MatrixParameters):
            module.weight.data = _values(module.weight.data, module.scale)
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()


def _values(weight: torch.Tensor, scale: nn.Parameter | None) -> torch.Tensor:
    """Return the fp32 values of a stored matrix or of several stacked, one matrix at a time to save memory."""
    if weight.dim() == 2:
        return dequantise(weight, scale).contiguous()
    first = dequantise(weight[0], None if scale is None else scale[0])
    values = first.new_empty(len(weight), *first.shape)
    for number, matrix in enumerate(weight):
        values[number] = dequantise(matrix, None if scale is None else scale[number])
    return values
