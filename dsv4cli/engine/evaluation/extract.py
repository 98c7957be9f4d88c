r"""What an answer says: the number, the choice or the formula in a text that explains it too; no torch.

The final part of a text is the content of its last `\boxed{…}`, else what stands behind its last `####`, else behind
the last "answer is" or "answer:" up to the end of the line; of an equation its right side.
"""

import re
import warnings
from collections.abc import Sequence
from fractions import Fraction

# digits of a number; longer ones are none
MOST_DIGITS = 60
_NUMBER = re.compile(r"(?:(?<![\w)\]}.])-)?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w)\]}.])-?\.\d+")
_FRACTION = re.compile(r"(-?)(?:\\frac\{(-?\d+)\}\{(\d+)\}|(\d+)/(\d+))")
_ANSWER = re.compile(r"\banswer(?:\s+is\b|[ \t*_]*[:=])[ \t*_:]*(?P<rest>[^\n]*)", re.IGNORECASE)
_EDGES = " \t\r\n.,:;*_`'\"$()[]"
# of formulas: what says nothing about the value
_SILENT = re.compile(r"\\left|\\right|\\[!,;: ]|\\?\$|\^\{?\\circ\}?|\\?%|(?<!\d)\s+|\s+(?!\d)")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
_SHORT_FRACTION = re.compile(r"\\frac(?:\{(\w)\}|(\w))(?:\{(\w)\}|(\w))")
_NAMED = re.compile(r"[a-zA-Z]=(?=.)")


def compiled(pattern: str) -> re.Pattern[str]:
    """A pattern of a file, of which Python's warnings say nothing to a user. Raises re.error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(pattern)


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`, braces inside it matched; None without one that is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[begin:at].strip()
    return None


def final_part(text: str) -> str | None:
    """The part of a text that its writer marks as the answer, None where nothing is marked."""
    found = boxed(text)
    if found is not None:
        return found
    _, mark, behind = text.rpartition("####")
    if mark and behind.strip():
        return behind.strip().splitlines()[0]
    marked = [one["rest"].strip() for one in _ANSWER.finditer(text)]
    return next((one for one in reversed(marked) if one), None)


def number_in(text: str) -> Fraction | None:
    """The number that a text gives as its answer: of its final part the first one, else the last one of the text."""
    part = final_part(text)
    found = None if part is None else number_of(part.rpartition("=")[2])
    if found is not None:
        return found
    numbers = _numbers(text)
    return numbers[-1] if numbers else None


def number_of(text: str) -> Fraction | None:
    r"""The value of a text that is a number or has one: `$1,234.50`, `3/4`, `\frac{3}{4}`, the 18 of `18 apples`."""
    plain = _plain(text)
    whole = _FRACTION.fullmatch(plain)
    if whole is not None and len(plain) <= MOST_DIGITS:
        sign, above, below, left, right = whole.groups()
        bottom = int(below or right)
        return Fraction(int(above or left), bottom) * (-1 if sign else 1) if bottom else None
    numbers = _numbers(text)
    return numbers[0] if numbers else None


def _numbers(text: str) -> list[Fraction]:
    found = (one[0].replace(",", "").replace("$", "") for one in _NUMBER.finditer(_signs(text)))
    return [Fraction(one) for one in found if len(one) <= MOST_DIGITS]


def _signs(text: str) -> str:
    """With the minus of ASCII, and without the marks that LaTeX sets between thousands."""
    return re.sub(r"\{,\}|\\,|\\!", "", text.replace("\N{MINUS SIGN}", "-").replace("-$", "$-"))


def choice_in(text: str, choices: Sequence[str]) -> int | None:
    """Which choice a text names: its final part, else the whole text, is the choice, or begins with its letter."""
    part = final_part(text)
    if part is not None:
        named = _named(part, choices, r"\b")
        if named is not None:
            return named
    return _named(text, choices, r"(?=[.):]|$)")


def _named(text: str, choices: Sequence[str], end: str) -> int | None:
    bare = _WRAPPED.sub(r"\1", text).strip(_EDGES)
    for number, choice in enumerate(choices):
        if bare.casefold() == choice.strip(_EDGES).casefold():
            return number
    letter = re.match(rf"([A-Z]){end}", bare)
    return choices.index(letter[1]) if letter and letter[1] in choices else None


def same_formula(one: str, other: str) -> bool:
    r"""Whether two short formulas are written alike, but for marks that say nothing of the value; numbers by value.

    `\dfrac12` is `\frac{1}{2}`, `x = 5` is `5`, `90^\circ` is `90`; `1+x` is not `x+1`.
    """
    first, second = _normal(one), _normal(other)
    if first == second:
        return True
    values = [_whole_number(text) for text in (first, second)]
    return values[0] is not None and values[0] == values[1]


def _plain(text: str) -> str:
    """Without what says nothing about the value, fractions in one spelling."""
    plain = _SILENT.sub("", _WRAPPED.sub(r"\1", _signs(text))).rstrip(".")
    plain = plain.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    return _SHORT_FRACTION.sub(lambda found: f"\\frac{{{found[1] or found[2]}}}{{{found[3] or found[4]}}}", plain)


def _normal(text: str) -> str:
    plain = _plain(text)
    return _NAMED.sub("", plain, count=1) if _NAMED.match(plain) else plain


def _whole_number(text: str) -> Fraction | None:
    if _FRACTION.fullmatch(text) or _NUMBER.fullmatch(text):
        return number_of(text)
    return None
