"""RMS norms in plain PyTorch."""

import torch

from dsv4cli.kernels.scalars import scalar


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + scalar(eps))
    return (weight.float() * values).type_as(x)


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    # each operation in fp32, then one rounding: torch's bf16 rsqrt rounds twice for short tensors on a CPU
    values = q.float()
    square = values.square().type_as(q)
    mean = square.float().mean(-1, keepdim=True).type_as(q)
    inverse = torch.rsqrt((mean.float() + scalar(eps)).type_as(q).float()).type_as(q)
    return (values * inverse.float()).type_as(q)
