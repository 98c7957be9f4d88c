"""Pooling in plain PyTorch."""

import torch


def pool(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    return (score.softmax(1) * kv).sum(1)
