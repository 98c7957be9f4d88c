r"""Extract the final answer from a text that may also explain it: a number, a choice or a formula. No torch.

The final part of a text is the content of its last `\boxed{…}`. Without a box, it is what follows the last `####`.
Without that, it is what follows the last "answer is", "answer:", "correct option:" or "答案：" on the same line, or
the next line if the phrase is a heading.
"""

import re
import unicodedata
import warnings
from collections.abc import Sequence
from fractions import Fraction

from dsv4cli.engine.evaluation.formula import same_formula
from dsv4cli.engine.evaluation.number_text import number_alone, number_of, numbers_in

__all__ = ["boxed", "choice_in", "compiled", "final_part", "number_in", "number_of", "same_formula"]

_BOX = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox)\s*(?P<bare>[^\s{}$]+)|\\.|[{}]", re.DOTALL)
_HASHES = re.compile(r"(?<!#)####(?!#)[ \t]*(?P<rest>[^\n]*)")
# what follows `####` in an answer; after a Markdown heading's `####` come words or a section number
_VALUE = re.compile(r"[\s*_`$€£¥\\-]*(?:[\d.]|\\[dt]?frac|[A-Z]\W*$)(?!\d*[.):]\s+\*{0,2}[A-Za-z])")
_SUBJECT = r"(?:\banswers?\b|\b(?:correct|right|best|final)\s+(?:option|choice)\b|答案|正确(?:的)?选项)"
_VERB = r"(?:(?:is|was|(?:would|should|must|will)\s+be|equals)\b|应?该?[是为為]|[:=])"
_ANSWER = re.compile(rf"{_SUBJECT}[ \t*_]*{_VERB}", re.IGNORECASE)
_HEADING = re.compile(
    r"^[ \t#*_]*(?:(?:the|my|final|correct)[ \t]+)*(?:answer|最终答案|答案)[ \t*_]*$", re.IGNORECASE | re.MULTILINE
)
_DENIED = re.compile(r"(?:not|never|neither|incorrect|wrong|不)(?![a-z])", re.IGNORECASE)
_EDGES = " \t\r\n.,:;*_`'\"$()[]"
_WRAPPED = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
# where a sentence ends, and where an answer ends in its sentence
_SENTENCE = re.compile(r"\.(?=\s|$)|[;!?。；！？\n]")
_ASIDE = re.compile(r"[,，、](?!\d)|\(|（|\b(?:which|because|since|as|so|and)\b", re.IGNORECASE)
_STARTS = re.compile(
    r"(?:\W*\b(?:therefore|thus|exactly|about|approximately|just|simply|equal to)\b)*[\s*_`$€£¥:(\\-]*"
    r"(?:[\d.]|[dt]?frac\b|[A-Za-z]\w{0,2}\s*=)",
    re.IGNORECASE,
)
_BOLD = re.compile(r"\*\*([^*]+)\*\*")
_STATED = re.compile(r"\b(?:is|was|are|equals|to)\b|[:=是为]", re.IGNORECASE)
# patterns for choices
_LINE = re.compile(r"(?:(?i:option|choice|选项)\s*)?\(?([A-Z])(?:\)?[.):](?P<text>.*)|\)?)$")
_HEDGE = re.compile(r"[\s*)]*(?:or|and|[/,、&]|和|或)\s*(?:option\s+)?[(*]*([A-Z])(?!\w|\s+[a-z])")
_WORD = re.compile(r"\s+(?!(?:because|since|as|is|due|for|and|or)\b)[a-z']")
_CHOSEN = re.compile(
    r"(?:\b(?:pick|choose|select|go with|prefer)\s+(?:option\s+|choice\s+|answer\s+)?|(?<![不别])选择? ?:? ?)"
    r"[(*]*(?P<first>[A-Z])(?!\w*[a-z])|(?:\b[Oo]ption\s+|\b[Cc]hoice\s+|^|[.\n] ?)[(*]*(?P<second>[A-Z])[)*]*"
    r"\s+is\s+(?:the\s+)?(?:correct|right|best)\b"
)


def compiled(pattern: str) -> re.Pattern[str]:
    """Compile a pattern from a question file without Python's syntax warnings. Raises re.error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return re.compile(pattern)


def boxed(text: str) -> str | None:
    r"""Return the content of the last closed, non-empty `\boxed{…}`. `\fbox{…}` and `\boxed 5` count too."""
    content = None
    begins: list[int | None] = []  # of the open groups: where the content of a box begins, None for other groups
    for found in _BOX.finditer(text):
        if found["box"] or found[0] == "{":
            begins.append(found.end() if found["box"] else None)
            continue
        begin = begins.pop() if found[0] == "}" and begins else None
        inside = text[begin : found.start()] if begin is not None else (found["bare"] or "").rstrip(".,")
        content = inside.strip() or content
    return content


def final_part(text: str) -> str | None:
    """Return the part of a text that is marked as the answer, or None if nothing is marked."""
    found = boxed(text)
    if found is not None:
        return found
    hashes = [one["rest"].strip() for one in _HASHES.finditer(text)]
    value = next((one for one in reversed(hashes) if _VALUE.match(one)), None)
    return _marked(text) if value is None else value


def _marked(text: str) -> str | None:
    """Return what follows the last phrase such as "the answer is", skipping negated ones ("the answer is not …")."""
    text = _full_width(text)
    for end in sorted((one.end() for mark in (_ANSWER, _HEADING) for one in mark.finditer(text)), reverse=True):
        part = _next_line(text, end)
        if part and not _DENIED.match(part.lstrip(_EDGES)):
            return part
    return None


def _next_line(text: str, begin: int) -> str:
    """Return the rest of the line, or the next line with text if it is empty. Rules such as `-----` count as empty."""
    while begin < len(text):
        end = text.find("\n", begin)
        line = text[begin : end if end >= 0 else len(text)].strip()
        if line.strip(_EDGES + "=-"):
            return line.lstrip("*_: \t")
        begin = end + 1 if end >= 0 else len(text)
    return ""


def _full_width(text: str) -> str:
    """Replace full-width letters, digits and punctuation with ASCII."""
    return re.sub("[！-～]", lambda found: unicodedata.normalize("NFKC", found[0]), text)


def number_in(text: str) -> Fraction | None:
    """Return the number that a text states as its answer: from its final part, or else the last number in the text."""
    part = final_part(text)
    found = None if part is None else _stated(part)
    if found is not None:
        return found
    numbers = numbers_in(text)
    return numbers[-1] if numbers else None


def _stated(part: str) -> Fraction | None:
    """Return the number that a final part states in its first sentence with a number."""
    whole = number_alone(part)
    if whole is not None:
        return whole
    sentence = next((one for one in _SENTENCE.split(part) if numbers_in(one)), "")
    if _STARTS.match(sentence):
        begin = _right_side(_ASIDE.split(sentence)[0])
        return _right_side(sentence) if begin is None else begin
    bold = [numbers for one in _BOLD.findall(sentence) if (numbers := numbers_in(one))]
    if bold:
        return bold[-1][0]
    pieces = [numbers for one in _STATED.split(sentence) if (numbers := numbers_in(one))]
    return pieces[-1][0] if pieces else None


def _right_side(equation: str) -> Fraction | None:
    """Return the number of an equation: the last side that is only a number, else the first number of the last side."""
    sides = re.split(r"=|≈|\\approx(?![a-z])", equation)
    whole = [number for side in sides if (number := number_alone(side.strip(" $"))) is not None]
    numbers = [found[0] for side in sides if (found := numbers_in(side))]
    numbers = whole or numbers
    return numbers[-1] if numbers else None


def choice_in(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that a text names; None if it names none or several.

    Tried in order: the final part; the last line, then the first, if it is a choice or begins with its letter; a phrase
    such as "I choose B", "option B is correct" or "故选B".
    """
    part = final_part(text)
    if part is not None:
        named = _named(part, choices)
        if named is not None:
            return named
    named = _line(_full_width(text), choices)
    if named is not None:
        return named
    chosen = [one["first"] or one["second"] for one in _CHOSEN.finditer(_full_width(text))]
    return choices.index(chosen[-1]) if chosen and chosen[-1] in choices else None


def _named(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice that a final part equals, begins with as a letter, or has as its only letter."""
    whole = _whole(text, choices)
    if whole is not None:
        return whole
    bare = re.sub(r"^(?:option|choice|选项)\s*", "", _bare(text), flags=re.IGNORECASE).lstrip(_EDGES)
    letters = [
        one
        for one in re.finditer(r"(?<![A-Za-z])[A-Z](?![A-Za-z'])", bare)
        if one[0] in choices and not _WORD.match(bare, one.end())
    ]
    if not letters or _HEDGE.match(bare, letters[0].end()):
        return None
    only = {one[0] for one in letters}
    return choices.index(letters[0][0]) if letters[0].start() == 0 or len(only) == 1 else None


def _line(text: str, choices: Sequence[str]) -> int | None:
    """Return the index of the choice on the last line, or on the first. None if lines list several choices."""
    whole = _whole(text, choices)
    lines = [_bare(one) for one in text.splitlines() if one.strip(_EDGES)]
    if whole is not None or not lines:
        return whole
    found = [_LINE.match(one) for one in lines]
    labels = {one[1] for one in found if one and one[1] in choices}
    for one in (found[-1], found[0]):
        if one and one[1] in choices and (one["text"] is None or len(labels) == 1):
            return choices.index(one[1])
    return None


def _whole(text: str, choices: Sequence[str]) -> int | None:
    bare = _bare(text).casefold()
    return next((number for number, one in enumerate(choices) if bare == one.strip(_EDGES).casefold()), None)


def _bare(text: str) -> str:
    return _WRAPPED.sub(r"\1", text).strip(_EDGES)
