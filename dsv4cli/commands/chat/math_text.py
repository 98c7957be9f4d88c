r"""LaTeX math as readable text: `\frac{a}{b}` as a/b, `x^2` as x². Anything not understood stays as written.

pylatexenc drops unknown commands and leaves `x^2` unchanged; here no text may get lost.
"""

import re
from typing import Literal, NamedTuple

from dsv4cli.commands.chat import math_symbols as known

TOKEN = re.compile(r"\\(?:[A-Za-z]+\*?|.)|\d+(?:[.,]\d+)*|\s+|.", re.DOTALL)
DELIMITERS = (("\\(", "\\)"), ("\\[", "\\]"), ("$$", "$$"), ("$", "$"))
# text between two `$` is a formula, not two amounts of money, if it has a letter or a LaTeX sign and, outside of
# commands, no three letters in a row
COMMAND = re.compile(r"\\[A-Za-z]+(?:\{[^{}]*\})?")
WORD = re.compile(r"[^\W\d_]{3}")
LETTER = re.compile(r"[^\W\d_]|[\\^_=]")
# start and end of an environment, each possibly on a line of its own
BEGIN, END = re.compile(r"\\begin\{([^{}]+)\}(?:\{[lcr|]*\})?"), re.compile(r"\\end\{([^{}]+)\}")
SIZES = re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?)")
# separators of columns and rows in a matrix or an alignment
COLUMN, ROW = "\x1f", "\x1e"
SIGNS = frozenset("+-=<>,;:/")
DIFFERENTIAL = re.compile(r"[d∂] ?[^\W\d_]\W*")
# characters after a fraction that make parentheses around it unnecessary
CLOSING = frozenset(")]}|.!?⌋⌉⟩‖")


class UnreadableMath(Exception):
    """The structure of a formula is not understood."""


class Term(NamedTuple):
    """A part of a formula. kind: Decides when the part needs parentheses."""

    text: str
    kind: Literal["atom", "sign", "function", "fraction", "space"] = "atom"


def readable_math(source: str) -> str:
    """Return a formula, given with its delimiters, as text with the same line breaks; unchanged if unreadable."""
    inner = source
    for opening, closing in DELIMITERS:
        if source.startswith(opening) and source.endswith(closing) and len(source) > len(opening + closing):
            inner = source[len(opening) : -len(closing)]
            if opening == "$" and not is_formula(inner):
                return source
            break
    text = _read(inner)
    return source if text is None or not text.strip() or text.count("\n") != source.count("\n") else text


def is_formula(text: str) -> bool:
    """Return whether text between two `$` is math."""
    return LETTER.search(text) is not None and WORD.search(COMMAND.sub("", text)) is None


def may_become_formula(text: str) -> bool:
    """Return whether the text so far after a `$` can still become math, if another `$` follows on the same line."""
    whole_words = re.sub(r"\w*\Z", "", COMMAND.sub("", text))
    return text[:1].strip() != "" and "\n" not in text and WORD.search(whole_words) is None


def readable_line(line: str) -> str | None:
    """Return one line of a displayed formula as text, or None if it has only delimiters."""
    body = line.strip()
    for mark in ("\\[", "\\]", "$$"):
        body = body.removeprefix(mark).removesuffix(mark).strip()
    opened, closed = BEGIN.match(body), END.search(body)
    before = after = ""
    if opened and opened[1] in (*known.BRACKETS, *known.PLAIN) and not closed:
        body, before = body[opened.end() :], known.BRACKETS.get(opened[1], "")[:1]
    elif closed and closed.end() == len(body) and closed[1] in (*known.BRACKETS, *known.PLAIN) and not opened:
        body, after = body[: closed.start()], known.BRACKETS.get(closed[1], "")[1:]
    text = _read(re.sub(r"\\\\(?:\[[^\[\]]*\])?\s*$", "", body))
    if text is None:
        return line
    shown = f"{before} {text.strip()} {after}".strip()
    return line[: len(line) - len(line.lstrip())] + shown if shown else None


def _read(tex: str) -> str | None:
    """Return math without delimiters as text, or None if it cannot be read."""
    try:
        text = _joined(MathReader(tex).items())
    except (UnreadableMath, RecursionError):
        return None
    text = re.sub(rf" *{COLUMN} *(?=[=<>≤≥≠≈])|(?<=[=<>≤≥≠≈]) *{COLUMN} *", " ", text)
    text = re.sub(rf" *{ROW} *", "; ", re.sub(rf" *{COLUMN} *", "  ", text)).strip(" ;")
    return re.sub(r"(?<=[(\[]) +| +(?=[)\]])", "", text)


class MathReader:
    """A recursive-descent parser of LaTeX math."""

    def __init__(self, tex: str) -> None:
        self._tokens = TOKEN.findall(tex)
        self._at = 0

    def items(self, end: str = "") -> list[Term]:
        """Read terms up to an end token, or to the end of the formula."""
        found: list[Term] = []
        while self._at < len(self._tokens):
            token = self._next()
            if token == end:
                return found
            self._add(found, token)
        if end:
            raise UnreadableMath
        return found

    def _next(self) -> str:
        if self._at >= len(self._tokens):
            raise UnreadableMath
        self._at += 1
        return self._tokens[self._at - 1]

    def _ahead(self) -> str:
        return self._tokens[self._at] if self._at < len(self._tokens) else ""

    def _add(self, found: list[Term], token: str) -> None:
        if token.isspace():
            found.append(Term("\n" * token.count("\n") or " ", "space"))
        elif token == "{":
            found.append(Term(_joined(self.items("}"))))
        elif token in ("}", "\\end"):
            raise UnreadableMath
        elif token in "^_":
            self._script(found, token)
        elif token == "&":
            found.append(Term(COLUMN, "space"))
        elif token.startswith("\\") and len(token) > 1:
            self._command(found, token[1:])
        else:
            found.append(Term(token, "sign" if token in SIGNS else "atom"))

    def _argument(self) -> list[Term]:
        """Read a group or the next token. A number is read digit by digit: `\\frac12` has two arguments."""
        while self._ahead().isspace():
            self._at += 1
        token = self._next()
        if token == "{":
            return self.items("}")
        if token in "^_&":
            raise UnreadableMath
        if token[0].isdigit() and len(token) > 1:
            self._tokens[self._at - 1 : self._at] = [token[0], token[1:]]
            token = token[0]
        found: list[Term] = []
        self._add(found, token)
        return found

    def _raw(self) -> str:
        """Read the text of a group, keeping its spaces."""
        if self._next() != "{":
            raise UnreadableMath
        start = self._at
        self.items("}")
        return "".join(self._tokens[start : self._at - 1])

    def _script(self, found: list[Term], mark: str) -> None:
        argument = _joined(self._argument()).strip()
        base = found.pop() if found and found[-1].kind != "space" else Term("")
        text = f"({base.text})" if base.kind == "fraction" else base.text
        found.append(Term(text + _scripted(argument, mark), "function" if base.kind == "function" else "atom"))

    def _command(self, found: list[Term], name: str) -> None:
        if name == "\\":
            self._optional()
            found.append(Term(ROW, "space"))
        elif name in known.SPACES:
            found.append(Term(known.SPACES[name], "space"))
        elif name in known.OPERATORS:
            found.append(Term(f" {known.OPERATORS[name]} ", "sign"))
        elif name in known.SYMBOLS:
            found.append(Term(known.SYMBOLS[name]))
        elif name in known.FUNCTIONS:
            found.append(Term(name, "function"))
            if self._ahead() and self._ahead()[0] not in " \n\t([{^_)}],.":
                found.append(Term(" ", "space"))
        elif SIZES.fullmatch(f"\\{name}"):
            self._delimiter(found)
        elif name == "begin":
            found.append(self._environment())
        else:
            found.append(self._structure(name))

    def _structure(self, name: str) -> Term:
        if name in known.FRACTIONS:
            top, bottom = self._argument(), self._argument()
            return Term(f"{_operand(top, product=True)}/{_operand(bottom)}", "fraction")
        if name == "sqrt":
            index = self._optional()
            root = {"": "√", "3": "∛", "4": "∜"}.get(index) or f"{_scripted(index, '^')}√"
            return Term(f"{root}{_operand(self._argument())}")
        if name in known.TEXTS:
            return Term(self._raw())
        if name in known.STYLES:
            return Term(_joined(self._argument()))
        if name == "mathbb":
            return Term("".join(known.BLACKBOARD.get(letter, letter) for letter in _joined(self._argument())))
        if name in known.ACCENTS:
            return Term("".join(letter + known.ACCENTS[name] for letter in _joined(self._argument())))
        shapes = {"boxed": "[{}]", "fbox": "[{}]", "pmod": " (mod {})", "tag": "  ({})", "binom": "C({}, {})"}
        if name not in shapes:
            return self._unknown(name)
        arguments = [_joined(self._argument()).strip() for _ in range(shapes[name].count("{}"))]
        return Term(shapes[name].format(*arguments))

    def _unknown(self, name: str) -> Term:
        text = f"\\{name}"
        while self._ahead() == "{":
            self._at += 1
            text += f"{{{_joined(self.items('}'))}}}"
        return Term(text + " " * (self._ahead()[:1].isalpha()))

    def _optional(self) -> str:
        """Read an argument in square brackets, if there is one."""
        if self._ahead() != "[":
            return ""
        self._at += 1
        return _joined(self.items("]")).strip()

    def _delimiter(self, found: list[Term]) -> None:
        while self._ahead().isspace():
            self._at += 1
        token = self._next()
        if token != ".":
            self._add(found, token)

    def _environment(self) -> Term:
        name = self._raw()
        if name == "array":
            self._raw()
        start, depth = self._at, 1
        while depth:
            depth += {"\\begin": 1, "\\end": -1}.get(self._next(), 0)
        inner = MathReader("".join(self._tokens[start : self._at - 1]))
        if self._raw() != name or name not in (*known.BRACKETS, *known.PLAIN):
            raise UnreadableMath
        text, bracket = _joined(inner.items()).strip(f" {ROW}"), known.BRACKETS.get(name, "")
        return Term(bracket[:1] + (" " if name == "cases" else "") + text + bracket[1:])


def _scripted(text: str, mark: str) -> str:
    """Return a text as superscript or subscript characters, or after its mark if Unicode lacks one of them."""
    table, tight = (known.SUPERSCRIPTS if mark == "^" else known.SUBSCRIPTS), text.replace(" ", "")
    if tight and all(letter in table for letter in tight):
        return "".join(table[letter] for letter in tight)
    bare = len(text) == 1 or text.isdigit() or (mark == "_" and text.isalnum())
    return mark + (text if bare else f"({text})")


def _operand(items: list[Term], *, product: bool = False) -> str:
    """Return an operand of a fraction or root, in parentheses if needed.

    product: whether a product of factors can do without them.
    """
    text, parts, depth, outside = (
        _joined(items).strip(),
        [item for item in items if item.text.strip()],
        0,
        list[Term](),
    )
    for part in parts:
        depth -= part.text == ")"
        if not depth:
            outside.append(part)
        depth += part.text == "("
    factors = all(part.kind == "atom" for part in outside)
    enclosed = len(outside) == 2 and text[0] + text[-1] == "()"
    single = len(parts) == 1 or enclosed or DIFFERENTIAL.fullmatch(text)
    return text if factors and (single or product) else f"({text})"


def _joined(items: list[Term]) -> str:
    """Return the text of a formula's terms. A fraction between factors gets parentheses."""
    text = ""
    for number, (part, kind) in enumerate(items):
        if kind == "fraction":
            before = text.rstrip(" ")[-1:]
            after = next((one for one in items[number + 1 :] if one.text.strip()), Term("", "space"))
            if before.isdigit():
                part = f" {part}"  # a mixed number
            elif before.isalpha() or (after.kind in ("atom", "function") and after.text[0] not in CLOSING):
                part = f"({part})"
        if part.startswith(" "):
            text = text.rstrip(" ")
        elif text.endswith(" "):
            part = part.lstrip(" ")
        text += part
    return text
