"""The whole model without simulated rounding against transformers' DeepseekV4ForCausalLM, for every way of chunking."""

from functools import cache

import pytest
import torch

from dsv4cli.engine.model.transformer import Transformer
from tests.support.oracle import (
    TOKENS,
    TOLERANCE,
    distance,
    engine_model,
    logits_in_chunks,
    random_ids,
    transformers_logits,
)

ONE_PREFILL = [TOKENS]
UNEVEN = [7, 1, 33, 130, 2, 64, 3, 60]


@cache
def recorded(seed: int) -> tuple[Transformer, list[int], torch.Tensor]:
    """A model, a text and transformers' logits of one forward pass over it."""
    model, ids = engine_model(seed), random_ids(seed)
    return model, ids, transformers_logits(model, ids)


@pytest.mark.parametrize(
    ("seed", "chunks"),
    [
        pytest.param(0, ONE_PREFILL, id="one prefill, seed 0"),
        pytest.param(1, ONE_PREFILL, id="one prefill, seed 1", marks=pytest.mark.slow),
        pytest.param(2, ONE_PREFILL, id="one prefill, seed 2", marks=pytest.mark.slow),
        pytest.param(0, UNEVEN, id="uneven chunks, seed 0"),
        pytest.param(1, UNEVEN, id="uneven chunks, seed 1", marks=pytest.mark.slow),
        pytest.param(0, [1] * TOKENS, id="token by token", marks=pytest.mark.slow),
        pytest.param(1, [131] + [1] * (TOKENS - 131), id="131, then token by token", marks=pytest.mark.slow),
    ],
)
def test_agrees_with_transformers(seed, chunks):
    model, ids, expected = recorded(seed)
    assert distance(logits_in_chunks(model, ids, chunks), expected) < TOLERANCE
