"""Splitting of long texts into pieces whose tokens, concatenated, are exactly the tokens of the whole text."""

import re
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

# characters per piece; encoding one takes at most about 10 MB and 0.1 s
PIECE = 1 << 15
# (pattern, probes): if a pre-tokenizer splits every probe after its first character, it splits every text where the
# pattern ends, because no alternative of its regular expressions matches across the boundary. Letters and "_" before
# digits are excluded: special tokens contain those.
BOUNDARIES = (
    (r"\S(?= )", ("a b", "1 b", ". b", "é b", "中 b")),
    (r"[A-Za-z0-9](?=\n)", ("a\nb", "1\nb")),
    (r"[!-/:-@[-^{-~](?=[0-9])", (".1", "[1", "~1")),
    (r"[、。，！？：；](?=[一-龥])", ("。中", "，中")),
)


def boundary_of(backend: "tokenizers.Tokenizer", special: Collection[str]) -> "re.Pattern[str] | None":
    """Return a pattern that ends where texts of this vocabulary may be split, or None if no boundary is known.

    Args:
        special: the special tokens, which must not be split.
    """
    splitter = backend.pre_tokenizer
    if splitter is None:
        return None
    found = [
        pattern
        for pattern, probes in BOUNDARIES
        if all(any(end == 1 for _, (_, end) in splitter.pre_tokenize_str(probe)) for probe in probes)
        and not any(re.search(pattern, token) for token in special)
    ]
    return re.compile("|".join(found)) if found else None


def boundary_of_bytes(special: Collection[str]) -> "re.Pattern[str]":
    """Return the boundary pattern for a byte vocabulary: anywhere except inside what could be a special token."""
    return re.compile(f"[^{re.escape(''.join({*''.join(token[:-1] for token in special)}))}]")


def pieces(text: str, boundary: "re.Pattern[str] | None") -> Iterator[str]:
    """Yield the text in pieces of up to twice `PIECE` characters; pieces without a boundary are longer."""
    if boundary is None or len(text) <= PIECE:
        yield text
        return
    last = re.compile(f"(?s:.*)(?:{boundary.pattern})", boundary.flags)
    start = 0
    for window in range(0, len(text), PIECE):
        # one more character, for the pattern's lookahead
        found = last.match(text, window, window + PIECE + 1) if len(text) - window > PIECE else None
        if found:
            yield text[start : found.end()]
            start = found.end()
    yield text[start:]


def any_of(words: Collection[str]) -> str:
    """Return a regular expression that matches the longest of the words, in a time independent of their number."""
    tails: dict[str, list[str]] = {}
    for word in words:
        if word:
            tails.setdefault(word[0], []).append(word[1:])
    branches = "|".join(re.escape(first) + any_of(rest) for first, rest in tails.items())
    return f"(?:{branches}){'?' if '' in words else ''}" if branches else ""
