"""Rotary position embedding in plain PyTorch."""

import torch


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    width = 2 * rotation.shape[-1]
    pairs = torch.view_as_complex(x[..., -width:].float().unflatten(-1, (-1, 2)).contiguous())
    turn = rotation if x.dim() == 2 else rotation[:, None]  # [T, R] or [T, 1, R]
    rotated = torch.view_as_real(pairs * turn).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-width], rotated), -1)
