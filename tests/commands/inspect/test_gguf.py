"""`dsv4 inspect` of GGUF: what it is, who loads it and which line decides, the same model in another layout."""

import json
import shutil
from pathlib import Path

import pytest

from dsv4cli.engine.checkpoint.gguf.header import gguf_header, read_gguf
from tests.support.conversions import convert, run

NANO = Path("dsv4cli/nano")
FILE = "model-MXFP4.gguf"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gguf") / "nano"
    convert(NANO, folder, "--to", "gguf", "--attention", "bf16", "--verify", "off")
    return folder


def inspect(*arguments):
    code, out, _ = run("inspect", *arguments, "--json")
    return code, json.loads(out)


def test_the_report(folder):
    code, out, _ = run("inspect", folder / FILE)
    assert code == 0
    assert "would load: all 126 tensors are present and as expected" in out
    assert "experts MXFP4, attention BF16, embedding BF16, norms F32" in out
    assert "2,304 tokens, pre-tokenizer default, a chat template" in out
    assert "MXFP4" in out.split("bytes by dtype")[1]


def test_the_document(folder):
    _, found = inspect(folder)
    assert found["identity"]["layout"] == "gguf"
    assert found["coverage"]["complete"]
    assert found["gguf"]["files"] == [FILE]
    metadata = found["gguf"]["metadata"]
    assert metadata["deepseek4.block_count"] == 4
    assert metadata["tokenizer.ggml.tokens"] == {"length": 2304}
    assert len(metadata["tokenizer.huggingface.json"]) < 300
    # of the tensors, without headers and padding
    stored = sum(info.nbytes for info in read_gguf(folder / FILE).tensors)
    assert found["sizes"]["nbytes"] == stored
    assert found["sizes"]["by_dtype"].keys() == {"MXFP4", "BF16", "F32", "I32"}
    _, official = inspect(NANO)
    assert found["sizes"]["parameters"] == official["sizes"]["main"]
    assert official["gguf"] is None


def test_it_is_the_same_model(folder):
    _, found = inspect(NANO, "--diff", folder)
    counts = found["diff"]["counts"]
    assert (counts["different"], counts["unreadable"], counts["zero_signs"]) == (0, 0, 0)
    assert counts["identical"] + counts["equal"] == 210


def test_who_loads_it(folder):
    answers = {name: inspect(folder, "--for", name)[1]["verdict"] for name in ("llama.cpp", "ds4", "vllm", "dsv4")}
    assert {name: answer["loads"] for name, answer in answers.items()} == {
        "llama.cpp": True, "ds4": False, "vllm": None, "dsv4": True,
    }  # fmt: skip
    assert answers["llama.cpp"]["command"] == f"llama-server --model {folder / FILE}"
    assert "tokenizer.ggml.pre is 'default'" in answers["llama.cpp"]["notes"][0]
    assert "dimensions of Flash and Pro" in answers["ds4"]["reasons"][0]
    assert "deepseek4-quantize" in answers["ds4"]["remedy"]
    # a file alone has its vocabulary
    alone = folder.parent / "alone.gguf"
    alone.write_bytes((folder / FILE).read_bytes())
    assert inspect(alone, "--for", "dsv4")[1]["verdict"]["loads"] is True
    # nothing else reads it, and what does not read it is made into it
    _, found = inspect(NANO, "--for", "llama.cpp")
    assert found["verdict"]["remedy"].endswith("--to gguf")


def rewritten(folder: Path, target: Path, change) -> Path:
    """The file with another header. change: of metadata and tensors (type and shape by name)."""
    found = read_gguf(folder / FILE)
    content = (folder / FILE).read_bytes()
    tensors = {info.name: (info.dtype, info.shape) for info in found.tensors}
    data = content[found.tensors[0].begin :]
    change(found.metadata, tensors)
    target.write_bytes(gguf_header(found.metadata, tensors) + data)
    return target


def drop(key):
    return lambda metadata, tensors: metadata.pop(key)


def rename(old, new):
    def change(metadata, tensors):
        both = {new if name == old else name: entry for name, entry in tensors.items()}
        tensors.clear()
        tensors.update(both)

    return change


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (drop("deepseek4.hash_layer_count"), "lacks the key deepseek4.hash_layer_count"),
        (drop("tokenizer.ggml.tokens"), "there is no tokenizer.ggml.tokens"),
        (rename("blk.1.attn_norm.weight", "blk.1.attn_nrom.weight"), "blk.1.attn_norm.weight is missing"),
        (rename("blk.1.attn_norm.weight", "blk.1.attn_norm.bias"), "blk.1.attn_norm.weight is missing"),
    ],
)
def test_the_line_that_decides_for_llama_cpp(folder, tmp_path, change, line):
    path = rewritten(folder, tmp_path / "m.gguf", change)
    code, found = inspect(path, "--for", "llama.cpp")
    assert code == 3
    assert found["verdict"]["loads"] is False
    assert line in " ".join(found["verdict"]["reasons"])


def test_ds4_asks_for_the_vocabulary_size_and_types(folder, tmp_path):
    path = rewritten(folder, tmp_path / "m.gguf", drop("deepseek4.vocab_size"))
    _, found = inspect(path, "--for", "ds4")
    reasons = " ".join(found["verdict"]["reasons"])
    assert "there is no deepseek4.vocab_size" in reasons
    assert "token_embd.weight is BF16, and ds4 takes F16" in reasons
    _, found = inspect(path, "--for", "llama.cpp")
    assert found["verdict"]["loads"] is True


def test_a_part_alone_is_named(folder, tmp_path):
    shutil.copy(folder / FILE, tmp_path / "m-00001-of-00002.gguf")
    code, out, _ = run("inspect", tmp_path / "m-00001-of-00002.gguf")
    assert code == 3
    assert "m-00002-of-00002.gguf is missing, but m-00001-of-00002.gguf belongs to a set of 2 files" in out


def test_a_shape_of_another_model_is_named(folder, tmp_path):
    wider = {"deepseek4.attention.q_lora_rank": 256}
    path = rewritten(folder, tmp_path / "m.gguf", lambda metadata, tensors: metadata.update(wider))
    code, found = inspect(path)
    assert code == 3
    assert found["coverage"]["misshapen"][0]["name"] == "blk.0.attn_q_a.weight"
    code, _, err = run("convert", path, tmp_path / "out", "--to", "official")
    assert code == 1
    assert "blk.0.attn_q_a.weight has shape [128, 256] instead of [256, 256]" in err
