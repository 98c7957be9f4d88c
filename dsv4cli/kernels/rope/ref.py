"""Rotary position embedding in plain PyTorch."""

import torch


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    width = 2 * rotation.shape[-1]
    kept, turned = x.split((x.shape[-1] - width, width), -1)
    pairs = torch.view_as_complex(turned.float().contiguous().view(*x.shape[:-1], width // 2, 2))
    turn = rotation if x.dim() == 2 else rotation.unsqueeze(1)  # [T, R] or [T, 1, R]
    rotated = torch.view_as_real(pairs * turn).view(turned.shape).to(x.dtype)
    return torch.cat((kept, rotated), -1)
