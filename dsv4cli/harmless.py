"""Escaping of untrusted text, so that it cannot control a terminal, fake output, or hide; standard library only.

Use `harmless` for text from models and tools; `harmless_line` for names, values and errors, or `brief_line` to also
shorten long ones; `shell_word` for words that a user pastes into a shell.
"""

import re
import shlex
from pathlib import Path

# C0, DEL, C1, line and paragraph separator, lone surrogates, and what Unicode calls default ignorable
# (DerivedCoreProperties.txt): zero-width and format characters, marks and overrides of direction, fillers, tags
HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    "\u3164\ud800-\udfff\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0000-\U000e0fff]"
)
# PEP 383: the other surrogates are bytes of a file name that is not UTF-8
NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
JOINERS, EMOJI_FORM, KEYCAP = "\u200c\u200d", "\ufe0f", "\u20e3"
SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# in text of many lines: what a terminal obeys, and what turns the direction of all that follows
COMMANDS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
    if chr(code) not in "\n\t"
} | {0x2028: "\n", 0x2029: "\n"}
# characters of a word, more than a file name has, and of a line
LONGEST_WORD, LONGEST_LINE = 300, 4000


def harmless(text: str) -> str:
    """Return multi-line text without control characters; newlines, tabs, scripts, combining marks and emoji stay.

    Each character maps to exactly one character, so a text can be processed in pieces.
    """
    return text.translate(COMMANDS)


def harmless_line(text: str) -> str:
    r"""Return the text on one line, with invisible characters escaped, as in `a\nb` or `\u202e`. Nothing is cut.

    Joiners between letters of non-Latin scripts and inside emoji are spelling, so they stay.
    """
    return HIDDEN.sub(_shown, text)


def brief_line(text: str, word: int = LONGEST_WORD, line: int = LONGEST_LINE) -> str:
    """Return `harmless_line` of a shortened text: long words and lines are cut in the middle and show their length.

    Args:
        word: Maximum characters of a word.
        line: Maximum characters of the line.
    """
    text = re.sub(rf"\S{{{word + 1},}}", lambda found: _cut(found[0], word), text)
    return harmless_line(_cut(text, line))


def shell_word(text: str | Path) -> str:
    r"""Return a name quoted for a shell, so that the user sees and a shell reads the exact text: `'a b'`, `$'a\x0ab'`.

    A file or folder name that starts with - becomes `./-g`, because it would be read as an option.
    """
    word = str(text)
    if word.startswith("-"):
        word = f"./{word}"
    if harmless_line(word) == word:
        return shlex.quote(word)
    # bash, zsh, ksh and POSIX 2024 read it as bytes, as file names are kept; no name has another lone surrogate
    content = NO_BYTE.sub("\N{REPLACEMENT CHARACTER}", word).encode("utf-8", "surrogateescape")
    return "$'" + "".join(map(_quoted_byte, content)) + "'"


def _quoted_byte(byte: int) -> str:
    char = chr(byte)
    return f"\\{char}" if char in "\\'" else char if 32 <= byte < 127 else f"\\x{byte:02x}"


def _shown(found: re.Match[str]) -> str:
    char, at = found[0], found.start()
    return (
        char if _is_spelling(char, found.string[max(at - 1, 0) : at], found.string[at + 1 : at + 2]) else _escaped(char)
    )


def _is_spelling(char: str, before: str, after: str) -> bool:
    if char == EMOJI_FORM:
        return _is_of_other_script(before) or after == KEYCAP
    return char in JOINERS and (_is_of_other_script(before) or before == EMOJI_FORM) and _is_of_other_script(after)


def _is_of_other_script(char: str) -> bool:
    return char > "\x7f" and not HIDDEN.match(char)


def _escaped(char: str) -> str:
    code = ord(char)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"  # see NO_BYTE
    if char in SHORT:
        return SHORT[char]
    return f"\\x{code:02x}" if code < 128 else f"\\u{code:04x}" if code < 1 << 16 else f"\\U{code:08x}"


def _cut(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    begin, end = longest * 2 // 3, longest // 3
    return f"{text[:begin]}…{text[-end:]} ({len(text):,} characters)"
