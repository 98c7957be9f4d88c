"""Pooling against a softmax written out in pure Python, channel by channel."""

import math

import pytest
import torch

from dsv4cli.kernels.compressor import pool

NEVER = float("-inf")


def slow_pool(kv: list[float], score: list[float]) -> float:
    top = max(score)
    shares = [math.exp(value - top) for value in score]
    return sum(share * value for share, value in zip(shares, kv, strict=True)) / sum(shares)


# groups, tokens of a group, channels
@pytest.mark.parametrize("shape", [(0, 8, 16), (1, 8, 1), (3, 8, 17), (2, 128, 5), (1, 1, 3)], ids=str)
def test_pool(shape):
    kv, score = torch.randn(shape), torch.randn(shape) * 5
    entries = pool(kv, score)
    assert (entries.shape, entries.dtype) == ((shape[0], shape[2]), torch.float32)
    for group in range(shape[0]):
        for channel in range(shape[2]):
            expected = slow_pool(kv[group, :, channel].tolist(), score[group, :, channel].tolist())
            # a softmax and a sum of up to 128 numbers around 1, in fp32
            assert entries[group, channel].item() == pytest.approx(expected, rel=0, abs=2e-6)


def test_absent_tokens_do_not_count():
    # the first group with overlap: nothing before it
    kv, score = torch.randn(1, 8, 5), torch.randn(1, 8, 5)
    kv[:, :4], score[:, :4] = 0, NEVER
    # a sum of eight in another order
    torch.testing.assert_close(pool(kv, score), pool(kv[:, 4:], score[:, 4:]), rtol=1e-6, atol=1e-7)


def test_each_channel_has_its_own_softmax():
    kv = torch.tensor([[[1.0, 1.0], [2.0, 2.0]]])
    score = torch.tensor([[[0.0, NEVER], [NEVER, 0.0]]])
    assert pool(kv, score).tolist() == [[1.0, 2.0]]


def test_large_scores_do_not_overflow():
    assert pool(torch.tensor([[[1.0], [3.0]]]), torch.tensor([[[1e30], [1e30]]])).tolist() == [[2.0]]
