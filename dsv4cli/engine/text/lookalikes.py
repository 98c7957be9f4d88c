"""Marks for ordinary text that is spelled like a special token, so that parsers do not mistake it for one.

Only the token ids tell the two apart.
"""

from collections.abc import Sequence
from itertools import pairwise

from dsv4cli.engine.text import tokens

# a noncharacter of Unicode, which no text contains; inserted before the last character of a lookalike
MARK = "\ufdd0"
LONGEST = max(map(len, tokens.SPECIAL))
_LAST = tuple({token[-1] for token in tokens.SPECIAL})


def lookalikes(text: str, start: int) -> list[int]:
    """Return the ascending positions for marks: before the last character of each lookalike that ends after `start`."""
    if not any(character in text[start:] for character in _LAST):
        return []
    first, found = max(0, start - LONGEST + 1), set()
    for token in tokens.SPECIAL:
        at = text.find(token, first)
        while at >= 0:
            if at + len(token) > start:
                found.add(at + len(token) - 1)
            at = text.find(token, at + 1)
    return sorted(found)


def marked(text: str, places: Sequence[int], start: int, end: int) -> str:
    """Return `text[start:end]` with its marks.

    Args:
        places: positions of the marks in the whole text.
    """
    inside = [place for place in places if start <= place < end]
    cuts = [start, *inside, end]
    return MARK.join(text[first:last] for first, last in pairwise(cuts))


def unmarked(text: str) -> str:
    """Return the text without marks."""
    return text.replace(MARK, "")
