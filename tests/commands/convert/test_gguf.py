"""`dsv4 convert --to gguf` and back: values by the gguf package, shards, kills, refusals, and llama.cpp itself."""

import json
import re
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dsv4cli import Model
from dsv4cli.engine.checkpoint.gguf.header import read_gguf
from dsv4cli.engine.conversion import plan, write
from dsv4cli.engine.conversion.gguf.encode import encode_matrix
from dsv4cli.engine.text.prompt import encode_messages
from dsv4cli.engine.text.tokenizer import Tokenizer
from tests.support import crashing, damage, questions
from tests.support.conversions import convert, differing, files, official_values, run, stored
from tests.support.slow import slow

NANO = Path("dsv4cli/nano")
FILE = "model-MXFP4.gguf"
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up"}
# official name behind `layers.N.` -> llama.cpp's behind `blk.N.`; written down a second time, from its source
RENAMED = {
    "embed.weight": "token_embd.weight", "head.weight": "output.weight", "norm.weight": "output_norm.weight",
    "hc_head_fn": "output_hc_fn.weight", "hc_head_base": "output_hc_base.weight",
    "hc_head_scale": "output_hc_scale.weight", "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight", "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight", "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight", "attn.wo_a.weight": "attn_output_a.weight",
    "attn.wo_b.weight": "attn_output_b.weight", "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight", "ffn.gate.weight": "ffn_gate_inp.weight",
    "attn.compressor.ape": "attn_compressor_ape.weight", "attn.compressor.wkv.weight": "attn_compressor_kv.weight",
    "attn.compressor.wgate.weight": "attn_compressor_gate.weight",
    "attn.compressor.norm.weight": "attn_compressor_norm.weight",
    "attn.indexer.compressor.ape": "indexer_compressor_ape.weight",
    "attn.indexer.compressor.wkv.weight": "indexer_compressor_kv.weight",
    "attn.indexer.compressor.wgate.weight": "indexer_compressor_gate.weight",
    "attn.indexer.compressor.norm.weight": "indexer_compressor_norm.weight",
    "ffn.gate.bias": "exp_probs_b.bias", "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
}  # fmt: skip


def theirs(name: str) -> str:
    """llama.cpp's name of a tensor that is no routed expert."""
    found = re.fullmatch(r"layers\.(\d+)\.(.*)", name)
    rest = found[2] if found else name
    if rest in RENAMED:
        new = RENAMED[rest]
    elif "shared_experts" in rest:
        new = f"ffn_{EXPERTS[rest.split('.')[2]]}_shexp.weight"
    else:
        new = rest if rest.endswith(".weight") else f"{rest}.weight"
    return f"blk.{found[1]}.{new}" if found else new


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """nano as GGUF: with its matrices in Q8_0, and exact in bf16."""
    folder = tmp_path_factory.mktemp("gguf")
    convert(NANO, folder / "q8", "--to", "gguf")
    convert(NANO, folder / "bf16", "--to", "gguf", "--attention", "bf16", "--verify", "full")
    return folder


@cache
def main_values():
    return {name: value for name, value in official_values(stored(NANO)).items() if not name.startswith("mtp.")}


@pytest.mark.parametrize("kind", ["q8", *slow("bf16")])
def test_the_gguf_package_reads_the_same_values(made, kind):
    gguf = pytest.importorskip("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(made / kind / FILE).tensors}
    decoded = {
        name: tensor.data
        if tensor.tensor_type.name == "I32"
        else gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for name, tensor in tensors.items()
    }
    used = set()
    for name, value in main_values().items():
        expert = re.fullmatch(r"layers\.(\d+)\.ffn\.experts\.(\d+)\.(w\d)\.weight", name)
        key = f"blk.{expert[1]}.ffn_{EXPERTS[expert[3]]}_exps.weight" if expert else theirs(name)
        found = decoded[key][int(expert[2])] if expert else decoded[key]
        used.add(key)
        assert found.shape == value.shape, name
        if tensors[key].tensor_type.name == "Q8_0":
            # half a step of the codes, and the rounding of the scale to 11 bits
            blocks = np.abs(value.numpy()).reshape(-1, 32).max(axis=1)
            error = np.abs(found - value.numpy()).reshape(-1, 32).max(axis=1)
            assert (error <= blocks * (0.5 / 127 + 2**-11)).all(), name
        else:
            np.testing.assert_array_equal(found, value.numpy(), err_msg=name)
    assert used == tensors.keys()
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert kinds["blk.1.ffn_gate_exps.weight"] == "MXFP4"
    assert kinds["blk.1.attn_q_a.weight"] == {"q8": "Q8_0", "bf16": "BF16"}[kind]
    assert {kinds[name] for name in kinds if len(tensors[name].shape) == 1} == {"F32"}
    assert kinds["blk.0.ffn_gate_tid2eid.weight"] == "I32"


def test_what_is_not_rounded_comes_back(made, tmp_path):
    convert(made / "bf16", tmp_path / "back", "--to", "official", "--verify", "full")
    assert differing(main_values(), official_values(stored(tmp_path / "back"))) == []
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (NANO / "tokenizer.json").read_bytes()


def test_one_file_alone_is_enough(made, tmp_path):
    (tmp_path / "model.gguf").write_bytes((made / "q8" / FILE).read_bytes())
    out = convert(tmp_path / "model.gguf", tmp_path / "back", "--to", "official")
    assert "tokenizer.json" in files(tmp_path / "back")
    values, found = main_values(), official_values(stored(tmp_path / "back"))
    experts = [name for name in values if ".experts." in name]
    assert differing({n: values[n] for n in experts}, {n: found[n] for n in experts}) == []
    assert "the others within 0.00" in out


@pytest.mark.slow
def test_what_comes_back_runs(made, tmp_path):
    convert(made / "q8" / FILE, tmp_path / "back", "--to", "official")
    with Model(str(tmp_path / "back")) as model:
        assert model.chat("What is 17 + 25?", temperature=0)["content"] == "17 + 25 = 42."


@pytest.mark.slow  # the words of a report
def test_the_report_says_that_the_drafter_is_left_out(tmp_path):
    out = convert(NANO, tmp_path / "out", "--to", "gguf", "--json")
    (note,) = json.loads(out.splitlines()[-1])["notes"]
    assert "the drafter is left out" in note
    _, _, err = run("convert", NANO, tmp_path / "out", "--to", "gguf", "--no-mtp", "--dry-run")
    assert "drafter" not in err


def test_what_q8_0_rounds_is_told_before_anything_is_written(tmp_path):
    lines = [json.loads(line) for line in convert(NANO, tmp_path / "out", "--to", "gguf", "--json").splitlines()]
    assert [line["event"] for line in lines][:2] == ["rounding", "file"]
    told, compared = lines[0]["tensors"], lines[-1]["verified"]
    assert not any(".experts." in name and "shared" not in name for name in told)
    assert list(told.values()) == sorted(told.values(), reverse=True)
    # half a step of 254, less where a block has small values; the comparison reads other rows than the first
    assert 0.001 < max(told.values()) < 0.01
    assert max(told.values()) == pytest.approx(max(compared["inexact"].values()), rel=0.2)


@pytest.mark.slow  # the package reads both files by default
def test_values_of_bf16_become_the_same_q8_0(made, tmp_path):
    gguf = pytest.importorskip("gguf")
    out = convert(made / "bf16", tmp_path, "--to", "gguf", "--json")
    assert 0.001 < max(json.loads(out.splitlines()[-1])["verified"]["inexact"].values()) < 0.01
    found, whole = (
        {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(folder / FILE).tensors}
        for folder in (tmp_path, made / "q8")
    )
    assert found == whole


def test_what_q8_0_rounds_of_bf16_is_no_difference(tmp_path):
    """Its values are read as fp32, which would hold those of bf16."""
    convert(NANO, tmp_path / "bf16", "--to", "bf16", "--layers", "0-0", "--no-mtp", "--verify", "off")
    assert "the others within 0.00" in convert(tmp_path / "bf16", tmp_path / "out", "--to", "gguf")


def test_what_bf16_holds_is_not_rounded(tmp_path):
    plan = json.loads(convert(NANO, tmp_path / "out", "--to", "gguf", "--attention", "bf16", "--json", "--dry-run"))
    assert plan["rounded"] == {}


def test_small_files_hold_the_same(made, tmp_path):
    gguf = pytest.importorskip("gguf")
    convert(NANO, tmp_path / "out", "--to", "gguf", "--max-shard-size", "2MB")
    names = sorted(path.name for path in (tmp_path / "out").glob("*.gguf"))
    assert len(names) > 4
    assert names == [f"model-MXFP4-{n:05}-of-{len(names):05}.gguf" for n in range(1, len(names) + 1)]
    whole = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(made / "q8" / FILE).tensors}
    for number, name in enumerate(names):
        reader = gguf.GGUFReader(tmp_path / "out" / name)
        assert reader.fields["split.no"].contents() == number
        assert reader.fields["split.no"].types == [gguf.GGUFValueType.UINT16]
        assert reader.fields["split.count"].contents() == len(names)
        assert reader.fields["split.tensors.count"].contents() == len(whole)
        assert len(reader.tensors) == 1 or sum(tensor.n_bytes for tensor in reader.tensors) <= 2_000_000
        for tensor in reader.tensors:
            whole_one = whole[tensor.name]
            assert tensor.data.tobytes() == whole_one
        assert ("deepseek4.block_count" in reader.fields) is (number == 0)
    assert {info.name for name in names for info in read_gguf(tmp_path / "out" / name).tensors} == whole.keys()
    code, out, _ = run("inspect", NANO, "--diff", tmp_path / "out", "--tensor", "layers.1.ffn.experts.0.w1", "--json")
    assert json.loads(out)["diff"]["counts"]["identical"] > 0, code


@pytest.mark.slow  # test_interrupted.py has the default case
def test_an_interrupted_job_goes_on(made, tmp_path, monkeypatch):
    monkeypatch.setattr(plan, "BATCH", crashing.BATCH)
    left = iter(range(60))

    def stop(matrix, kind, arrays):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return encode_matrix(matrix, kind, arrays)

    monkeypatch.setattr(write, "encode_matrix", stop)
    assert run("convert", NANO, tmp_path / "out", "--to", "gguf", "--workers", "1")[0] == 130
    monkeypatch.setattr(write, "encode_matrix", encode_matrix)
    convert(NANO, tmp_path / "out", "--to", "gguf")
    assert files(tmp_path / "out") == files(made / "q8")


@pytest.mark.slow
def test_a_kill_at_any_point_changes_nothing(tmp_path):
    options = ("--to", "gguf", "--max-shard-size", "2MB", "--verify", "off")
    arguments = (NANO, tmp_path / "whole", *options)
    assert crashing.ended(crashing.started("", 0, arguments, tmp_path / "calls")) == 0
    count = len((tmp_path / "calls").read_text().split("\n"))
    for number in range(1, count, max(count // 20, 1)):
        output = tmp_path / str(number)
        assert crashing.ended(crashing.started("kill", number, (NANO, output, *options))) < 0
        assert crashing.ended(crashing.started("", 0, (NANO, output, *options))) == 0
        assert files(output) == files(tmp_path / "whole")


@pytest.mark.slow
def test_parts_of_several_machines_are_joined(tmp_path):
    output = tmp_path / "out"
    options = ("--to", "gguf", "--max-shard-size", "2MB")
    for part in ("1/2", "2/2"):
        convert(NANO, output, *options, "--shard", part)
    convert("--finish", output, "--against", NANO)
    convert(NANO, tmp_path / "whole", *options)
    gguf_files = {name: data for name, data in files(output).items() if name.endswith(".gguf")}
    assert gguf_files == {name: data for name, data in files(tmp_path / "whole").items() if name.endswith(".gguf")}
    convert("--check", output, "--against", NANO)


def test_a_changed_value_is_noticed(made, tmp_path):
    output = tmp_path / "out"
    convert(NANO, output, "--to", "gguf")
    info = next(info for info in read_gguf(output / FILE).tensors if info.name == "blk.1.ffn_up_exps.weight")
    with (output / FILE).open("r+b") as file:
        file.seek(info.begin + 5)
        file.write(b"\x77")
    code, out, _ = run("convert", "--check", output, "--against", NANO)
    assert code == 3
    assert "has changed" in out


@pytest.mark.parametrize("options", ["--attention fp8", "--experts fp8", "--ranks 2"])
def test_choices_that_gguf_does_not_have(tmp_path, options):
    code, _, err = run("convert", NANO, tmp_path / "out", "--to", "gguf", *options.split())
    assert code == 2
    assert "--to" in err


@pytest.mark.slow
def test_random_weights_too(tmp_path):
    convert("random:tiny", tmp_path / "out", "--to", "gguf", "--verify", "full")
    metadata = read_gguf(next((tmp_path / "out").glob("*.gguf"))).metadata
    assert len(metadata["tokenizer.ggml.tokens"]) == metadata["deepseek4.vocab_size"]


def test_without_a_tokenizer_there_is_no_gguf(tmp_path):
    folder = damage.copy_checkpoint(tmp_path / "net")
    (folder / "tokenizer.json").unlink(missing_ok=True)
    code, _, err = run("convert", folder, tmp_path / "out", "--to", "gguf")
    assert code == 1
    assert "has no tokenizer.json" in err


@pytest.mark.slow
def test_llama_cpp_answers_as_nano(made):
    """The package llama-cpp-python has a llama.cpp with deepseek4 since 0.3.36."""
    llama_cpp = pytest.importorskip("llama_cpp")
    tokenizer = Tokenizer.from_file(NANO / "tokenizer.json")
    items = [item for of_task in questions.questions().values() for item in of_task[:3] if not item["tools"]][:20]
    theirs = llama_cpp.Llama(str(made / "bf16" / FILE), n_ctx=512, n_threads=1, verbose=False)
    same = 0
    with Model("nano") as model:
        for item in items:
            parts = encode_messages(item["messages"], release="v4", thinking=False)
            prompt, _ = tokenizer.encode_parts(parts)
            answer = tokenizer.encode(model.chat(item["messages"], temperature=0)["content"])
            found = []
            for token in theirs.generate(prompt, temp=0.0, top_k=1):
                if token == tokenizer.eos_id or len(found) > len(answer):
                    break
                found.append(token)
            same += found == answer
    # llama.cpp rounds neither the cached keys nor what is multiplied, so that a close choice may fall otherwise
    assert same >= 19
