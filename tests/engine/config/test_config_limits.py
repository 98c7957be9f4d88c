"""What a configuration may say: what would crash or hang later is refused at the door, what is legal is taken."""

import math
import re
from typing import Any

import pytest
import torch

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.checks import check_blocks
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import FLASH, FLASH_0731, TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.rope import frequencies
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.engine.weights.load import build_random
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint
from tests.support import damage
from tests.support.program import save_tokenizer
from tests.support.small_model import drawn
from tests.support.synthetic import SMALL, write_checkpoint

DSPARK = {key: value for key, value in FLASH_0731.items() if key.startswith("dspark_") or key == "compress_ratios"}


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_scaling": FLASH["rope_scaling"] | changes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress_rope_theta": 0}, "compress_rope_theta is 0, which is not between 2 and"),
        ({"compress_rope_theta": 1}, "compress_rope_theta is 1, "),
        ({"rope_theta": 0}, "rope_theta is 0, "),
        (rope(beta_fast=0), r"rope_scaling\.beta_fast is 0, .* YaRN counts turns with it"),
        (rope(beta_slow=0), r"rope_scaling\.beta_slow is 0, "),
        (rope(beta_slow=5e-324), r"rope_scaling\.beta_slow is 5e-324, "),
        (rope(factor=0), r"rope_scaling\.factor is 0, .* divides"),
        (rope(factor=0.5), r"rope_scaling\.factor is 0\.5, "),
        (rope(original_max_position_embeddings=-1), r"rope_scaling\.original_max_position_embeddings is -1, "),
        (rope(original_max_position_embeddings=0.5), r"rope_scaling\.original_max_position_embeddings is 0\.5, "),
        (rope(attention_factor=1.277), r"rope_scaling\.attention_factor is 1\.277; DeepSeek-V4 has 1\.0"),
        (rope(truncate=False), r"rope_scaling\.truncate is False; DeepSeek-V4 has True"),
        (rope(mscale=0.707), r"rope_scaling\.mscale is 0\.707; "),
        ({"sliding_window": 10**9}, "sliding_window is 1000000000, which is not between 1 and 8,192: a step lists"),
        ({"hc_sinkhorn_iters": 10**8}, "hc_sinkhorn_iters is 100000000, which is not between 1 and 1,000"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor is 0, "),
        ({"rms_norm_eps": 2}, "rms_norm_eps is 2, "),
        ({"head_dim": 480}, "head_dim is 480 and qk_rope_head_dim 64: the 416 values .* blocks of 64"),
        ({"head_dim": 64}, "head_dim is 64 and qk_rope_head_dim 64: the 0 values"),
        ({"index_head_dim": 16, "qk_rope_head_dim": 0}, "qk_rope_head_dim is 0"),
        (
            {"index_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 520},
            "index_head_dim is 16: its rotation and rounding need a power of two from 32 on",
        ),
        ({"eos_token_id": 129280}, "eos_token_id is 129280, and the vocabulary of 129,280 tokens ends before it"),
        ({"eos_token_id": [1, 200000]}, "eos_token_id is 200000"),
        ({"eos_token_id": []}, r"eos_token_id is \[\]"),
        ({"eos_token_id": "1"}, "eos_token_id is '1'"),
        ({"eos_token_id": [None]}, "eos_token_id is None"),
        ({"bos_token_id": 129280}, "bos_token_id is 129280"),
        ({"expert_dtype": "int3"}, "expert_dtype is 'int3'; known values are"),
        ({"expert_dtype": ["fp4"]}, "expert_dtype is "),
        (DSPARK | {"dspark_noise_token_id": 129280}, "dspark_noise_token_id is 129280"),
        (DSPARK | {"dspark_target_layer_ids": [40, 40, 41]}, r"dspark_target_layer_ids is \[40, 40, 41\].*none twice"),
        (DSPARK | {"dspark_target_layer_ids": []}, r"dspark_target_layer_ids is \[\].*at least one"),
        (DSPARK | {"dspark_target_layer_ids": [True]}, r"dspark_target_layer_ids is \[True\]"),
        (DSPARK | {"dspark_block_size": 0}, "dspark_block_size is 0, which is not between 1 and 8"),
        (DSPARK | {"dspark_block_size": 9}, "dspark_block_size is 9, .* can be removed"),
        (DSPARK | {"dspark_markov_rank": 0}, "dspark_markov_rank is 0"),
    ],
)
def test_a_value_that_would_crash_or_hang_is_refused(changes, words):
    for parse in (parse_config, parse_config):
        with pytest.raises((CheckpointError, UnsupportedCheckpoint), match=r"^config\.json: .*" + words) as refused:
            parse(FLASH | changes, "config.json")
        assert refused.value.remedy


@pytest.mark.parametrize(
    "harmless",
    [
        {"eos_token_id": None},
        {"bos_token_id": None},
        {"eos_token_id": [1]},
        {"eos_token_id": [1, 1]},
        {"hc_eps": None},
        rope(attention_factor=1.0),
        rope(attention_factor=None),
        rope(truncate=True),
        rope(mscale=1.0, mscale_all_dim=1),
        rope(mscale=0),
        {"temperature": 0.6, "top_p": 0.95, "do_sample": True, "max_length": 20},
        {"return_dict": True, "is_decoder": False, "is_encoder_decoder": False, "output_attentions": False},
        {"id2label": {"0": "LABEL_0"}, "torchscript": False, "tokenizer_class": None, "pruned_heads": {}},
    ],
    ids=lambda changes: ",".join(changes),
)
def test_what_changes_no_number_is_accepted(harmless):
    for parse in (parse_config, parse_config):
        assert parse(FLASH | harmless, "config.json") == parse_config(FLASH, "flash")


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 1},
        {"sliding_window": 8192},
        {"hc_sinkhorn_iters": 1},
        {"hc_sinkhorn_iters": 1000},
        {"rope_theta": 2.0, "compress_rope_theta": 2},
        {"rms_norm_eps": 1e-20},
        {"rms_norm_eps": 0},
        {"vocab_size": 2},
        {"expert_dtype": "bf16"},
        {"expert_dtype": None},
        DSPARK | {"dspark_block_size": 8, "dspark_target_layer_ids": [0]},
    ],
    ids=str,
)
def test_the_last_legal_values_are_accepted(changes):
    assert isinstance(parse_config(FLASH | changes, "config.json"), ModelConfig)


def official_frequencies(dim: int, original: int, base: float, factor: float, fast: float, slow: float) -> list[float]:
    """official model.py, `precompute_freqs_cis`, line by line."""

    def correction_dim(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    freqs = 1.0 / (base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
    if original > 0:
        low, high = max(math.floor(correction_dim(fast)), 0), min(math.ceil(correction_dim(slow)), dim - 1)
        if low == high:
            high += 0.001
        ramp = torch.clamp((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
        smooth = 1 - ramp
        freqs = freqs / factor * (1 - smooth) + freqs * smooth
    return freqs.tolist()


@pytest.mark.parametrize(
    ("original", "fast", "slow"),
    [(65536, 32, 1), (0, 32, 1), (65536, 1, 32), (65536, 1, 4096), (65536, 4, 4), (1, 32, 1), (64, 32, 1), (7, 1, 1)],
)
def test_the_rope_table_is_the_official_one(original, fast, slow):
    changes = rope(original_max_position_embeddings=original, beta_fast=fast, beta_slow=slow)
    config = parse_config(FLASH | changes, "config.json")
    for ratio in (4, 128):
        expected = official_frequencies(64, original, 160000.0, 16.0, fast, slow)
        assert frequencies(config, ratio).tolist() == expected
    assert frequencies(config, 0).tolist() == official_frequencies(64, 0, 10000.0, 16.0, fast, slow)


@pytest.mark.parametrize(
    ("key", "size"),
    [("hidden_size", 320), ("moe_intermediate_size", 192), ("q_lora_rank", 96), ("o_groups * o_lora_rank", 96 * 2)],
)
def test_a_width_that_is_no_multiple_of_its_block_is_refused_where_inputs_are_rounded(key, size):
    change = {"o_lora_rank": 96} if "*" in key else {key: size}
    config = parse_config(TINY | change, "config.json")
    with pytest.raises(CheckpointError, match=rf"^here: {re.escape(key)} is {size}, .* in blocks of 128$"):
        check_blocks(config, "fp8", "fp4", "here")
    check_blocks(config, "bf16", "bf16", "here")


def test_a_folder_of_such_a_width_is_refused_before_loading(tmp_path):
    folder = write_checkpoint(tmp_path / "odd", SMALL | {"hidden_size": 192})
    with pytest.raises(CheckpointError, match="hidden_size is 192"):
        identify(folder)


def test_more_hash_layers_than_layers_are_all_layers():
    values = TINY | {"num_hidden_layers": 2, "compress_ratios": [0, 4], "num_nextn_predict_layers": 0}
    config = parse_config(values | {"num_hash_layers": 60}, "config.json")
    assert [config.is_hash_layer(layer) for layer in range(3)] == [True, True, False]
    types = {"mlp_layer_types": ["hash_moe"] * 2, "num_hash_layers": 60}
    assert parse_config(values | types, "config.json") == config
    model = build_random(config, Numerics.plain(), formats=Formats("f32", "f32", "f32"))
    assert all(block.ffn.gate.tid2eid is not None for block in model.layers)


def test_each_end_token_of_a_list_ends_an_answer(monkeypatch):
    config = parse_config(
        TINY | {"num_hidden_layers": 1, "num_hash_layers": 0, "compress_ratios": [0, 0]} | {"eos_token_id": [7, 9]},
        "config.json",
    )
    assert config.eos_token_ids == (7, 9)
    model = build_random(config, Numerics.plain(), formats=Formats("f32", "f32", "f32"))
    draws = iter([[3, 3, 3], [7, 3, 3], [9, 3], [1]])
    monkeypatch.setattr("dsv4cli.engine.runtime.leader_step.sample", lambda *_: torch.tensor(next(draws)))
    asked = [Request([5], Sampling(), Limits(max_tokens=4)) for _ in range(3)]
    ends = {number: (token.id, token.finish) for number, token in drawn(Engine.of(model, asked, "cpu"))}
    assert ends == {0: (7, "stop"), 1: (9, "stop"), 2: (1, "length")}


def test_the_tokenizer_writes_one_of_the_end_tokens(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    save_tokenizer(folder)
    damage.edit_config(folder, eos_token_id=[7, 1])
    assert open_dialogue(resolve_model(str(folder)), "off").config.eos_token_ids == (7, 1)
    damage.edit_config(folder, eos_token_id=[7, 8])
    with pytest.raises(CheckpointError, match=r"the end token is 1 in .*, but 7, 8 in config\.json"):
        open_dialogue(resolve_model(str(folder)), "off")
