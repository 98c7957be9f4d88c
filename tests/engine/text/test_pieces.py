"""Long texts are encoded in pieces: with the ids of the whole text, without Python's lock, up to a bound."""

import random
import re
import sys
import threading
import time

import pytest

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.text import pieces as module
from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.pieces import any_of, pieces
from dsv4cli.engine.text.tokenizer import Tokenizer, TooManyTokens
from tests.engine.text.test_tokenizer import official_file
from tests.support.slow import slow

# what pre-tokenizers treat differently: letters, marks, digits, kinds of space, punctuation, scripts, special tokens
HARD = [
    *"ab Z_'s  \n\n\r\t\x1c\u00a0\u3000019²Ⅷ.,!(<|{é́がん中国。，😀\u200d\u0378",
    "<think>",
    "<｜User｜>",
    "｜DSML｜",
    "'s",
]


@pytest.fixture(params=["nano", "official", "bytes"], scope="module")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return Tokenizer.byte_level()
    if request.param == "official":
        return Tokenizer.from_file(official_file())
    return open_dialogue(resolve_model("nano"), "off").tokenizer


@pytest.mark.parametrize("size", [1, *slow(7)])
def test_pieces_have_the_ids_of_the_whole_text(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(module, "PIECE", size)
    rng, cut = random.Random(size), 0
    for _ in range(400):
        text = "".join(rng.choices(HARD, k=rng.randrange(40)))
        found = [*pieces(text, tokenizer._boundary)]
        cut += len(found) - 1
        assert "".join(found) == text
        whole = tokenizer._backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text) == whole, text
        parts = [tokens.USER, tokens.Given(text), tokens.ASSISTANT]
        ids, lookalikes = tokenizer.encode_parts(parts)
        assert ids[1:-1] == tokenizer._plain.encode(text).ids, text
        assert lookalikes == [*dict.fromkeys(tokenizer.special[id] for id in whole if id in tokenizer.special)]
    assert cut > 300


def test_prose_code_and_tables_are_cut(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    texts = ["a " * 500, "An answer, then.\n" * 60, "12,7,3\n" * 100, '{"a":1,"b":22}' * 60, "aGk0/9Zm" * 100]
    if tokenizer.size > 100_000:
        texts.append("你好，世界。今天，天气很好。" * 40)
    for text in texts:
        assert max(map(len, pieces(text, tokenizer._boundary))) <= 201


def test_a_text_without_boundaries_stays_whole(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    if tokenizer._longest_ordinary > 1:
        assert [*pieces("a" * 1000, tokenizer._boundary)] == ["a" * 1000]
    assert [*pieces("a" * 1000 + " b", None)] == ["a" * 1000 + " b"]


def test_more_tokens_than_asked_for(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    text = "a " * 500
    count = len(tokenizer.encode(text))
    assert len(tokenizer.encode(text, count)) == count
    for parts in ([text], [tokens.Given(text)]):
        assert len(tokenizer.encode_parts(parts, count)[0]) == count
        with pytest.raises(TooManyTokens, match=f"more than {count - 1:,} tokens"):
            tokenizer.encode_parts(parts, count - 1)


def test_a_text_that_cannot_fit_is_not_encoded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = tokenizer.longest
    if tokenizer.size < 10_000:  # the official vocabulary takes a second
        assert longest == max(len(tokenizer.token_bytes(id)) for id in range(tokenizer.size))
    monkeypatch.setattr("dsv4cli.engine.text.tokenizer._encoded", lambda *_: [])
    assert tokenizer.encode("é" * (50 * longest), 100) == []
    for parts in (["é" * (50 * longest) + "!"], [tokens.Given("é" * (50 * longest)), "!"]):
        with pytest.raises(TooManyTokens):
            tokenizer.encode_parts(parts, 100)


def test_each_piece_is_encoded_once_and_stops_early(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 100)
    seen: list[str] = []

    def noted(_: object, piece: str) -> list[int]:
        seen.append(piece)
        return [5] * 50

    monkeypatch.setattr("dsv4cli.engine.text.tokenizer._encoded", noted)
    text = "a <think>" * 200
    tokenizer.encode_parts([tokens.USER, tokens.Given(text), tokens.ASSISTANT])
    assert "".join(seen) == text  # also where special tokens are spelled in it
    seen.clear()
    with pytest.raises(TooManyTokens):
        tokenizer.encode_parts([tokens.USER, tokens.Given(text), tokens.ASSISTANT], 120)
    assert len(seen) == 3


def test_other_threads_run_while_a_piece_is_encoded(tokenizer: Tokenizer) -> None:
    text, began, ended, during = "a " * (module.PIECE // 2), threading.Event(), threading.Event(), 0
    assert len([*pieces(text, tokenizer._boundary)]) == 1

    def encode() -> None:
        began.set()
        for _ in range(50):  # one may end before a busy machine lets another thread run
            if during <= 5:
                tokenizer.encode(text)
        ended.set()

    before = sys.getswitchinterval()
    sys.setswitchinterval(60)  # only a thread that releases Python's lock lets others run
    try:
        thread = threading.Thread(target=encode)
        thread.start()
        began.wait()
        while not ended.is_set():
            time.sleep(0)  # releases it
            during += 1
        thread.join()
    finally:
        sys.setswitchinterval(before)
    assert during > 5


def test_the_longest_word_is_found() -> None:
    words = ["<think>", "<", "<|a|>", "<|a|>b", "x.y"]
    found = re.findall(any_of(words), "<think><|a|>b<|a|> <th xzy x.y")
    assert found == ["<think>", "<|a|>b", "<|a|>", "<", "x.y"]
