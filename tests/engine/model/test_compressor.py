"""What the layers store for later steps: every key and every compressed entry is rounded as in the official code."""

import torch

from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.batch_builder import make_batch
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.kernels.qk_norm_rope.ref import rounded
from tests.support.shared_models import shared_model

# completes an entry of the layers of ratio 128
TOKENS = 128


def test_keys_and_entries_are_stored_in_fp8_steps():
    """Rounding them again changes nothing. One entry among 128 keys moves the logits too little to show it."""
    model = shared_model("random:tiny")
    config = model.config
    cache = Cache(config, Numerics.reference(), slots=1)
    sequence = cache.allocate()
    with torch.no_grad():
        model(make_batch(cache, [(sequence, list(range(TOKENS)))]), cache.layers)
    checked = set()
    for layer, ratio in zip(cache.layers[: config.num_hidden_layers], config.layer_ratios, strict=True):
        stored = [layer.window.data[sequence.slot]]
        if layer.compressed is not None:
            stored.append(layer.compressed.entries.data)
        for rows in stored:
            assert rows.any()
            assert torch.equal(rows, rounded(rows, config.qk_rope_head_dim)), f"ratio {ratio}"
        checked.add(ratio)
    assert checked == {0, 4, 128}
