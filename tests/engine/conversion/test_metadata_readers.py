"""Who reads the files beside the weights: dsv4 itself in every case, transformers where it loads the target."""

import json
from dataclasses import replace

import pytest

from dsv4cli.engine.config.dialects import translate_inference
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config, read_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.metadata import metadata_files
from dsv4cli.engine.conversion.selection import LayerSelection, select
from dsv4cli.engine.conversion.target import FORMATS
from tests.support.damage import GOLDEN
from tests.support.metadata import CONFIG, PARTIAL, ROOT, TINY, saved, with_inference
from tests.support.slow import slow_rows


@pytest.mark.parametrize("name", ["flash", "pro", "flash-0731", "tiny"])
def test_transformers_reads_ours_as_the_official_file(tmp_path, name):
    from transformers import AutoConfig

    release = {"architectures": ["DeepseekV4ForCausalLM"], "topk_method": "noaux_tc", "torch_dtype": "bfloat16"}
    release |= {"quantization_config": ROOT["quantization_config"], "expert_dtype": "fp4", "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(PRESETS[name] | release))
    official = AutoConfig.from_pretrained(tmp_path)
    config = parse_config(PRESETS[name], name)
    files = metadata_files(tmp_path, config, FORMATS["transformers"], "transformers")
    ours = AutoConfig.from_pretrained(saved(tmp_path / "out", files))
    first, second = official.to_dict(), ours.to_dict()
    differ = {key for key in first.keys() | second.keys() if first.get(key) != second.get(key)}
    assert differ == {"_name_or_path", "expert_dtype", "quantization_config", "dsv4_release"}
    # and writes the very keys that are there already
    official.save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    values = json.loads(files["config.json"])
    keys = {"layer_types", "mlp_layer_types", "compress_rates", "rope_parameters", "partial_rotary_factor", "dtype"}
    assert {key: values[key] for key in keys} == {key: theirs[key] for key in keys}


# compressed-tensors has a reader of its own: see checkpoint/test_packed.py
@pytest.mark.parametrize("target", [target for target in FORMATS if target != "compressed-tensors"])
@pytest.mark.parametrize(
    "name",
    [
        "tiny-flash",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("flash-0731", "tiny-pro", "flash", "pro")),
    ],
)
def test_every_file_is_read_back_to_the_same_model(tmp_path, name, target):
    source = GOLDEN / name if name.startswith("tiny") else with_inference(tmp_path / "source")
    whole = read_config(source) if name.startswith("tiny") else parse_config(PRESETS[name], name)
    last = whole.num_hidden_layers
    cuts = [
        LayerSelection(),
        LayerSelection(drafter=False),
        LayerSelection(range(3), False),
        LayerSelection(range(last - 3, last)),
    ]
    for number, selection in enumerate(cuts):
        config, _ = select(whole, selection)
        for formats in (FORMATS[target], *PARTIAL):
            files = metadata_files(source, config, formats, target)
            out = saved(tmp_path / f"{number}-{formats.linear}-{formats.experts}", files)
            assert read_config(out) == config
            assert parse_config(json.loads(files["config.json"]), "root") == config
            if "inference/config.json" in files:
                values = json.loads(files["inference/config.json"])
                # the official script takes no key that it does not know
                told = config if config.drafter != "none" else replace(config, release=None)
                assert parse_config(translate_inference(values), "inference") == told


@pytest.mark.parametrize("target", ["official", "bf16", "fp8", "mp"])
def test_the_engine_reads_what_is_written_in_official_names(tmp_path, target):
    files = metadata_files(with_inference(tmp_path / "source"), CONFIG, FORMATS[target], target)
    assert read_config(saved(tmp_path / "out", files)) == CONFIG


@pytest.mark.parametrize(
    ("formats", "kept", "count"),
    [
        *slow_rows((Formats(), "", 0), (Formats(wo_a="bf16"), "o_a_proj", 5)),
        (Formats("bf16", "fp4"), "self_attn.|shared_experts.", 5 * 8 + 2),
        *slow_rows((Formats("fp8", "nvfp4"), "", 0)),
    ],
    ids=["official", "mp", "attention-bf16", "nvfp4"],
)
def test_transformers_leaves_alone_what_is_not_quantised(tmp_path, formats, kept, count):
    """On the meta device: which modules its FP8 quantiser replaces, given our quantization_config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.quantizers.auto import AutoQuantizationConfig
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    config = AutoConfig.from_pretrained(saved(tmp_path, metadata_files(TINY, CONFIG, formats, "official")))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    quantiser = FineGrainedFP8HfQuantizer(
        AutoQuantizationConfig.from_dict(config.quantization_config), pre_quantized=True
    )
    quantiser._process_model_before_weight_loading(model)
    replaced = {name for name, module in model.named_modules() if type(module).__name__.startswith("FP8")}
    # 5 layers: wq_a, wq_b, wkv, wo_a, wo_b, three shared and the routed experts, 2 layers with an indexer
    assert len(replaced) == 5 * 9 + 2 - count
    assert not any(part in name for part in kept.split("|") if part for name in replaced)
    assert "lm_head" not in replaced
