"""Encodes text to nano's ids without the `tokenizers` package: same result, and fast for words seen before."""

import json
import re
from itertools import pairwise
from pathlib import Path

from dsv4cli.engine.text import tokens
from dsv4cli.engine.text.tokenizer import FIRST_BYTE

FILE = Path(__file__).resolve().parents[2] / "dsv4cli" / "nano" / "tokenizer.json"
FIRST_MERGE = FIRST_BYTE + 256

# a pattern with the same meaning in `re` and in `tokenizers`: no Unicode classes
PATTERN = r" ?[A-Za-z_]+|[0-9]| ?[^ \t\r\nA-Za-z0-9_]+|[ \t\r\n]+(?![^ \t\r\n])|[ \t\r\n]+"
_SPECIAL = re.compile(f"({'|'.join(map(re.escape, tokens.SPECIAL))})")
_WORDS = re.compile(PATTERN)
_MOST_CACHED = 200_000


class Bpe:
    """A BPE encoder that also recognizes special tokens."""

    def __init__(self, ranks: dict[tuple[int, int], int], special: dict[str, int]) -> None:
        """Create an encoder.

        Args:
            ranks: pair of ids -> merged id; lower ids merge first.
            special: text -> id.
        """
        self._ranks = ranks
        self._special = special
        self._known: dict[str, tuple[int, ...]] = {text: (id,) for text, id in special.items()}

    @classmethod
    def from_file(cls, path: Path = FILE) -> "Bpe":
        """Load the vocabulary of a tokenizer.json that tools.nano.vocabulary wrote."""
        value = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = value["model"]["vocab"]
        ranks = {
            (vocabulary[left], vocabulary[right]): vocabulary[left + right] for left, right in value["model"]["merges"]
        }
        return cls(ranks, {token["content"]: token["id"] for token in value["added_tokens"]})

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""
        known = self._known
        ids: list[int] = []
        for piece in pieces(text):
            found = known.get(piece)
            if found is None:
                found = self._learn(piece)
            ids += found
        return ids

    def _learn(self, piece: str) -> tuple[int, ...]:
        if len(self._known) > _MOST_CACHED:
            self._known = {text: (id,) for text, id in self._special.items()}
        ids = tuple(merged([FIRST_BYTE + byte for byte in piece.encode()], self._ranks))
        self._known[piece] = ids
        return ids


def pieces(text: str) -> list[str]:
    """Split `text` into words and special tokens, before merging."""
    parts = _SPECIAL.split(text)
    if len(parts) == 1:
        return _WORDS.findall(text)
    found: list[str] = []
    for nth, part in enumerate(parts):
        if nth % 2:
            found.append(part)
        elif part:
            found += _WORDS.findall(part)
    return found


def merged(ids: list[int], ranks: dict[tuple[int, int], int]) -> list[int]:
    """Return a word's ids after all merges, lowest id first, left to right."""
    while len(ids) > 1:
        best = min(pairwise(ids), key=lambda pair: ranks.get(pair, 1 << 30))
        if best not in ranks:
            break
        ids = join(ids, best, ranks[best])
    return ids


def join(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """Replace every occurrence of the pair in `ids`, from the left."""
    out: list[int] = []
    at, last = 0, len(ids) - 1
    while at <= last:
        if at < last and (ids[at], ids[at + 1]) == pair:
            out.append(new)
            at += 2
        else:
            out.append(ids[at])
            at += 1
    return out
