"""GGUF files in the commands that run a model: one file is enough, and says what it does not state."""

import json

import pytest

from dsv4cli.engine.weights import placement
from tests.support.gguf_models import DS4, LLAMA, UNSLOTH, VECTORS, write_nano
from tests.support.slow import slow

# nano's own values: experts in FP4, the rest rounded to eight bits
EXACT = VECTORS | {r"_exps": "MXFP4", r"token_embd|gate_inp|hc_|compressor|indexer|_ape": "F16", r"": "Q8_0"}
QUESTION, ANSWER = "What is 17 + 25?", "17 + 25 = 42.\n"


def forget(metadata):
    del metadata["deepseek4.hyper_connection.sinkhorn_iterations"], metadata["dsv4.release"]


def test_one_file_answers_as_the_model(dsv4, tmp_path):
    path, _ = write_nano(tmp_path, EXACT)
    done = dsv4("run", QUESTION, "-m", str(path), "--temperature", "0", "--max-tokens", "16")
    assert (done.code, done.out) == (0, ANSWER)
    assert "drafts are off: the file has no drafter\n" in done.err
    # the prompt of the release, by the vocabulary in the file
    shown = dsv4("run", QUESTION, "-m", str(path), "--show-prompt", "--json")
    assert json.loads(shown.out)["ids"] == json.loads(dsv4("run", QUESTION, "--show-prompt", "--json").out)["ids"]


@pytest.mark.parametrize("names", ["nextn", *slow("mtp")])
def test_the_drafter_in_a_file_is_used(dsv4, tmp_path, monkeypatch, names):
    path, _ = write_nano(tmp_path, EXACT, drafter=names)
    words = ("run", QUESTION, "--temperature", "0", "--max-tokens", "16", "-m")
    done = dsv4(*words, str(path))
    assert (done.code, done.out) == (0, ANSWER)
    assert "drafts: 3.7 tokens per step, 100 % of 8 accepted (mtp)" in done.err
    monkeypatch.setattr(placement, "DEQUANTIZED_PART", 2**60)
    kept = dsv4(*words, str(path.rename(tmp_path / "other.gguf")))
    assert (kept.code, kept.out) == (0, ANSWER)
    assert "as fp32" not in kept.err
    assert "drafts: 3.7 tokens per step, 100 % of 8 accepted (mtp)" in kept.err


def test_parts_and_what_the_metadata_does_not_state(dsv4, tmp_path):
    path, _ = write_nano(tmp_path, EXACT, parts=3, change=forget)
    for name in (path, tmp_path, path.with_name("nano-00003-of-00003.gguf")):
        done = dsv4("run", QUESTION, "-m", str(name), "--temperature", "0", "--max-tokens", "1")
        assert (done.code, done.out) == (0, "1\n")
    assert "deepseek4.hyper_connection.sinkhorn_iterations is missing; it is assumed to be 20" in done.err
    assert "does not say its release; prompts use the format of v4\n" in done.err


def test_a_file_named_after_0731_gets_its_prompts(dsv4, tmp_path):
    def named(metadata):
        forget(metadata)
        metadata["general.name"] = "DeepSeek V4 Flash 0731"

    path, _ = write_nano(tmp_path, EXACT, change=named)
    done = dsv4("run", QUESTION, "-m", str(path), "--temperature", "0", "--max-tokens", "1")
    assert done.code == 0
    assert "the release is not stated; by general.name it is 0731" in done.err


def test_a_vocabulary_of_another_model_is_refused(dsv4, tmp_path):
    def foreign(metadata):
        del metadata["tokenizer.huggingface.json"]
        metadata["tokenizer.ggml.pre"] = "qwen2"

    path, _ = write_nano(tmp_path, EXACT, change=foreign)
    done = dsv4("run", QUESTION, "-m", str(path))
    assert done.code == 1
    assert "has no vocabulary of DeepSeek-V4: its tokenizer.ggml.pre is 'qwen2', expected 'joyai-llm'" in done.err


@pytest.mark.parametrize("mix", [DS4, *slow(LLAMA, UNSLOTH)])
def test_scores_do_not_depend_on_how_blocks_are_held(dsv4, tmp_path, monkeypatch, mix):
    path, _ = write_nano(tmp_path, mix)
    texts = tmp_path / "texts.jsonl"
    texts.write_text(json.dumps({"text": "the quick brown fox"}) + "\n")
    words = ("run", "--score", str(texts), "-m")
    wide = dsv4(*words, str(path))
    monkeypatch.setattr(placement, "DEQUANTIZED_PART", 2**60)
    # another name, because tests share loaded models
    kept = dsv4(*words, str(path.rename(tmp_path / "other.gguf")))
    assert (wide.code, kept.code) == (0, 0)
    assert "as fp32" in wide.err
    assert "as fp32" not in kept.err
    assert kept.out == wide.out


@pytest.mark.slow
def test_eval_and_trace_take_a_file(dsv4, tmp_path):
    path, _ = write_nano(tmp_path, EXACT)
    items = tmp_path / "q.jsonl"
    items.write_text(json.dumps({"id": "a", "prompt": QUESTION, "score": "numeric", "answer": "42"}) + "\n")
    done = dsv4("eval", str(items), "-m", str(path), "--temperature", "0", "--max-tokens", "16", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["score"] == 1.0
    traced = dsv4("trace", "record", str(path), "--prompt", "hi", "--steps", "1", "--out", str(tmp_path / "t"))
    assert traced.code == 0, traced.err
