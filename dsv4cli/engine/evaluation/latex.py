r"""Write LaTeX formulas in canonical form, and evaluate those that are a number. No torch."""

import re
from fractions import Fraction

# characters; longer formulas equal only themselves. The longest answer in MATH-500 has 159.
MAX_LENGTH = 1000
# characters of a number that is evaluated; the value of a power may have twice as many digits
MAX_DIGITS = 60

_UNICODE = str.maketrans(
    {"−": "-", "√": r"\sqrt ", "π": r"\pi ", "θ": r"\theta ", "×": r"\times ", "·": r"\cdot ", "°": r"^\circ "}
    | {"∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "±": r"\pm "}
    | {"∈": r"\in ", "，": ",", "（": "(", "）": ")", "\u00a0": " ", "\u2009": " ", "\u202f": " "}
)
SUPERSCRIPTS = re.compile("⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]+")
_PLAIN_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
TOKEN = re.compile(r"\\\\(?:\[[^\]]*\])?|\\[A-Za-z]+\*?|\\.|\s+|.", re.DOTALL)
_FRACTIONS = {r"\frac", r"\dfrac", r"\tfrac", r"\cfrac"}
_FONTS = {
    r"\text", r"\textbf", r"\textit", r"\textrm", r"\mbox", r"\mathrm", r"\mathbf", r"\mathit", r"\mathsf",
    r"\boldsymbol", r"\bm", r"\operatorname", r"\boxed", r"\fbox",
}  # fmt: skip
_SILENT = {
    r"\left", r"\right", r"\big", r"\Big", r"\bigl", r"\bigr", r"\Bigl", r"\Bigr", r"\displaystyle", r"\textstyle",
    r"\limits", r"\quad", r"\qquad", r"\rm", r"\bf", r"\!", r"\,", r"\;", r"\:", "\\ ", "~", "$",
}  # fmt: skip
_SYNONYMS = {
    r"\le": r"\leq", r"\ge": r"\geq", r"\ne": r"\neq", r"\times": r"\cdot", "*": r"\cdot", r"\lbrace": r"\{",
    r"\rbrace": r"\}", r"\%": "%", r"\$": "$", r"\degree": r"^{\circ }", r"\lvert": "|", r"\rvert": "|",
}  # fmt: skip
_ENVIRONMENTS = {"bmatrix": "pmatrix", "Bmatrix": "pmatrix"}

_UNSIGNED = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d{1,2}(?:,\d{2})+,\d{3}|\d+(?:\.\d*)?|\.\d+)"
_NUMBER = re.compile(rf"-?{_UNSIGNED}")
_FRACTION = re.compile(
    rf"(?P<sign>-?)(?P<whole>\d+ ?)??(?:\\frac\{{(?P<above>-?{_UNSIGNED})\}}\{{(?P<below>{_UNSIGNED})\}}"
    rf"|(?P<left>{_UNSIGNED})/(?P<right>{_UNSIGNED}))"
)
_POWER = re.compile(rf"(?P<sign>-?)(?:(?P<factor>{_UNSIGNED})\\cdot )?(?P<base>\d+)\^\{{(?P<exponent>-?\d+)\}}")
_ATOM = r"(?:\d+|[A-Za-z]|\\[A-Za-z]+ |\\sqrt\{[^{}]*\})"
_SLASH = re.compile(rf"(-?)([^+\-/(),=<> ]*(?:\\[A-Za-z]+ )?)/({_ATOM})")


def with_commands(text: str) -> str:
    """Replace mathematical Unicode characters with LaTeX commands."""
    text = SUPERSCRIPTS.sub(lambda found: f"^{{{found[0].translate(_PLAIN_DIGITS)}}}", text)
    return text.translate(_UNICODE)


def canonical(text: str) -> str:
    """Return a LaTeX formula in canonical form: no spaces or fonts, and braces around every argument."""
    if len(text) > MAX_LENGTH:
        return text
    try:
        found = LatexReader(TOKEN.findall(text)).sequence("")
    except RecursionError:
        return text
    found = re.sub(r"(?:\\\\)+(?=\\end\{)", "", found).strip().rstrip(".")
    found = re.sub(r"\\cdot (?=[A-Za-z\\(])", "", found)
    found = _SLASH.sub(r"\1\\frac{\2}{\3}", found) if _SLASH.fullmatch(found) and value(found) is None else found
    return re.sub(r"^\\frac\{-([^{}+\-]*)\}", r"-\\frac{\1}", found)


class LatexReader:
    """A parser of LaTeX tokens that writes each construct in canonical form."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens, self._next = tokens, 0

    def sequence(self, end: str) -> str:
        """Return everything before the token `end`, and skip that token."""
        pieces: list[str] = []
        while (token := self._take()) not in ("", end):
            if token.isspace():
                between = pieces and pieces[-1][-1:].isdigit() and self._peek().isdigit()
                pieces.append(" " if between else "")
            else:
                pieces.append(self._piece(token))
            if not pieces[-1]:
                pieces.pop()
        return "".join(pieces)

    def _peek(self) -> str:
        return self._tokens[self._next] if self._next < len(self._tokens) else ""

    def _take(self) -> str:
        token = self._peek()
        self._next += 1
        return token

    def _piece(self, token: str) -> str:
        token = _SYNONYMS.get(token, token)
        if token in _SILENT:
            return ""
        if token == "{":
            return self.sequence("}")
        if token in _FRACTIONS:
            above = self._argument()
            return f"\\frac{{{above}}}{{{self._argument()}}}"
        if token == r"\sqrt":
            degree = self._degree()
            return f"\\sqrt{degree}{{{self._argument()}}}"
        if token in ("^", "_"):
            return f"{token}{{{self._argument()}}}"
        if token in _FONTS:
            return self._argument()
        if token in (r"\begin", r"\end"):
            name = self._argument()
            return f"{token}{{{_ENVIRONMENTS.get(name, name)}}}"
        return f"{token} " if re.fullmatch(r"\\[A-Za-z]+", token) else token[:2]

    def _argument(self) -> str:
        """Return the argument of a command: a group, a command or a single character."""
        while self._peek().isspace():
            self._take()
        token = self._take()
        return self._piece(token) if token else ""

    def _degree(self) -> str:
        while self._peek().isspace():
            self._take()
        if self._peek() != "[":
            return ""
        self._take()
        return f"[{self.sequence(']')}]"


def value(formula: str) -> Fraction | None:
    """Return the value of a canonical formula that is a single number; otherwise None.

    Numbers are decimals, fractions, mixed numbers and powers of whole numbers: `1,000`, `1 3/4`, `6\\cdot 10^{6}`.
    """
    if len(formula) > MAX_DIGITS:
        return None
    if _NUMBER.fullmatch(formula):
        return _decimal(formula)
    found = _FRACTION.fullmatch(formula)
    if found:
        above, below = _decimal(found["above"] or found["left"]), _decimal(found["below"] or found["right"])
        if not below or (found["whole"] and above < 0):
            return None
        return (int(found["whole"] or 0) + above / below) * (-1 if found["sign"] else 1)
    found = _POWER.fullmatch(formula)
    if found:
        raised = power(int(found["base"]), int(found["exponent"]))
        factor = _decimal(found["factor"] or "1") * (-1 if found["sign"] else 1)
        return None if raised is None else factor * raised
    return None


def power(base: int, exponent: int) -> Fraction | None:
    """Return base ** exponent, or None if it could have more than 2 × `MAX_DIGITS` digits."""
    if len(str(base)) * abs(exponent) > MAX_DIGITS * 2 or (base == 0 and exponent < 0):
        return None
    return Fraction(base) ** exponent


def _decimal(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", "").rstrip("."))
