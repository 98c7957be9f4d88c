"""Code in an answer of `dsv4 chat`: every character stays, and its colours can be read on black and on white."""

import re

import pytest

from dsv4cli.commands.chat.highlight import MOST_LINES, STYLES, Code
from dsv4cli.commands.chat.inline import CODE
from dsv4cli.commands.chat.layout import painted
from tests.support.slow import slow

PYTHON = (
    "def f(x: int) -> str:",
    '    """What',
    '    it is."""',
    "",
    "\treturn f'{x!r}' * 2  # so",
    "    ",
    "@d",
    "class A: pass",
)


def test_a_string_over_several_lines_keeps_its_colour():
    code = Code("python")
    lines = [painted(code.push(line)) for line in PYTHON]
    assert lines[0].startswith("\x1b[35mdef\x1b[0m \x1b[1mf\x1b[0m(")
    assert [line[:5] for line in lines[1:3]] == ["    \x1b", "\x1b[31m"]
    assert lines[4].endswith("  \x1b[2m# so\x1b[0m")


@pytest.mark.parametrize(
    "language", ["python", *slow("C++", "sh"), "console", *slow("diff", "json", "html", "no such language"), ""]
)
def test_no_character_is_lost(language):
    code = Code(language)
    lines = (
        *PYTHON,
        "int *p = &a[1]; /* open",
        "$ ls *.py \\",
        "<b>&amp;</b>",
        "  ",
        "\t",
        "世界",
        "x" * 2000,
        '{"a": [1,',
    ) * 2
    for line in lines * (MOST_LINES // len(lines) + 2):
        assert "".join(run.text for run in code.push(line)) == line


# xterm's own sixteen colours (XTerm-col.ad), which are harder to read than most
XTERM = {31: (205, 0, 0), 35: (205, 0, 205), 94: (92, 92, 255)}


def luminance(colour):
    """Relative luminance of WCAG 2."""
    linear = [value / 255 / 12.92 if value <= 10 else ((value / 255 + 0.055) / 1.055) ** 2.4 for value in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_colours_can_be_read_on_black_and_on_white():
    codes = {int(code) for style in (*STYLES.values(), CODE) for code in re.findall(r"\d+", style)}
    for code in codes - {1, 2}:
        value = luminance(XTERM[code])
        # WCAG 2 asks for 3 to 1 of large text and of signs
        assert min((value + 0.05) / 0.05, 1.05 / (value + 0.05)) >= 3
