"""Pooling of the tokens of a group into one compressed entry. Source: official model.py (`Compressor`)."""

import torch

from dsv4cli.kernels.compressor import ref


def pool(kv: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """sum over tokens of softmax(score) * kv, each channel with its own softmax.

    kv, score: fp32 [G, R, D], R the tokens that a group pools; rows of absent tokens have kv 0 and score -inf, at least
    one row of each channel is finite. Returns fp32 [G, D].
    """
    return ref.pool(kv, score)
