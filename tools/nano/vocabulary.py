"""Builds nano's tokenizer: `python -m tools.nano.vocabulary` counts the words of all tasks and writes it."""

import json
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.tokenizer import BYTE_CHARACTERS, FIRST_BYTE
from tools.nano import tables, words
from tools.nano.bpe import FILE, FIRST_MERGE, PATTERN, join, pieces
from tools.nano.conversation import rendered
from tools.nano.mixture import TASKS
from tools.nano.tasks import retrieval
from tools.nano.tasks.tools import TOOLS

SIZE = 2304
_SAMPLES = 2000
_WHOLE = 10**7  # count of a word that must become one token, so that it is merged first


def main() -> None:
    """Write dsv4cli/nano/tokenizer.json and tokenizer_config.json."""
    merges = train(counted(), SIZE - FIRST_MERGE - (len(tokens.SPECIAL) - FIRST_BYTE))
    write(merges, FILE)


def counted() -> Counter[str]:
    """Count words in samples of every task, plus the words that must be one token."""
    counts: Counter[str] = Counter()
    for name, task in TASKS.items():
        rng = random.Random(name)
        for _ in range(_SAMPLES * (6 if name == "facts" else 1)):
            counts.update(pieces(rendered(task(rng, "train"))))
    rng = random.Random("retrieval")
    for _ in range(20):
        counts.update(pieces(rendered(retrieval.retrieval(rng, 4000))))
    for word in whole():
        counts[word] += _WHOLE
    for text in tokens.SPECIAL:
        del counts[text]
    return counts


def whole() -> list[str]:
    """Return the words that must be one token: names, values, other words of texts, and those of tools' schemas."""
    texts = [
        *(f" {word}" for word in (*words.NAMES, *words.VALUES, *words.PLACES, *tables.DAYS)),
        *(lead + tool["function"]["name"] for tool, _ in TOOLS for lead in ("", " ")),
    ]
    return list(dict.fromkeys(texts))


def train(counts: Counter[str], number: int) -> list[tuple[int, int]]:
    """Merge the most frequent pair repeatedly. Ties go to the pair with the lower ids."""
    texts = sorted(counts)
    ids = [[FIRST_BYTE + byte for byte in text.encode()] for text in texts]
    frequency: Counter[tuple[int, int]] = Counter()
    places: dict[tuple[int, int], set[int]] = {}
    for nth, text in enumerate(texts):
        _count(ids[nth], counts[text], nth, frequency, places)
    merges: list[tuple[int, int]] = []
    while len(merges) < number:
        pair = min(frequency, key=lambda pair: (-frequency[pair], pair))
        for nth in sorted(places.pop(pair)):
            count = counts[texts[nth]]
            _count(ids[nth], -count, nth, frequency, places)
            ids[nth] = join(ids[nth], pair, FIRST_MERGE + len(merges))
            _count(ids[nth], count, nth, frequency, places)
        del frequency[pair]
        merges.append(pair)
    return merges


def _count(
    ids: list[int], count: int, nth: int, frequency: Counter[tuple[int, int]], places: dict[tuple[int, int], set[int]]
) -> None:
    for pair in pairwise(ids):
        frequency[pair] += count
        if count > 0:
            places.setdefault(pair, set()).add(nth)


def write(merges: list[tuple[int, int]], path: Path) -> None:
    """Write the files that `tokenizers` and transformers read."""
    vocabulary = [*tokens.SPECIAL[:FIRST_BYTE], *BYTE_CHARACTERS]
    for left, right in merges:
        vocabulary.append(vocabulary[left] + vocabulary[right])
    spelled = [[vocabulary[left], vocabulary[right]] for left, right in merges]
    vocabulary += tokens.SPECIAL[FIRST_BYTE:]
    numbers = {text: id for id, text in enumerate(vocabulary)}
    assert len(numbers) == len(vocabulary), "two merges spell the same token"
    _dump(path, _tokenizer(numbers, spelled))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens.BOS,
        "eos_token": tokens.EOS,
        "pad_token": tokens.PAD,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8192,
    }
    _dump(path.with_name("tokenizer_config.json"), config)


def _tokenizer(numbers: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PATTERN}, "behavior": "Isolated", "invert": False}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": numbers[text], "content": text, **flags} for text in sorted_special(numbers)],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": numbers,
            "merges": merges,
        },
    }


def sorted_special(numbers: dict[str, int]) -> list[str]:
    """Return the special tokens by id, in the format of `tokenizers`."""
    return sorted(tokens.SPECIAL, key=numbers.__getitem__)


def _dump(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
