import json
import random

import numpy as np
import pytest

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.prompt import check_messages, check_tools, encode_messages, with_tools
from dsv4cli.engine.text.reply import parse_reply
from dsv4cli.engine.text.tokenizer import Tokenizer
from tests.support.slow import slow
from tools.nano import bpe, conversation, heldout, judge, mixture, stream, tables, vocabulary, words
from tools.nano.tasks import arithmetic, facts, retrieval

TEXTS = (
    "",
    "Hello, world!  Two spaces,\ttabs\r\nand\n\n\nlines  ",
    "naïve façade — “quotes” … 12加7等于多少？ 你好 🙂🙃 \u00a0\u2003 x",
    "get_weather(city='New York', n=-3.50)\n    indented __init__",
    f"{tokens.BOS}a{tokens.USER} b{tokens.ASSISTANT}{tokens.THINK_END}c。{tokens.EOS}<think><think\x1c\x1d\x85\x0b",
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(bpe.FILE)


def items(number: int, split: str = "train") -> list:
    rng = random.Random(7)
    drawn = [task(rng, split) for task in mixture.TASKS.values() for _ in range(number)]
    return drawn + [mixture.short_item(rng, 600) for _ in range(number)] if split == "train" else drawn


def test_the_vocabulary_has_its_size_and_the_official_ids(tokenizer):
    assert tokenizer.size == vocabulary.SIZE == 2304
    assert [tokenizer.token_id(text) for text in tokens.SPECIAL[:3]] == [0, 1, 2]
    assert [tokenizer.token_id(text) for text in tokens.SPECIAL[3:]] == list(range(2304 - 13, 2304))
    assert all(tokenizer.encode(text) == [tokenizer.token_id(text)] for text in tokens.SPECIAL)


@pytest.mark.slow
def test_the_vocabulary_is_what_its_command_writes(tmp_path):
    number = vocabulary.SIZE - bpe.FIRST_MERGE - (len(tokens.SPECIAL) - bpe.FIRST_BYTE)
    vocabulary.write(vocabulary.train(vocabulary.counted(), number), tmp_path / "tokenizer.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == bpe.FILE.with_name(name).read_bytes()


def test_names_and_values_are_one_token(tokenizer):
    assert [text for text in vocabulary.whole() if len(tokenizer.encode(text)) != 1] == []


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_and_both_encoders_agree(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert stream.bpe().encode(text) == ids


def test_both_encoders_agree_on_random_text(tokenizer):
    rng = random.Random(1)
    alphabet = [
        *map(chr, range(0x250)),
        "你",
        "好",
        "。",
        "😀",
        "\u2028",
        "\u3000",
        *tokens.SPECIAL,
        " the",
        " Anna",
    ] + [" "] * 200
    for _ in range(2000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(30)))
        ids = tokenizer.encode(text)
        assert stream.bpe().encode(text) == ids
        assert tokenizer.decode(ids) == text


def test_both_encoders_agree_on_every_task(tokenizer):
    for item in items(40):
        text = conversation.rendered(item)
        ids, weights = stream.tokens_of(item)
        assert ids == tokenizer.encode(text), "also where the parts meet"
        assert len(weights) == len(ids)


def test_a_conversation_is_the_prompt_of_its_last_answer_and_the_answer():
    for item in items(60):
        prompt, text = conversation.prompt(item), conversation.rendered(item)
        assert text.startswith(prompt)
        reply = parse_reply(text.removeprefix(prompt), thinking=item.thinking).as_message()
        last = item.messages[-1]
        assert (reply["content"], reply["reasoning_content"]) == (last["content"], last.get("reasoning_content", ""))
        assert judge.calls_of(reply["tool_calls"]) == judge.calls_of(last.get("tool_calls", []))
        assert check_messages(item.messages)
        assert check_tools(item.tools) == item.tools


def test_exactly_the_assistants_words_are_learned():
    for item in items(30):
        learned = [text for text, weight in conversation.weighted(item) if weight == conversation.LEARNED]
        assert "".join(text for text, _ in conversation.weighted(item)) == conversation.rendered(item)
        assert len(learned) == sum(message["role"] == "assistant" for message in item.messages)
        assert all(text.endswith(tokens.EOS) and tokens.USER not in text for text in learned)


def test_filler_weighs_least():
    parts = conversation.weighted(retrieval.needle_at(random.Random(1), "train", 500, 0.3))
    assert [weight for _, weight in parts] == [0.02, 0.1, 1.0]
    parts = conversation.weighted(retrieval.front_at(random.Random(1), "train", 500, 0.3))
    assert [weight for _, weight in parts] == [0.1, 0.02, 1.0]


@pytest.mark.parametrize(("kind", "length"), [("short", 512), ("long", 4352)])
def test_rows(kind, length):
    ids, weights = stream.packed(kind, 3, 4, length)
    assert ids.shape == weights.shape == (4, length + 2)
    assert (ids.dtype, weights.dtype) == (np.uint16, np.float16)
    assert (ids[:, 0] == 0).all()
    assert ids.max() < 2304
    assert {float(x) for x in np.unique(weights)} <= {float(np.float16(x)) for x in (1, 0.1, 0.02)}
    again, _ = stream.packed(kind, 3, 2, length)
    assert (again == ids[:2]).all(), "a row does not depend on how many there are"
    other, _ = stream.packed(kind, 4, 2, length)
    assert (other != again).any()
    for row in ids:
        starts = np.flatnonzero(row == 0)[1:]
        assert (row[starts - 1] == 1).all(), "a conversation follows the end of another"


@pytest.mark.slow
def test_nothing_held_out_is_trained():
    asked = {_prompt(row) for row in heldout.load()}
    rng = random.Random(11)
    drawn = [mixture.short_item(rng, 600) for _ in range(20_000)]
    drawn += [item for task in mixture.TASKS.values() for item in (task(rng, "train") for _ in range(500))]
    assert [item.key for item in drawn if conversation.prompt(item) in asked] == []


@pytest.mark.parametrize("count", [4000, *slow(20_000)])
def test_held_out_sums_are_nowhere_an_answer(count):
    rng = random.Random(12)
    for _ in range(count):
        item = mixture.short_item(rng, 600)
        for message in item.messages:
            text = message["content"] if message["role"] == "assistant" else ""
            match text.removesuffix(".").split():
                case [a, "+" | "-" as op, b, "=", _]:
                    assert arithmetic.allowed("train", int(a), op, int(b)), text


def test_every_fact_is_asked_in_training_in_one_form_at_least():
    for family in facts.FAMILIES.values():
        for fact in family:
            forms = range(len(fact.questions))
            keys = [f"{fact.family}/{fact.subject}/{nth}" for nth in forms]
            assert any(facts.fits("train", "facts", key) for key in keys), keys


def test_no_question_has_two_answers():
    answers: dict[str, str] = {}
    for fact in (fact for family in facts.FAMILIES.values() for fact in family):
        for question in fact.questions:
            assert answers.setdefault(question, fact.full) == fact.full, question
    for table in (tables.COUNTRIES, tables.SYMBOLS, tables.COLORS_OF, tables.SOUNDS, tables.LEGS, tables.YOUNG):
        assert len({row[0] for row in table}) == len(table)
    assert len(set(words.NAMES)) == len(words.NAMES)
    assert not set(words.NAMES) & set(words.VALUES)


@pytest.mark.parametrize("seed", range(3))
def test_worked_steps_end_in_the_result(seed):
    rng = random.Random(seed)
    for _ in range(2000):
        a, b = rng.randrange(1000), rng.randrange(1000)
        assert int(arithmetic.sum_steps(a, b).split()[-1]) == a + b
        assert int(arithmetic.difference_steps(a, b).split()[-1]) == abs(a - b)
        assert int(arithmetic.product_steps(a % 100, b % 100).split()[-1]) == a % 100 * (b % 100)


def test_retrieval_measures_distance_in_tokens(tokenizer):
    for distance in (20, 150, 999, 3900):
        for seed in range(5):
            item = retrieval.needle_at(random.Random(seed), "heldout", distance, 0.3)
            text = item.messages[0]["content"]
            story, _, question = text.rpartition("\n\n")
            name = item.messages[1]["content"].split(" is ")[1].removesuffix(".")
            needle = next(end for end in _ends(story, question, name))
            assert len(tokenizer.encode(story[needle:])) == item.distance
            assert abs(item.distance - distance) < 16


def _ends(story: str, question: str, value: str):
    """Where sentences end that name the value and the key of the question."""
    at = 0
    for sentence in story.split(". "):
        at += len(sentence) + 2
        key = sentence.split(" of ")[-1].split(" is ")[0] if " of " in sentence else sentence.split()[1]
        if sentence.split()[-1].rstrip(".") == value and key in question:
            yield min(at - 1, len(story))


def test_the_held_out_file_is_what_its_command_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(heldout, "FILE", tmp_path / "heldout.json")
    heldout.main()
    written = (tmp_path / "heldout.json").read_bytes()
    monkeypatch.undo()
    assert written == heldout.FILE.read_bytes()
    assert len(written) <= 400_000


def test_the_judge_takes_the_expected_and_nothing_else():
    rows = heldout.load()
    assert {row["task"] for row in rows} >= {"sums", "products", "facts", "tools", "multi turn", "retrieval"}
    for row in rows:
        calls = [
            {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}} for call in row["calls"]
        ]
        assert judge.is_right(row, {"content": f"{row['expected']} ", "tool_calls": calls})
        assert not judge.is_right(row, {"content": f"{row['expected']}x", "tool_calls": calls})
        assert not judge.is_right(
            row, {"content": row["expected"], "tool_calls": [*calls, {"function": {"name": "f", "arguments": "{}"}}]}
        )
        assert not judge.is_right(
            row, {"content": row["expected"], "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
        )


def test_held_out_needles_are_at_all_distances_and_said_once():
    rows = [row for row in heldout.load() if row["task"] == "retrieval"]
    for low, high in heldout.BANDS:
        assert sum(low <= row["distance"] < high for row in rows) >= heldout.IN_BAND - 2
    for row in rows:
        value = row["expected"].split()[-1]
        assert value.removesuffix(".") in row["messages"][0]["content"]
        assert len(stream.bpe().encode(row["messages"][0]["content"])) < 4300


def _prompt(row: dict) -> str:
    messages = with_tools(row["messages"], row["tools"])
    return "".join(encode_messages(messages, release="v4", thinking=row["thinking"]))
