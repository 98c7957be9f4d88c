"""Text that looks like a special token and is none, as its ids tell: marked, so that no reader takes it for one."""

from collections.abc import Sequence
from itertools import pairwise

from dsv4cli.engine.text import tokens

# a noncharacter of Unicode, which no text has: set before the last character of a lookalike
MARK = "\ufdd0"
LONGEST = max(map(len, tokens.SPECIAL))
_LAST = tuple({token[-1] for token in tokens.SPECIAL})


def lookalikes(text: str, start: int) -> list[int]:
    """Where in a text marks belong: before the last character of each lookalike that ends behind `start`, in order."""
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
    """A part of a text with the marks that belong into it, at these places of the whole."""
    inside = [place for place in places if start <= place < end]
    cuts = [start, *inside, end]
    return MARK.join(text[first:last] for first, last in pairwise(cuts))


def unmarked(text: str) -> str:
    """The text itself."""
    return text.replace(MARK, "")
