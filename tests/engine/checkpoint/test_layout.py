"""The table of tensors against the published counts and byte totals of the releases."""

from collections import Counter
from functools import cache

import pytest

from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.checkpoint.sizes import Sizes, measure
from dsv4cli.engine.config.presets import FLASH_0731, PRESETS, PRO
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from tests.support.slow import slow_rows

PRO_0813 = PRO | {
    "compress_ratios": [*PRO["compress_ratios"], 0, 0],
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [58, 59, 60],
    "dspark_markov_rank": 512,
}
MODELS = {"flash": PRESETS["flash"], "pro": PRO, "flash-0731": FLASH_0731, "pro-0813": PRO_0813}
DTYPES = ("BF16", "F32", "F8_E4M3", "F8_E8M0", "I8", "I64")


@cache
def table(name: str) -> dict[str, TensorSpec]:
    return expected_tensors(parse_config(MODELS[name], name), Formats())


@cache
def sizes(name: str) -> Sizes:
    return measure(parse_config(MODELS[name], name), table(name).values())


@pytest.mark.parametrize(
    ("name", "tensors", "census", "under_mtp"),
    [
        ("flash", 69187, (433, 417, 375, 34167, 33792, 3), [1575]),
        *slow_rows(("pro", 145116, (619, 590, 528, 71952, 71424, 3), [2343])),
        *slow_rows(("flash-0731", 72317, (445, 433, 390, 35718, 35328, 3), [1568, 1565, 1572])),
        pytest.param("pro-0813", 149782, (631, 606, 543, 74271, 73728, 3), [2336, 2333, 2340], marks=pytest.mark.slow),
    ],
)
def test_tensors_are_those_of_the_release(name, tensors, census, under_mtp):
    specs = table(name)
    assert len(specs) == tensors
    assert Counter(spec.dtype for spec in specs.values()) == dict(zip(DTYPES, census, strict=True))
    stages = Counter(key.split(".")[1] for key in specs if key.startswith("mtp."))
    assert [stages[str(stage)] for stage in range(len(under_mtp))] == under_mtp
    assert sum(key.endswith("tid2eid") for key in specs) == 3


@pytest.mark.parametrize(
    ("name", "nbytes", "main", "parameters"),
    [
        ("flash", 159_609_485_896, 284_332_240_471, 290_942_289_362),
        *slow_rows(("pro", 864_704_792_696, 1_572_997_201_763, 1_598_837_347_742)),
        *slow_rows(("flash-0731", 166_878_536_440, 284_332_240_471, 304_178_091_454)),
        pytest.param("pro-0813", 892_727_580_904, 1_572_997_201_763, 1_650_495_609_866, marks=pytest.mark.slow),
    ],
)
def test_bytes_and_parameters_are_those_of_the_release(name, nbytes, main, parameters):
    measured = sizes(name)
    assert (measured.nbytes, measured.main, measured.parameters) == (nbytes, main, parameters)
    assert sum(measured.by_family.values()) == sum(measured.by_dtype.values()) == nbytes


@pytest.mark.parametrize(
    ("name", "active", "without_embedding"),
    [("flash", 13.80, 13.27), *slow_rows(("pro", 49.78, 48.85), ("flash-0731", 13.80, 13.27))],
)
def test_active_parameters_are_those_published(name, active, without_embedding):
    measured = sizes(name)
    assert round(measured.active / 1e9, 2) == active
    assert round(measured.active_without_embedding / 1e9, 2) == without_embedding


def test_one_expert_has_the_published_size():
    specs = [spec for key, spec in table("flash").items() if key.startswith("layers.7.ffn.experts.9.")]
    assert sum(spec.shape[0] * spec.shape[1] for spec in specs) == 13_369_344


@pytest.mark.parametrize(
    ("key", "dtype", "shape", "shard"),
    [
        ("embed.weight", "BF16", (129280, 4096), None),
        ("head.weight", "BF16", (129280, 4096), 0),
        ("norm.weight", "BF16", (4096,), None),
        ("hc_head_fn", "F32", (4, 16384), None),
        ("layers.0.attn.attn_sink", "F32", (64,), 0),
        ("layers.0.attn.wq_a.weight", "F8_E4M3", (1024, 4096), None),
        ("layers.0.attn.wq_b.weight", "F8_E4M3", (32768, 1024), 0),
        ("layers.0.attn.wq_b.scale", "F8_E8M0", (256, 8), 0),
        ("layers.0.attn.wkv.weight", "F8_E4M3", (512, 4096), None),
        ("layers.0.attn.wo_a.weight", "F8_E4M3", (8192, 4096), 0),
        ("layers.0.attn.wo_b.weight", "F8_E4M3", (4096, 8192), 1),
        ("layers.0.attn.wo_b.scale", "F8_E8M0", (32, 64), 1),
        ("layers.2.attn.compressor.ape", "F32", (4, 1024), None),
        ("layers.3.attn.compressor.ape", "F32", (128, 512), None),
        ("layers.2.attn.compressor.wkv.weight", "BF16", (1024, 4096), None),
        ("layers.2.attn.indexer.wq_b.weight", "F8_E4M3", (8192, 1024), None),
        ("layers.2.attn.indexer.weights_proj.weight", "BF16", (64, 4096), None),
        ("layers.2.attn.indexer.compressor.ape", "F32", (4, 256), None),
        ("layers.2.ffn.gate.tid2eid", "I64", (129280, 6), None),
        ("layers.3.ffn.gate.bias", "F32", (256,), None),
        ("layers.3.ffn.experts.255.w1.weight", "I8", (2048, 2048), 0),
        ("layers.3.ffn.experts.255.w1.scale", "F8_E8M0", (2048, 128), 0),
        ("layers.3.ffn.experts.255.w2.weight", "I8", (4096, 1024), 1),
        ("layers.3.ffn.experts.255.w2.scale", "F8_E8M0", (4096, 64), 1),
        ("layers.3.ffn.shared_experts.w2.weight", "F8_E4M3", (4096, 2048), 1),
        ("layers.42.hc_attn_fn", "F32", (24, 16384), None),
        ("mtp.0.e_proj.weight", "F8_E4M3", (4096, 4096), None),
    ],
)
def test_a_tensor_and_the_dimension_that_ranks_cut(key, dtype, shape, shard):
    spec = table("flash")[key]
    assert (spec.dtype, spec.shape, spec.shard) == (dtype, shape, shard)


def test_the_dspark_stages_differ():
    specs = table("flash-0731")
    assert specs["mtp.0.main_proj.weight"].shape == (4096, 12288)
    assert specs["mtp.2.markov_head.markov_w1.weight"].shape == (129280, 256)
    assert specs["mtp.2.confidence_head.proj.weight"].shape == (1, 4352)
    assert not {"mtp.0.e_proj.weight", "mtp.1.main_proj.weight", "mtp.1.norm.weight"} & specs.keys()


def test_the_rows_of_a_stacked_parameter_are_the_experts():
    specs = [spec for spec in table("flash").values() if spec.parameter == "layers.5.ffn.experts.w3.weight"]
    assert [spec.expert for spec in specs] == list(range(256))


@pytest.mark.parametrize("name", ["bf16", "f32"])
def test_formats_without_scales(name):
    config = parse_config(PRESETS["tiny"], "tiny")
    specs = expected_tensors(config, Formats(linear=name, experts=name, dense=name))
    assert not any(spec.is_scale for spec in specs.values())
    stored = expected_tensors(config, Formats())
    assert measure(config, specs.values()).parameters == measure(config, stored.values()).parameters
