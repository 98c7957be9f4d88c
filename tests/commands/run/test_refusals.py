"""What `dsv4 run` refuses: a sentence that names the thing, a remedy, the documented exit code, nothing on stdout."""

import json
from dataclasses import replace

import pytest
import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.sampling import logprobs
from dsv4cli.engine.weights import load
from tests.support import damage
from tests.support.foreign import FOREIGN, INCOMPLETE, half
from tests.support.program import SMALL, save_tokenizer
from tests.support.shared_models import load_models_anew

FLASH = str(damage.GOLDEN / "tiny-flash")
HARMS = damage.DAMAGES | {damage.scale_is_nan: (damage.SCALE, "scale byte 255")} | FOREIGN | INCOMPLETE


def refused(done, code, *words):
    """Asserts one sentence with these words and one remedy at the end of stderr, no traceback before them."""
    assert (done.code, done.out) == (code, ""), done.err
    *before, sentence, remedy = done.err.splitlines()
    assert sentence.startswith("error: ")
    assert remedy.startswith("→ ")
    assert len(remedy) > 5
    assert all(word in sentence for word in words), sentence
    assert not any("Traceback" in line for line in before)


@pytest.mark.parametrize(
    "harm", [damage.scale_is_nan, *half(damage.DAMAGES | FOREIGN | INCOMPLETE, 1)], ids=lambda harm: harm.__name__
)
def test_a_checkpoint_that_is_damaged_or_another_models(dsv4, tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    save_tokenizer(folder)
    harm(folder)
    code = 4 if harm in FOREIGN else 1
    refused(dsv4("run", "hi", "--model", str(folder), "--max-tokens", "1", "--json"), code, *HARMS[harm])
    scores = tmp_path / "scores.jsonl"
    scores.write_text('{"ids": [1, 2]}')
    refused(dsv4("run", "--score", str(scores), "--model", str(folder)), code, *HARMS[harm])


def test_a_checkpoint_with_its_tokenizer_answers(dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    save_tokenizer(folder)
    done = dsv4("run", "hi", "--model", str(folder), "--max-tokens", "1")
    assert done.code == 0
    assert " GB/s\n" in done.err
    damage.edit_config(folder, eos_token_id=7)
    refused(dsv4("run", "hi", "--model", str(folder)), 1, "the end token is 1 in", "but 7 in config.json")


def test_a_checkpoint_without_a_tokenizer(dsv4):
    done = dsv4("run", "hi", "--model", FLASH)
    refused(done, 1, "no tokenizer.json in")
    assert done.err.splitlines()[-1] == f"→ copy the official DeepSeek-V4 tokenizer.json into {FLASH}"


def test_logits_that_are_not_finite(dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    save_tokenizer(folder)
    nan = bytes.fromhex("c07f")  # bf16, little-endian
    damage.edit_tensor(folder, "norm.weight", lambda stored: replace(stored, data=nan + stored.data[2:]))
    refused(dsv4("run", "hi", "--model", str(folder)), 7, "logits are not finite")
    refused(dsv4("run", "hi", "--model", str(folder), "--json"), 7, "logits are not finite")
    scores = tmp_path / "scores.jsonl"
    scores.write_text('{"ids": [1, 2]}')
    refused(dsv4("run", "--score", str(scores), "--model", str(folder)), 7, "logits are not finite")


def test_gpu_memory_that_is_no_size_or_too_small(dsv4):
    refused(dsv4("run", "hi", "--gpu-memory", "120"), 2, "--gpu-memory '120' is not a size")
    done = dsv4("run", "hi", "--gpu-memory", "5MB")
    refused(done, 5, "0.005 GB of GPU memory is not enough for the weights")
    assert "--gpu-memory 8MB" in done.err.splitlines()[-1]


def test_an_answer_that_becomes_unsound_keeps_what_was_printed(dsv4, monkeypatch):
    dsv4.model_says("so far!", ends=False)  # its last token is drawn, and not printed
    checks = iter(range(9))
    whole = logprobs.logsumexp
    monkeypatch.setattr(logprobs, "logsumexp", lambda x: whole(x if next(checks) < 6 else x * torch.nan))
    done = dsv4("run", "hi", "--model", SMALL)
    assert (done.code, done.out) == (7, "so far\n")
    assert "error: the model's logits are not finite" in done.err


def test_weights_that_do_not_fit(dsv4, monkeypatch):
    load_models_anew(monkeypatch)
    monkeypatch.setattr(load, "free_memory", lambda device: 10**6)
    refused(dsv4("run", "hi"), 5, "the weights take 0.01 GB and cpu has 0.00 GB free")


def test_a_step_that_does_not_fit(dsv4, monkeypatch, tmp_path):
    def forward(self, batch, cache):
        raise torch.OutOfMemoryError("tried to allocate 80 GiB\nmore")

    monkeypatch.setattr(Transformer, "forward", forward)
    refused(dsv4("run", "hi", "--model", SMALL), 5, "cpu ran out of memory: tried to allocate 80 GiB")
    scores = tmp_path / "scores.jsonl"
    scores.write_text('{"ids": [1, 2]}')
    refused(dsv4("run", "--score", str(scores), "--model", SMALL), 5, "cpu ran out of memory")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, ["there is no prompt"]),
        ([""], 2, ["there is no prompt"]),
        (["-"], 2, ["there is no prompt"]),
        (["hi", "--prompts", "p"], 2, ["a prompt and --prompts cannot be combined"]),
        (["--messages", "m", "--score", "s"], 2, ["--messages and --score cannot be combined"]),
        (["--messages", "m", "--system", "s"], 2, ["--system and --messages cannot be combined"]),
        (["--score", "s", "--show-prompt"], 2, ["--score and --show-prompt cannot be combined"]),
        (["hi", "--prompts", "p", "--out", "o"], 2, ["a prompt and --prompts cannot be combined"]),
        (["--messages", "m", "-f", "f"], 2, ["--file and --messages cannot be combined"]),
        (["hi", "--out", "o"], 2, ["--out works only with --prompts"]),
        (["hi", "--skip-bad"], 2, ["--skip-bad works only with --prompts"]),
        (["hi", "-n", "0"], 2, ["--samples cannot be 0"]),
        (["--score", "s", "-n", "2"], 2, ["--samples and --score cannot be combined"]),
        (["--score", "s", "--temperature", "0.5"], 2, ["--temperature has no effect with --score"]),
        (["--score", "s", "--max-tokens", "4096"], 2, ["--max-tokens has no effect with --score"]),
        (["--score", "s", "--stop", "x"], 2, ["--stop has no effect with --score"]),
        (["hi", "-n", "2", "--show-prompt"], 2, ["--samples and --show-prompt cannot be combined"]),
        (["hi", "-f", FLASH], 2, ["tiny-flash cannot be read: Is a directory"]),
        (["hi", "--logprobs", "2"], 2, ["--logprobs needs JSON output"]),
        (["hi", "--temperature", "-1"], 2, ["--temperature cannot be -1.0"]),
        (["hi", "--temperature", "nan"], 2, ["--temperature cannot be nan"]),
        (["hi", "--temperature", "inf"], 2, ["--temperature cannot be inf"]),
        (["hi", "--top-p", "0"], 2, ["--top-p cannot be 0.0"]),
        (["hi", "--stop", ""], 2, ["--stop cannot be an empty string"]),
        (["hi", "--device", "gpu"], 2, ["--device cannot be 'gpu'"]),
        (["hi", "--device", "cuda:99"], 4, ["--device cuda:99 does not exist"]),
        (["hi", "--backend", "triton"], 4, ["--backend triton needs a GPU, but the device is cpu"]),
        (["hi", "--think", "low"], 2, ['release v4 has no thinking level "low"']),
        (["hi", "--max-context", "6"], 2, ["the prompt has 6 tokens", "limit is 6 tokens, including the answer"]),
        (["a\udcffb"], 2, ["PROMPT is not UTF-8", "byte 0xff at offset 1"]),
        (["hi", "--model", "./nothing"], 1, ["there is no folder ./nothing"]),
        (["hi", "--model", "nothing.gguf"], 1, ["there is no file nothing.gguf"]),
        (["hi", "--model", __file__], 2, ["is a file; a model is a folder"]),
        (["--messages", "nothing.json"], 2, ["nothing.json cannot be read: No such file"]),
        (["--prompts", FLASH], 2, ["tiny-flash cannot be read: Is a directory"]),
        (["--score", FLASH], 2, ["tiny-flash cannot be read: Is a directory"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) and len(value) > 1 else None,
)
def test_a_wrong_call(dsv4, arguments, code, words):
    refused(dsv4("run", *arguments), code, *words)


def test_stdin_that_is_not_utf8(dsv4):
    refused(dsv4("run", stdin=b"caf\xe9"), 2, "stdin is not UTF-8: byte 0xe9 at offset 3")


def test_stdin_that_cannot_be_read(dsv4):
    refused(dsv4("run", "-", readable=False), 2, "stdin cannot be read: Bad file descriptor")


def test_a_wrong_device_where_there_are_some(dsv4, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    done = dsv4("run", "hi", "--device", "cuda:1")
    refused(done, 4, "--device cuda:1 does not exist: PyTorch sees 1 CUDA device")
    assert done.err.endswith("→ the last one is cuda:0\n")


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", ["not JSON", "column 2"]),
        ("[" * 100_000, ["nested too deeply"]),
        ([], ["messages: expected a list of messages"]),
        ({}, ['there is no "messages"']),
        ({"messages": [USER], "model": "flash"}, ["unknown key 'model'"]),
        ({"messages": [USER], "tools": {}}, ["tools: expected a list"]),
        ([USER, {"role": "bot", "content": "hi"}], ["messages[1].role", "'bot'"]),
        ([{"role": "user"}], ["messages[0].content"]),
        ([{"role": "user", "content": "\ud800"}], ["half of a surrogate pair"]),
        ([{"role": "tool", "content": "x"}], ["messages[0].tool_call_id"]),
    ],
    ids=str,
)
def test_a_conversation_that_is_none(dsv4, tmp_path, value, words):
    text = value if isinstance(value, str) else json.dumps(value)
    path = tmp_path / "m.json"
    path.write_text(text)
    refused(dsv4("run", "--messages", str(path)), 2, f"{path}: ", *words)
    if isinstance(value, list):
        path.write_text(f'{{"messages": [{json.dumps(USER)}]}}\n\n{{"messages": {text}}}')
        for option in ("--prompts", "--score"):
            refused(dsv4("run", option, str(path)), 2, f"{path}, line 3: ", *words)


@pytest.mark.parametrize(
    ("option", "line", "words"),
    [
        ("--prompts", '"hi"', ["not a JSON object"]),
        ("--prompts", "{}", ["none of the keys prompt, messages"]),
        ("--prompts", '{"prompt": ""}', ['"prompt" is empty']),
        ("--prompts", '{"prompt": ["hi"]}', ['"prompt" is not a string']),
        ("--prompts", '{"prompt": "hi", "idx": 1}', ["unknown key 'idx'"]),
        ("--prompts", '{"prompt": "hi", "messages": []}', ["unknown key 'prompt'"]),
        ("--score", '{"ids": []}', ['"ids"', "empty"]),
        ("--score", '{"ids": [1, true]}', ['"ids" is not a list of whole numbers']),
        ("--score", '{"ids": [1], "text": "x"}', ["more than one of the keys ids, text, messages"]),
        ("--score", '{"text": 1}', ['"text" is not a string']),
        ("--score", '{"ids": [1' + "0" * 5000 + "]}", ["a number too long"]),
    ],
)
def test_a_line_that_is_none(dsv4, tmp_path, option, line, words):
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"{"prompt" if option == "--prompts" else "text"}": "fine"}}\n{line}\n')
    refused(dsv4("run", option, str(path)), 2, f"{path}, line 2: ", *words)


@pytest.mark.parametrize(
    ("option", "content", "words"),
    [
        ("--prompts", b"\n \n", "has no lines"),
        ("--score", b"", "has no lines"),
        ("--messages", b"", "not JSON"),
        ("--prompts", b"\xff", "is not UTF-8: byte 0xff at offset 0"),
        ("--messages", b"\xff", "is not UTF-8"),
    ],
)
def test_a_file_that_is_empty_or_in_another_encoding(dsv4, tmp_path, option, content, words):
    path = tmp_path / "file"
    path.write_bytes(content)
    refused(dsv4("run", option, str(path)), 2, str(path), words)


def test_a_system_message_for_lines_that_have_messages(dsv4, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}')
    words = '"messages" and --system cannot be combined'
    refused(dsv4("run", "--prompts", str(path), "--system", "s"), 2, "line 2", words)


@pytest.mark.parametrize(
    ("option", "lines", "words"),
    [
        (
            "--score",
            [{"ids": [1]}, {"ids": [2, 512]}],
            "text 1 has the token id 512, but the model's vocabulary is 0 to 511",
        ),
        ("--score", [{"ids": [-1]}], "the text has the token id -1"),
        ("--score", [{"ids": [1]}, {"ids": [1] * 10}], "text 1 has 10 tokens: the context limit is 9 tokens"),
        (
            "--prompts",
            [{"prompt": "abcd"}, {"prompt": "abcde"}],
            "line 2: the prompt has 9 tokens: the context limit is 9 tokens, including the answer",
        ),
    ],
)
def test_sequences_that_the_model_cannot_take(dsv4, tmp_path, option, lines, words):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    done = dsv4("run", option, str(path), "--max-context", "9", "--model", "random:tiny")
    refused(done, 2, words)
    assert "on cpu" not in done.err  # before the model is loaded
