r"""Compare short LaTeX formulas by their notation, as the MATH benchmark does. No torch.

Like the scorers of MATH (Hendrycks et al., `is_equiv`) and Minerva (`normalize_final_answer`), this ignores spaces,
fonts, redundant braces and units, and normalizes the spelling of fractions and roots. Numbers are compared by value.
Nothing is rearranged: `1+x` is not `x+1`. One check is stricter than in both: formulas whose units or names (`x=5`,
`y=5`) contradict each other differ.
"""

import re
from typing import NamedTuple

from dsv4cli.engine.evaluation.latex import MAX_LENGTH, TOKEN, canonical, value, with_commands

_TEXT_UNIT = re.compile(
    r"(?P<value>.*[^\s=+\-,(<>:])\s*\\(?:text|mbox|mathrm|textrm)\s*\{(?P<unit>[^{}]*)\}(?P<power>\^\{?\d\}?)?"
)
_WORD_UNIT = re.compile(r"(?P<value>.*[\d}])\s+(?P<unit>[A-Za-z]{2}[A-Za-z ]*)(?P<power>\^\{?\d\}?)?")
_SYMBOL_UNIT = re.compile(r"(?P<value>.*[^\s\\])\s*(?P<unit>\\?%|\^\s*\{?\s*\\circ\s*\}?|\\degree)")
_DOLLARS = re.compile(r"(-?)\\?\$\s*(-?[\d.].*)")
_UNIT_NAMES = {
    "mm": "mm millimeter millimetre", "cm": "cm centimeter centimetre", "m": "m meter metre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft foot feet", "yd": "yd yard", "mi": "mi mile",
    "s": "s sec second", "min": "min minute", "h": "h hr hour", "g": "g gm gram", "kg": "kg kilogram", "lb": "lb pound",
    "L": "l liter litre", "$": "dollar", "°": "degree", "%": "percent", "mph": "mph",
}  # fmt: skip
_UNITS = {word: unit for unit, words in _UNIT_NAMES.items() for word in words.split()}
_AREAS = {"square": "^2", "sq": "^2", "cubic": "^3"}

_AND = re.compile(
    r",?\s*\\(?:text|mbox|mathrm)\s*\{\s*,?\s*(?:and|or)\s*\}\s*|(?<=[\d})])\s*,?\s+(?:and|or)\s+(?=[-\d\\(])"
)
# before `=`: variables, sums of them, lengths or function values; digits only in subscripts and arguments
_NAMED = re.compile(
    r"(?P<name>(?!-)(?:[A-Za-z+\-|'{}]|\\(?!frac|sqrt|leq|geq|neq|in\b)[A-Za-z]+ |_\{[^{}]*\}|\([^()=]*\))+?)"
    r"(?:=|\\in )(?P<rest>[^=]+)"
)
_FRAME = re.compile(r"(?P<opening>[(\[]|\\\{|\\begin\{[a-z]+\}).*(?P<closing>[)\]]|\\\}|\\end\{[a-z]+\})", re.DOTALL)
_OPENING, _CLOSING = ("(", "[", "{", r"\{", r"\begin"), (")", "]", "}", r"\}", r"\end")


class Quantity(NamedTuple):
    """A formula in canonical form, the name before it (the `x` of `x=5`) and its unit. Both are "" if absent."""

    formula: str
    unit: str = ""
    name: str = ""


def same_formula(one: str, other: str) -> bool:
    r"""Return whether two short formulas are equal apart from their notation.

    `\dfrac12` equals `\frac{1}{2}` and 0.5, `x = 5` equals `5`, `90^\circ` equals `90`; `1+x` does not equal `x+1`.
    """
    if canonical(one) == canonical(other):
        return True
    first, second = quantity(one), quantity(other)
    if _contradict(first.unit, second.unit) or _contradict(first.name, second.name):
        return False
    return _same(first.formula, second.formula)


def _contradict(one: str, other: str) -> bool:
    return bool(one and other and one != other)


def quantity(text: str) -> Quantity:
    """Split off the name and the unit of a formula, and write the formula in canonical form."""
    text = text.strip().rstrip(".").strip()
    if len(text) > MAX_LENGTH:
        return Quantity(text)
    text, unit = _split_unit(_AND.sub(",", with_commands(text)))
    formula = canonical(text)
    found = _NAMED.fullmatch(formula)
    return Quantity(found["rest"], unit, found["name"]) if found else Quantity(formula, unit)


def _split_unit(text: str) -> tuple[str, str]:
    """Return the text without its unit, and the unit."""
    if text.startswith("$") and text.endswith("$"):
        text = text.strip("$").strip()
    dollars = _DOLLARS.fullmatch(text)
    if dollars:
        return dollars[1] + dollars[2].removesuffix("$"), "$"
    for pattern in (_SYMBOL_UNIT, _TEXT_UNIT, _WORD_UNIT):
        found = pattern.fullmatch(text)
        unit = _unit(found) if found else ""
        if found and unit and (pattern is not _WORD_UNIT or value(canonical(found["value"])) is not None):
            return found["value"], unit
    return text, ""


def _unit(found: re.Match[str]) -> str:
    """Return the canonical name of a unit, such as `cm^2`; "" if the letters are more likely variables."""
    if found.re is _SYMBOL_UNIT:
        return "%" if "%" in found["unit"] else "°"
    raised, names = (found["power"] or "").replace("{", "").replace("}", ""), []
    # in \text, a single letter is a unit only if it is known (5\mathrm{i} is a number); outside, 4 letters are needed
    shortest = 2 if found.re is _TEXT_UNIT else 4
    for word in found["unit"].lower().strip(" .~").split():
        name = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
        if word in _AREAS:
            raised = _AREAS[word]
        elif name is None and len(word) < shortest:
            return ""
        else:
            names.append(name or word.removesuffix("s"))
    return " ".join(names) + raised if names else ""


def _same(first: str, second: str) -> bool:
    """Return whether two canonical formulas are equal: as texts, by value, or element by element."""
    if first == second or _bare_letter(first) == _bare_letter(second) != "":
        return True
    values = value(first), value(second)
    if None not in values:
        return values[0] == values[1]
    if re.fullmatch("[A-Za-z]{3,}", first) and first.casefold() == second.casefold():
        return True
    return _same_elements(first, second)


def _bare_letter(formula: str) -> str:
    """Return the letter of a formula that is a choice, `B` or `(B)`; else ""."""
    found = re.fullmatch(r"\(?([A-Z])\)?", formula)
    return found[1] if found else ""


def _same_elements(first: str, second: str) -> bool:
    ours, theirs = _elements(first), _elements(second)
    if ours is None or theirs is None or ours.frame != theirs.frame or len(ours.parts) != len(theirs.parts):
        return False
    if ours.frame[:2] != (r"\{", r"\}"):
        return all(map(_same, ours.parts, theirs.parts))
    rest = list(theirs.parts)
    for one in ours.parts:
        at = next((number for number, two in enumerate(rest) if _same(one, two)), None)
        if at is None:
            return False
        del rest[at]
    return True


class _Elements(NamedTuple):
    """The elements of a list, a tuple, an interval, a set or a matrix.

    Attributes:
        frame: opening bracket, closing bracket and separators.
    """

    frame: tuple[str, str, str]
    parts: list[str]


def _elements(formula: str) -> _Elements | None:
    """Return the elements of a canonical formula. None if it has only one, or its brackets do not match."""
    found = _FRAME.fullmatch(formula)
    opening, closing = (found["opening"], found["closing"]) if found else ("", "")
    depth, parts, separators = 0, [""], ""
    for token in TOKEN.findall(formula[len(opening) : len(formula) - len(closing)]):
        depth += (token in _OPENING) - (token in _CLOSING)
        if depth < 0:
            return None
        if depth == 0 and token in (",", "&", r"\\"):
            parts.append("")
            separators += token
        else:
            parts[-1] += token
    return _Elements((opening, closing, separators), [canonical(one) for one in parts]) if separators else None
