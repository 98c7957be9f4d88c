"""RMS norms in plain PyTorch."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (weight.float() * values).to(x.dtype)


def head_norm(q: torch.Tensor, eps: float) -> torch.Tensor:
    # each operation in fp32, then one rounding: torch's own bf16 rsqrt rounds twice on short tensors (CPU)
    square = q.float().square().to(q.dtype)
    mean = square.float().mean(-1, keepdim=True).to(q.dtype)
    inverse = torch.rsqrt((mean.float() + eps).to(q.dtype).float()).to(q.dtype)
    return (q.float() * inverse.float()).to(q.dtype)
