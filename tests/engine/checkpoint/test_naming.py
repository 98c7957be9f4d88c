"""Where tensors are stored: transformers' own parameter names, the parts of the official convert.py."""

import pytest
import torch

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.naming import (
    MpNaming,
    OfficialNaming,
    TransformersNaming,
    stored_table,
    transformers_name,
)
from dsv4cli.engine.config.presets import FLASH, PRO, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import UsageError

BF16 = Formats("bf16", "bf16", "bf16")
# all kinds of layers and both kinds of router
MODEL = parse_config(shortened(FLASH, 5, 8), "flash of five layers")


def test_the_stacked_tensors_are_the_parameters_of_transformers():
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

    config = DeepseekV4Config(
        vocab_size=MODEL.vocab_size,
        num_hidden_layers=5,
        n_routed_experts=8,
        num_hash_layers=3,
        compress_ratios=list(MODEL.layer_ratios),
    )
    with torch.device("meta"):
        model = DeepseekV4ForCausalLM(config)
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    specs = expected_tensors(MODEL, BF16)
    table = stored_table(TransformersNaming(MODEL), specs.values())
    ours = {name: spec.shape for name, spec in table.items() if not name.startswith("mtp.")}
    # rope tables and the like are no weights
    assert ours == {name: shape for name, shape in expected.items() if "rotary" not in name}
    assert {name for name in table if name.startswith("mtp.")} == {name for name in specs if name.startswith("mtp.")}


def test_each_value_of_a_stacked_tensor_has_one_owner():
    specs = [spec for spec in expected_tensors(MODEL, BF16).values() if spec.expert is not None]
    locations = {}
    for spec in specs:
        (location,) = TransformersNaming(MODEL).locations(spec)
        locations.setdefault(location.name, []).append((location.begin, spec.count, spec.name, location.shape))
    for name, parts in locations.items():
        at = 0
        for begin, count, _, _ in sorted(parts):
            assert (begin, name) == (at, name)
            at += count
        assert at == torch.Size(parts[0][3]).numel()
    first = next(parts for name, parts in locations.items() if name == "model.layers.0.mlp.experts.gate_up_proj")
    order = [part[2].split(".experts.")[1] for part in sorted(first)]
    assert order[:4] == ["0.w1.weight", "0.w3.weight", "1.w1.weight", "1.w3.weight"]


@pytest.mark.parametrize(
    ("official", "name"),
    [
        ("layers.2.attn.indexer.compressor.ape", "model.layers.2.self_attn.compressor.indexer.position_bias"),
        ("layers.2.attn.compressor.norm.weight", "model.layers.2.self_attn.compressor.kv_norm.weight"),
        ("layers.2.attn.indexer.compressor.norm.weight", "model.layers.2.self_attn.compressor.indexer.kv_norm.weight"),
        ("layers.3.ffn.gate.bias", "model.layers.3.mlp.gate.e_score_correction_bias"),
        ("hc_head_fn", "model.hc_head.hc_fn"),
        ("norm.weight", "model.norm.weight"),
    ],
)
def test_names_of_transformers(official, name):
    assert transformers_name(official) == name


def locations(name: str, ranks: int, model=MODEL):
    return MpNaming(ranks, model.n_routed_experts).locations(expected_tensors(model, Formats(wo_a="bf16"))[name])


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "dim"),
    [
        ("embed.weight", "BF16", (129280 // 4, 4096), 0),
        ("head.weight", "BF16", (129280 // 4, 4096), 0),
        ("layers.2.attn.wq_b.weight", "F8_E4M3", (8192, 1024), 0),
        ("layers.2.attn.wq_b.scale", "F8_E8M0", (64, 8), 0),
        ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (2048, 1024), 0),
        ("layers.2.attn.indexer.weights_proj.weight", "BF16", (16, 4096), 0),
        ("layers.2.attn.wo_a.weight", "BF16", (2048, 4096), 0),
        ("layers.2.attn.wo_b.weight", "F8_E4M3", (4096, 2048), 1),
        ("layers.2.attn.wo_b.scale", "F8_E8M0", (32, 16), 1),
        ("layers.2.attn.attn_sink", "F32", (16,), 0),
        ("layers.2.attn.wq_a.weight", "F8_E4M3", (1024, 4096), None),
        ("layers.2.attn.compressor.wkv.weight", "BF16", (1024, 4096), None),
        ("layers.2.ffn.gate.weight", "BF16", (8, 4096), None),
        ("layers.2.ffn.shared_experts.w1.weight", "F8_E4M3", (2048, 4096), None),
        ("mtp.0.e_proj.weight", "F8_E4M3", (4096, 4096), None),
    ],
)
def test_the_cuts_of_the_official_converter(name, dtype, shape, dim):
    found = locations(name, 4)
    assert [location.name for location in found] == [f"model{rank}-mp4/{name}" for rank in range(4)]
    assert {(location.dtype, location.shape) for location in found} == {(dtype, shape)}
    assert [location.cut and (location.cut.dim, location.cut.part) for location in found] == [
        None if dim is None else (dim, rank) for rank in range(4)
    ]


def test_a_rank_holds_a_range_of_whole_experts():
    ranks = [locations(f"layers.0.ffn.experts.{expert}.w2.weight", 4) for expert in range(8)]
    assert [found[0].name.split("/")[0] for found in ranks] == [f"model{expert // 2}-mp4" for expert in range(8)]
    # the header counts e2m1 codes, not bytes
    assert {(location.dtype, location.shape) for found in ranks for location in found} == {("F4", (4096, 2048))}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [("layers.0.ffn.experts.7.w1.weight", 3), ("embed.weight", 3), ("layers.0.attn.wo_b.weight", 128)],
)
def test_a_number_of_ranks_that_does_not_divide_is_refused(name, ranks):
    with pytest.raises(UsageError, match="cannot be split"):
        locations(name, ranks)


def test_official_names_are_the_table():
    specs = expected_tensors(parse_config(shortened(PRO, 2, 6), "pro"), Formats())
    table = stored_table(OfficialNaming(), specs.values())
    assert {name: (spec.dtype, spec.shape) for name, spec in table.items()} == {
        name: (spec.dtype, spec.shape) for name, spec in specs.items()
    }
