"""Inline Markdown of a paragraph: emphasis only if CommonMark and a careful reader agree; everything else as written.

Arithmetic, pointers, globs, `__init__`, math and HTML keep every character. markdown-it finds the emphasis that
CommonMark defines; `_agreed` decides which of it a careful reader would also see as emphasis.
"""

import re
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from dsv4cli.commands.chat.layout import CJK, Run
from dsv4cli.commands.chat.math_text import may_become_formula, readable_math

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

# SGR parameters (ECMA-48); 94, bright blue, is readable on black and on white
STRONG, EMPHASIS, LINK, CODE = "1", "3", "4", "94"
STYLES = {"strong": STRONG, "em": EMPHASIS, "link": LINK}

SPAN_OF_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
MATH = re.compile(
    r"\\\(.+?\\\)|\\\[.+?\\\]|\\begin\{([^{}\n]+)\}.+?\\end\{\1\}"
    r"|\$\$.+?\$\$|(?<![^\W_])\$(?=[^\s$])(?:\\.|[^$\n\\])*?(?<=[^\s\\])\$(?![\d$])",
    re.DOTALL,
)
MATH_BEGINS = re.compile(r"\\[(\[]|\\begin\{")
ADDRESS_IN_ANGLES = re.compile(r"<[A-Za-z][A-Za-z0-9+.-]{1,31}:[^<>\s]*>|<[\w.+-]+@[\w.-]+>")
IMAGE = re.compile(r"!\[[^\[\]\n]*\]\([^()\n]*\)")
LINKED = re.compile(
    r"""\[([^\[\]\n]+)\]\(((?:[A-Za-z][A-Za-z0-9+.-]*://|mailto:|www\.|\.{0,2}/|\#)[^\s()]*(?:\([^\s()]*\)[^\s()]*)*"""
    r"""(?:[ ]"[^"\n]*")?)\)"""
)
LINK_BEGINS = re.compile(r"\[[^\[\]\n]*(?:\]\([^)\n]*)?\Z")
# a word in which a backslash escapes a Markdown mark, as in snake\_case or 2 \* 3; not in C:\*.txt
ESCAPED_WORD = re.compile(r"""(?:[\w.,;!?()'"-]|\\[*_])+""")
WORD_CHARACTER = re.compile(rf"[^\s{CJK}]")
WORD = re.compile(rf"[^\s{CJK}]*")
LONGEST_WORD = 100
BARE_ADDRESS = re.compile(rf"""(?:https?://|www\.)[^\s<>{CJK}]*[^\s<>{CJK}*_.,;:!?()\[\]{{}}'"]""")
LETTER = re.compile(rf"[^\W_{CJK}]")
IDENTIFIER = re.compile(r"[\w.()\[\]-]+", re.ASCII)
# characters allowed before and after a pair of marks; characters that the text between them cannot begin or end with
BEFORE, AFTER = "([{\"'-:>|~", ".,;:!?)]}\"'-|<>~"
NO_BEGIN, NO_END = ",;)]}|=", "([{/|=,"
BEGINS_EMPHASIS = "\"'([{<`$\\#@*_"
CODE_LIKE = re.compile(r"[=;{}]")


class Inline(NamedTuple):
    """Rendered text of a paragraph. certain: index of the first source character whose rendering may still change."""

    runs: list[Run]
    certain: int


class Pair(NamedTuple):
    """Emphasis marks at [opened, start) and [end, closed), with the emphasized text in between."""

    opened: int
    start: int
    end: int
    closed: int


def inline(text: str, style: str = "") -> Inline:
    """Render the text of a paragraph in `style`, applying its inline marks."""
    notes: dict[str, Any] = {"open": [], "weak": [], "kept": []}
    tokens = _parser().parseInline(text, notes)[0].children or []
    pairs = _agreed_pairs(text, tokens)
    # a `$` or `<` that probably stays text matters only if marks follow it
    marks = [*notes["kept"], *(pair.opened for pair in pairs.values())]
    weak = [at for at in notes["weak"] if any(mark > at for mark in marks)]
    return Inline(_runs(tokens, pairs, style), min([*notes["open"], *weak], default=len(text)))


def _runs(tokens: "Sequence[Token]", pairs: dict[int, Pair], style: str) -> list[Run]:
    runs: list[Run] = []
    styles = [style] if style else []
    for token in tokens:
        kind, _, side = token.type.rpartition("_")
        if kind in STYLES and (kind == "link" or token.meta["at"] in pairs):
            if side == "open":
                styles.append(STYLES[kind])
                continue
            styles.remove(STYLES[kind])
        shown = _literal(token, pairs)
        if shown:
            now = ";".join([*styles, CODE] if token.type == "code_inline" else styles)
            runs.append(Run(shown, ";".join(dict.fromkeys(now.split(";")))))
    return runs


def _literal(token: "Token", pairs: dict[int, Pair]) -> str:
    """Return the visible text of a token."""
    if token.type in ("softbreak", "hardbreak"):
        return "\n"
    if token.type.startswith(("strong", "em")):
        return "" if token.meta["at"] in pairs else token.markup
    if token.type == "link_close":
        return f" ({token.meta['address']})" if token.meta["address"] else ""
    return token.content


def _agreed_pairs(text: str, tokens: "Sequence[Token]") -> dict[int, Pair]:
    """Return the accepted emphasis pairs, under the text positions of both their tokens."""
    found: list[tuple[int, int, Pair]] = []
    begun: list[Token] = []
    for token in tokens:
        if token.type in ("strong_open", "em_open"):
            begun.append(token)
        elif token.type in ("strong_close", "em_close"):
            first, size = begun.pop().meta["at"], len(token.markup)
            last = token.meta["at"]
            found.append((first, last, Pair(first + 1 - size, first + 1, last, last + size)))
    used = {at for *_, pair in found for at in (*range(pair.opened, pair.start), *range(pair.end, pair.closed))}
    addresses = [match.span() for match in BARE_ADDRESS.finditer(text)]
    agreed = {}
    for first, last, pair in found:
        if _whole(text, pair, used) and _outside(addresses, pair) and _agreed(text, pair):
            agreed[first] = agreed[last] = pair
    return agreed


def _whole(text: str, pair: Pair, used: set[int]) -> bool:
    """Return whether the runs of marks around a pair are used up completely."""
    mark = text[pair.opened]
    around = (pair.opened - 1, pair.start, pair.end - 1, pair.closed)
    return all(text[at : at + 1] != mark or at in used for at in around if at >= 0)


def _outside(addresses: list[tuple[int, int]], pair: Pair) -> bool:
    return not any(begin < at < end for begin, end in addresses for at in (pair.opened, pair.end))


def _agreed(text: str, pair: Pair) -> bool:
    """Return whether a careful reader would also see a CommonMark pair as emphasis."""
    strong, mark = pair.start - pair.opened == 2, text[pair.opened]
    before = text[max(pair.opened - 4, 0) : pair.opened].rstrip("*_")[-1:]
    after = text[pair.closed : pair.closed + 4].lstrip("*_")[:1]
    between = text[pair.start : pair.end]
    if not _at_word_edges(before, after, between, strong):
        return False
    if between[0] in NO_BEGIN or between[-1] in NO_END:
        return False
    if mark == "_":
        return IDENTIFIER.fullmatch(between) is None
    plain = SPAN_OF_CODE.sub("", between)
    begins = between[0].isalnum() or not between[0].isascii() or between[0] in BEGINS_EMPHASIS
    return strong or (begins and CODE_LIKE.search(plain) is None)


def _at_word_edges(before: str, after: str, between: str, strong: bool) -> bool:
    """Return whether the marks are at word edges, rather than inside an expression, a path or a pattern."""
    if LETTER.match(before) or LETTER.match(after):
        return False
    if before and before in "\"'" and (before == after or not between[0].isalnum()):
        return False
    slash = "/" if strong and between[0].isalnum() else ""
    begins = not before or before.isspace() or not before.isascii() or before in BEFORE + slash
    bracket = "(/" if strong else ""
    return begins and (not after or after.isspace() or not after.isascii() or after in AFTER + bracket)


@cache
def _parser() -> "MarkdownIt":
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": True})
    parser.disable(["autolink", "entity", "image"])
    parser.inline.ruler.at("escape", _as_written)
    parser.inline.ruler.at("backticks", _code)
    parser.inline.ruler.at("emphasis", _delimiters)
    parser.inline.ruler.at("link", _link)
    parser.inline.ruler.push("open", _note_open)
    parser.inline.ruler2.after("emphasis", "open", _note_delimiters)
    return parser


def _as_written(state: "StateInline", silent: bool) -> bool:
    """Rule for math, addresses in angle brackets, images, and characters escaped with a backslash."""
    text, at = state.src, state.pos
    for pattern in (MATH, ADDRESS_IN_ANGLES, IMAGE):
        found = pattern.match(text, at, state.posMax)
        if found:
            state.pending += readable_math(found[0]) if pattern is MATH else found[0]
            state.pos = found.end()
            return True
    if text[at] != "\\":
        return False
    if MATH_BEGINS.match(text, at):
        state.env["open"].append(at)
    escaped = text[at + 1 : at + 2]
    pair = bool(escaped) and escaped.isascii() and not escaped.isalnum() and not escaped.isspace()
    hidden = pair and escaped in "*_" and _is_escaped_word(text, at)
    state.pending += ("" if hidden else "\\") + (escaped if pair else "")
    state.pos += 2 if pair else 1
    return True


def _is_escaped_word(text: str, at: int) -> bool:
    begin = at
    while begin > at - LONGEST_WORD and WORD_CHARACTER.match(text[begin - 1 : begin]):
        begin -= 1
    word = WORD.match(text, begin)
    return word is not None and ESCAPED_WORD.fullmatch(word[0]) is not None


def _code(state: "StateInline", silent: bool) -> bool:
    """Rule for code spans, which keep their line breaks. Unmatched backticks are text."""
    if state.src[state.pos] != "`":
        return False
    found = SPAN_OF_CODE.match(state.src, state.pos, state.posMax)
    if not found:
        run = re.compile("`+").match(state.src, state.pos)
        assert run is not None
        state.env["open"].append(state.pos)
        state.pending += run[0]
        state.pos = run.end()
        return True
    state.env["kept"].append(state.pos)
    text = found[2]
    padded = len(text) > 2 and text[0] == text[-1] == " " and text.strip(" ")
    state.push("code_inline", "code", 0).content = text[1:-1] if padded else text
    state.pos = found.end()
    return True


def _delimiters(state: "StateInline", silent: bool) -> bool:
    """Rule for emphasis marks, as in markdown-it, but with the text position stored in each token."""
    from markdown_it.rules_inline.state_inline import Delimiter

    mark = state.src[state.pos]
    if silent or mark not in "*_":
        return False
    scanned = state.scanDelims(state.pos, mark == "*")
    for at in range(state.pos, state.pos + scanned.length):
        token = state.push("text", "", 0)
        token.content = mark
        token.meta = {"at": at}
        state.delimiters.append(
            Delimiter(ord(mark), scanned.length, len(state.tokens) - 1, -1, scanned.can_open, scanned.can_close)
        )
    state.pos += scanned.length
    return True


def _link(state: "StateInline", silent: bool) -> bool:
    """Rule for links: the text, then the address in parentheses. Code such as `f[i](x)` is not a link."""
    text, at, end = state.src, state.pos, state.posMax
    found = LINKED.match(text, at, end)
    if silent or not found or state.linkLevel or re.match(r"[\w)\]]", text[at - 1 : at] if at else ""):
        return False
    state.env["kept"].append(at)
    state.push("link_open", "a", 1)
    state.linkLevel += 1
    state.pos, state.posMax = found.span(1)
    state.md.inline.tokenize(state)
    state.linkLevel -= 1
    address = found[2]
    state.push("link_close", "a", -1).meta = {"address": "" if found[1] == address else address}
    state.pos, state.posMax = found.end(), end
    return True


def _note_open(state: "StateInline", silent: bool) -> bool:
    """Record text that may still become math, a link or a tag. Consumes nothing."""
    text, at = state.src, state.pos
    formula = text.startswith("$$", at) or (text[at] == "$" and may_become_formula(text[at + 1 :]))
    if formula or (text[at] == "[" and LINK_BEGINS.match(text, at)):
        state.env["open"].append(at)
    elif text[at] == "$" or (text[at] == "<" and re.match(r"[A-Za-z/!?]", text[at + 1 : at + 2])):
        state.env["weak"].append(at)
    return False


def _note_delimiters(state: "StateInline") -> None:
    """Record emphasis marks that have no partner yet but may get one."""
    inner = [meta["delimiters"] for meta in state.tokens_meta if meta and "delimiters" in meta]
    for delimiter in (one for delimiters in (state.delimiters, *inner) for one in delimiters):
        at = (state.tokens[delimiter.token].meta or {}).get("at")
        if at is not None and delimiter.open and delimiter.end == -1 and not LETTER.match(state.src[at - 1 : at]):
            state.env["open"].append(at)
