"""`dsv4 convert` from the types of published GGUF files, with the loss per tensor, and metadata with keys missing."""

import json
from dataclasses import replace

import pytest
import torch

from dsv4cli.engine.checkpoint.gguf.model import recognise_gguf
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.errors import UnsupportedCheckpoint
from dsv4cli.kernels.ggml.types import TYPES
from tests.support.conversions import convert, official_values, run, stored
from tests.support.gguf_models import DS4, LLAMA, MIXES, UNSLOTH, write_nano
from tests.support.slow import slow_except

# keys that community files of the first months lack
LACKED = (
    "vocab_size", "attention.output_lora_rank", "attention.output_group_count", "hash_layer_count",
    "hyper_connection.count", "hyper_connection.sinkhorn_iterations", "hyper_connection.epsilon",
    "attention.compress_rope_freq_base", "attention.compress_ratios",
)  # fmt: skip


def forget(metadata):
    for key in LACKED:
        del metadata[f"deepseek4.{key}"]
    # a number instead of a list, as some converters write it, and the signed numbers of others
    metadata["deepseek4.swiglu_clamp_exp"] = metadata["deepseek4.swiglu_clamp_exp"][0]
    del metadata["deepseek4.swiglu_clamp_shexp"], metadata["dsv4.release"]


@pytest.mark.parametrize("mix", slow_except(["unsloth"], MIXES))
def test_values_are_rounded_to_bf16_once_and_the_loss_is_said_before(tmp_path, mix):
    path, values = write_nano(tmp_path / "in", MIXES[mix], parts=3 if mix == "unsloth" else 1)
    plan = json.loads(convert(path, tmp_path / "out", "--to", "bf16", "--dry-run", "--json"))
    code, _, err = run("convert", path, tmp_path / "out", "--to", "bf16", "--verify", "full")
    assert code == 0, err
    assert "--to bf16 rounds the values of" in err
    found = official_values(stored(tmp_path / "out"))
    assert found.keys() == values.keys()
    for name, value in values.items():
        close = value.float().bfloat16() if name.endswith(".weight") else value
        assert torch.equal(found[name].double(), close.double()), name
    matrix_of = {spec.name: spec.matrix for spec in recognise_gguf(path).specs.values()}
    rounded = {name for name, value in values.items() if not torch.equal(found[name].double(), value.double())}
    assert {matrix_of[name] for name in rounded} >= plan["rounded"].keys()
    # the errors are measured in the first 128 rows
    assert all(0 < error < 2**-8 for error in plan["rounded"].values())
    assert len(plan["rounded"]) > 30


@pytest.mark.slow  # another target of the same decoded values
def test_an_official_checkpoint_of_two_bit_experts(tmp_path):
    path, values = write_nano(tmp_path / "in", DS4)
    code, _, err = run("convert", path, tmp_path / "out", "--to", "official", "--verify", "full")
    assert code == 0, err
    assert "--to official rounds the values of" in err
    found = official_values(stored(tmp_path / "out"))
    expert = "layers.1.ffn.experts.3.w1.weight"
    error = (found[expert] - values[expert]).norm() / values[expert].norm()
    # nearest FP4 values of what the file stores
    assert 0.01 < error < 0.12
    assert torch.equal(found["norm.weight"], values["norm.weight"])


@pytest.mark.slow
def test_back_to_gguf(tmp_path):
    path, _ = write_nano(tmp_path / "in", UNSLOTH)
    convert(path, tmp_path / "out", "--to", "gguf", "--verify", "full")
    identity = recognise_gguf(tmp_path / "out")
    assert identity.assumptions == ()
    kinds = {info.dtype for info in identity.checkpoint.tensors.values()}
    assert kinds == {"MXFP4", "Q8_0", "F32", "I32", "BF16"}
    _, out, _ = run("inspect", path, "--diff", tmp_path / "out", "--json")
    diff = json.loads(out)["diff"]
    # MXFP4 stays as it is
    assert diff["counts"]["unreadable"] == 0


def test_keys_that_are_missing_follow_from_the_tensors_or_are_assumed_and_named(tmp_path):
    whole, _ = write_nano(tmp_path / "whole", LLAMA)
    path, _ = write_nano(tmp_path / "in", LLAMA, change=forget)
    found, expected = recognise_gguf(path), recognise_gguf(whole)
    assert replace(found.config, release=expected.config.release) == expected.config
    notes = "\n".join(found.assumptions)
    assert "deepseek4.attention.compress_ratios is missing; by the tensors it is 0 4 128 4" in notes
    assert "deepseek4.hyper_connection.sinkhorn_iterations is missing; it is assumed to be 20, as in every" in notes
    for key in LACKED[1:]:
        assert f"deepseek4.{key}" in notes
    _, out, _ = run("inspect", path)
    assert "hyper_connection.sinkhorn_iterations is missing" in out
    _, _, err = run("convert", path, tmp_path / "out", "--to", "bf16", "--dry-run")
    assert "hyper_connection.sinkhorn_iterations is missing" in err


def test_what_neither_tensors_nor_releases_say_is_still_refused(tmp_path):
    path, _ = write_nano(tmp_path, LLAMA, change=lambda metadata: metadata.pop("deepseek4.expert_used_count"))
    code, _, err = run("convert", path, tmp_path / "out", "--to", "bf16")
    assert code == 1
    assert "lacks the key deepseek4.expert_used_count" in err


def test_a_pruned_model_may_state_the_original_number_of_experts(tmp_path):
    path, _ = write_nano(tmp_path, LLAMA, change=lambda metadata: metadata.update({"deepseek4.expert_count": 256}))
    found = recognise_gguf(path)
    assert found.config.n_routed_experts == 8
    assert found.assumptions == ("deepseek4.expert_count is 256; by the tensors it is 8",)


def test_a_drafter_is_left_out_with_a_line(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    raw = path.read_bytes().replace(b"blk.3.attn_norm.weight", b"blk.3.nextn.enorm.wei\0"[:22])
    path.write_bytes(raw.replace(b"blk.3.nextn.enorm.wei\0", b"blk.3.nextn.enorm.weix"))
    found = recognise_gguf(path)
    assert found.config.num_hidden_layers == 3
    assert not any(name.startswith("blk.3.") for name in found.checkpoint.tensors)
    assert "its drafter (34 tensors) is not used: attn_norm.weight is missing" in found.assumptions[-1]


def test_a_block_with_a_damaged_scale_is_refused_by_name(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    info = recognise_gguf(path).checkpoint.tensors["blk.2.ffn_down_exps.weight"]
    with path.open("r+b") as file:
        # d of the second row of expert 1
        file.seek(info.begin + (256 + 1) * 84 + 80)
        file.write(b"\x00\x7e")
    code, _, err = run("convert", path, tmp_path / "out", "--to", "bf16")
    assert code == 1
    assert "blk.2.ffn_down_exps.weight (Q2_K) has a scale that is NaN or infinite: expert 1, row 1, block 0" in err
    code, out, _ = run("inspect", path, "--values", "full")
    assert code == 3
    assert (
        "blk.2.ffn_down_exps.weight (Q2_K) has a scale that is NaN or infinite: expert 1, row 1, block 0"
        in " ".join(out.split())
    )


@pytest.mark.slow  # tests/engine/inspection/test_diff.py compares stored types
def test_differences_are_found_between_types(tmp_path):
    path, values = write_nano(tmp_path / "in", UNSLOTH, parts=3)
    convert(path, tmp_path / "out", "--to", "bf16", "--verify", "off")
    _, out, _ = run("inspect", path, "--diff", tmp_path / "out", "--json")
    counts = json.loads(out)["diff"]["counts"]
    assert counts["unreadable"] == 0
    assert counts["different"] + counts["identical"] + counts["equal"] == len(values)


def test_a_type_without_a_decoder_is_refused_by_name(tmp_path):
    path, _ = write_nano(tmp_path, DS4)
    content, name = bytearray(path.read_bytes()), b"blk.2.ffn_gate_exps.weight"
    # behind name, number of dimensions and three dimensions
    place = content.index(name) + len(name) + 4 + 3 * 8
    # its blocks have the size of IQ2_XXS
    content[place : place + 4] = TYPES["TQ2_0"].number.to_bytes(4, "little")
    path.write_bytes(content)
    code, _, err = run("convert", path, tmp_path / "back", "--to", "official")
    assert code == 4
    assert "blk.2.ffn_gate_exps.weight is TQ2_0, which dsv4 does not decode" in err
    with pytest.raises(UnsupportedCheckpoint, match="is TQ2_0, which dsv4 does not decode"):
        _ = FolderSource("test", path).identity
    code, out, _ = run("inspect", path)
    assert code == 3
    assert "blk.2.ffn_gate_exps.weight is TQ2_0, which dsv4 does not decode" in " ".join(out.split())
