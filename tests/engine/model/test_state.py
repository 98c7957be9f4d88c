"""What a layer remembers between steps."""

import torch

from dsv4cli.engine.model.state import CompressorState, Pool, Ring
from dsv4cli.kernels.compressor import State


def test_a_state_keeps_every_tensor_of_a_step_new_scales_too():
    rings = [Ring(torch.zeros(2, 4, 64), empty) for empty in (0.0, float("-inf"))]
    entries, scale = Pool(torch.zeros(8, 32, dtype=torch.int8), 4), Pool(torch.zeros(8, 2, dtype=torch.uint8), 4)
    kept = CompressorState(*rings, entries, scale)
    after = State(
        torch.ones(2, 4, 64),
        torch.ones(2, 4, 64),
        torch.ones(8, 32, dtype=torch.int8),
        torch.full((8, 2), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    )
    kept.keep(after)
    found = kept.tensors()
    for name in ("kv", "score", "entries"):
        assert torch.equal(getattr(found, name), getattr(after, name))
    assert scale.data.dtype == torch.uint8
    assert scale.data.unique().tolist() == [127]


def test_a_state_without_scales_has_none_after_a_step():
    rings = [Ring(torch.zeros(1, 4, 8), 0.0) for _ in range(2)]
    kept = CompressorState(*rings, Pool(torch.zeros(4, 8), 4))
    kept.keep(State(torch.ones(1, 4, 8), torch.ones(1, 4, 8), torch.ones(4, 8)))
    assert kept.tensors().scale is None
