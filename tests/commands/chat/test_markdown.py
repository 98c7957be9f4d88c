"""Markdown of `dsv4 chat`: nothing visible is lost; marks are marks where CommonMark and a careful reader agree."""

import re
from random import Random

import pytest

from dsv4cli.commands.chat.inline import inline
from dsv4cli.commands.chat.layout import width_of
from dsv4cli.commands.chat.renderer import Renderer
from dsv4cli.harmless import harmless
from dsv4cli.output import Colours, Output
from tests.support.slow import slow
from tests.support.terminals import ESCAPES

WIDE = 10_000
BOLD, ITALIC, UNDERLINE, CODE, END = "\x1b[1m", "\x1b[3m", "\x1b[4m", "\x1b[94m", "\x1b[0m"


@pytest.fixture(autouse=True)
def math_as_written(monkeypatch):
    """Here math is only kept from being taken for marks; test_math.py has what is shown for it."""
    monkeypatch.setattr("dsv4cli.commands.chat.inline.readable_math", lambda source: source)
    monkeypatch.setattr("dsv4cli.commands.chat.renderer.readable_line", lambda line: line)


@pytest.fixture
def shown(capsys, monkeypatch):
    """What a terminal of so many columns gets of an answer, with its escape codes."""

    def show(text, columns=WIDE, size=0):
        monkeypatch.setattr("dsv4cli.commands.chat.renderer.stdout_columns", lambda: columns)
        one = Renderer(Output(Colours(stdout=True)), markdown=True, thinking=False)
        for at in range(0, len(text), size or len(text)):
            one.push("content", text[at : at + (size or len(text))])
        one.end()
        return capsys.readouterr().out

    return show


# real lines of answers in which every character counts
AS_WRITTEN = (
    "4*8=32; 3*8=24, and 2**3 + 4**5",
    "a first line\nand a second\nand a third",
    "Roses are red,  \nviolets are blue,\\\nend",
    "vector<int> v; map<string, vector<pair<int, int>>> m; cout << a << b;",
    "template <typename T> T max(T a, T b); x->y; p->next->next",
    "int *a, *b; char **argv, **envp; *p++ = *q++; int* c, *d; f(*args, **kwargs)",
    "(a)*(b)*(c) and f(x)*g(x) + h(x)*(k)*2, /* one */ x /* two */",
    "__init__, __name__ == \"__main__\", obj.__dict__, __file__ and __all__",
    "_private_ and snake_case_name, some_file_name.py, MAX_LEN, x_1 and y_2",
    r"\(x_1\), \(a*b*c\), \(x^* = y^*\) and \(\vec{v}_i\)",
    r"\[ a*b \] and \[ \sum_{i=1}^n x_i * y_i * z_i \]",
    "\\[\na_1*b_1\n- c*d*e\n+ f\n= 3\n\\]",
    "$$\n\\begin{aligned}\n- x &= 1 \\\\\n+ y_1 &= 2 * 3 * 4\n\\end{aligned}\n$$",
    "\\begin{pmatrix}\n1 & 2 \\\\\n* & *3*\n\\end{pmatrix}",
    "$a_1*b*c_2$ costs $5 and $6, not 7$; $E = mc^2$",
    "rm *.o *.a; ls **/*.py; cp src/*/test_*.py dst/; find . -name '*.c' -o -name '*.h'",
    "**/*.py and **/*.c, docs/**/x/**, `",
    r"C:\Users\me\*.txt, C:\new_dir\_x\_y, \\server\share\[1]",
    "SELECT *, count(*) FROM t WHERE a LIKE '*x*' AND b = \"*\" OR c IN (*, *)",
    "*/5 * * * * root run && 0 */2 * * * root other",
    "if (a < b && c > d || e <= f) { x = a & b | c; y = ~z; }",
    "<thinking>\nI *wonder* whether __this__ is\n</thinking>",
    '<div class="a_b *c*">text</div> <br> <!-- *no* --> &amp; &lt;b&gt; &copy;',
    "<details>\n<summary>More *text*</summary>\n\n</details>",
    "https://example.com/a_b_c/*d*/e?x=__y__&z=*1* and www.a.de/_x_/**y**",
    "<https://example.com/a_b> or <me_you@example.com>",
    "a[i](x) + f[j](y), [text][ref], [1], [^1] and [ ]",
    "[ref]: https://example.com/a_b \"title\"",
    "[^1]: A footnote with a_b*c*d in it.",
    "![a picture](https://example.com/a_b_c.png)",
    "3. third\n4. fourth\n10) tenth",
    "1986. A year that begins a line.\n2001. Another.",
    "10\n- 5\n= 5\n* 2\n= 10\n+ 3\n= 13",
    "> quoted line\n> and another\n\n>> twice",
    "Name   Age\n----   ---\nAnn     31",
    "===\ntext\n===",
    "中文内容，**注意：**后面，半角3*4*5，乘号a*b，“引号”",
    "*co*écrire, **re**élire, Ελλη*νικ*ά",
    "👩‍🚀 and 🏳️‍🌈 — “quotes”, naïve, Ελληνικά, עברית, हिन्दी",
    "#hashtag, #include <stdio.h>, C# and F#",
    "~~struck~~, ~home, a ~ b, x^2^, H~2~O, ==marked==",
    "    x = a *b* c\n    y = __d__",
    "| just | one line of bars |",
    "a | b || c and |x| + |y*z*w|",
    "Price* and value* are *not final",
    "**bold not closed, *neither this, `nor this, [nor](this",
    "*args, **kwargs; 5*x*y; x*y*z; a*b *c*d; 2 ** 3 ** 4",
    "'*' and \"*\" or (*) and [*] with \\# and \\`",
    "@decorator(a_b=*c*d) 100% of $HOME/*_x_* ; {a,b}*{c,d}*",
    "Tab\there, and\u00a0no break; \u201c*\u201d",
    "foo \\\n  --bar \\\n  --baz",
)  # fmt: skip


@pytest.mark.parametrize("text", AS_WRITTEN, ids=range(len(AS_WRITTEN)))
def test_what_a_careful_reader_would_not_take_for_a_mark_stays(shown, text):
    plain = ESCAPES.sub("", shown(text))
    assert re.sub(r"[ \t]+$", "", plain, flags=re.MULTILINE).expandtabs(4) == re.sub(
        r" +$", "", f"{text}\n", flags=re.MULTILINE
    ).expandtabs(4)


CARRIED_OUT = (
    ("an *em*, a **strong**, _both words_ and __two words__", f"an {ITALIC}em{END}, a {BOLD}strong{END}, "
     f"{ITALIC}both words{END} and {BOLD}two words{END}"),
    ("***all*** of **it *and* this**", f"{ITALIC}".replace("3", "3;1") + f"all{END} of {BOLD}it {END}"
     f"\x1b[1;3mand{END}{BOLD} this{END}"),
    ("`a*b` and ``c`d`` and ` e `", f"{CODE}a*b{END} and {CODE}c`d{END} and {CODE}e{END}"),
    ("这是**重点**内容，*斜体*字", f"这是{BOLD}重点{END}内容，{ITALIC}斜体{END}字"),
    ("**Note:** x; **`f`** (**\\(x_1\\)**): *\"so\"*.", f"{BOLD}Note:{END} x; \x1b[1;94mf{END} ({BOLD}\\(x_1\\){END}): "
     f"{ITALIC}\"so\"{END}."),
    ("**C++**, **/etc/x**, **CPU**/**GPU**, **--flag**", f"{BOLD}C++{END}, {BOLD}/etc/x{END}, {BOLD}CPU{END}/{BOLD}GPU"
     f"{END}, {BOLD}--flag{END}"),
    ("[the *page*](https://x.y/a_b) [https://z](https://z)", f"{UNDERLINE}the {END}\x1b[4;3mpage{END} "
     f"(https://x.y/a_b) {UNDERLINE}https://z{END}"),
    ("snake\\_case, 2 \\* 3 and \\*so\\*", "snake_case, 2 * 3 and *so*"),
    ("# One\n## Two\n### Three\n#### **Four** # 5", f"\x1b[1;4mOne{END}\n\x1b[1;4mTwo{END}\n{BOLD}Three{END}\n"
     f"\x1b[1;3mFour # 5{END}"),
    ("* a\n* b\n  - c\n\n    more of c\n\n- [ ] d\n+ e", "• a\n• b\n  • c\n\n    more of c\n\n• [ ] d\n+ e"),
    ("> a *quote*", f"\x1b[2m> {END}a {ITALIC}quote{END}"),
    ("one\n***\ntwo", f"one\n\x1b[2m{'─' * 20}{END}\ntwo"),
    ("text:\n```\n  a *b* <c>\n\n\td\n```\nmore", "text:\n\n  a *b* <c>\n\n\td\n\nmore"),
    ("```never closed\na **b**\n", f"\x1b[2mnever closed{END}\na **b**"),
    ("1. ```\n   x\n     y\n   ```\n2. z", "1.\n\nx\n  y\n\n2. z"),
    ("``` a *b* ``` c", f"{CODE}a *b*{END} c"),
    ("over **two\nlines** and `on\nthree`",
     f"over {BOLD}two{END}\n{BOLD}lines{END} and {CODE}on{END}\n{CODE}three{END}"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "lines"), CARRIED_OUT, ids=range(len(CARRIED_OUT)))
def test_marks_are_carried_out(shown, text, lines):
    assert shown(text, 20 if "***\n" in text else WIDE) == f"{lines}\n"


def test_a_table_has_columns_and_its_cells_wrap(shown):
    text = "| Name | Value |\n|:--|--:|\n| `a\\|b` | 12 |\n| 世界 | **7** |\nafter it"
    assert ESCAPES.sub("", shown(text)) == "Name │ Value\n─────┼──────\na|b  │    12\n世界 │     7\nafter it\n"
    long = f"a | b\n--|--\n{'word ' * 20}| {'other ' * 10}"
    lines = ESCAPES.sub("", shown(long, 40)).splitlines()
    assert max(map(width_of, lines)) <= 40
    assert (" ".join(lines).count("word"), " ".join(lines).count("other")) == (20, 10)


@pytest.mark.parametrize(
    "text",
    ["| a | b |\n|---|---|\n| 1 | 2 | 3 |", f"|{' a |' * 30}\n|{'---|' * 30}\n|{' 1 |' * 30}"],
    ids=["a-cell-too-many", "too-wide"],
)
def test_a_table_that_cannot_be_drawn_stays_as_written(shown, text):
    assert "".join(ESCAPES.sub("", shown(text, 60)).split()) == "".join(text.split())


@pytest.mark.parametrize("columns", [1, 7, 20, 40])
def test_no_line_is_wider_than_the_terminal(shown, columns):
    text = "".join(f"{text}\n\n" for text in AS_WRITTEN if not text.startswith(("    ", "\\b"))) + "x" * 100
    assert max(map(width_of, ESCAPES.sub("", shown(text, columns)).splitlines())) <= max(columns, 2)


def test_chinese_fills_its_lines_and_no_comma_begins_one(shown):
    lines = ESCAPES.sub(
        "", shown("使用 Python 编写代码的时候，需要注意的事情有很多，比如空格和换行。" * 3, 21)
    ).splitlines()
    assert min(map(width_of, lines[:-1])) >= 14
    assert not [line for line in lines if line[0] in "，。"]


def test_without_colours_the_layout_stays(capsys, monkeypatch):
    monkeypatch.setattr("dsv4cli.commands.chat.renderer.stdout_columns", lambda: 40)
    one = Renderer(Output(Colours()), markdown=True, thinking=False)
    one.push("content", "**bold** `code`\n```python\nx = 'y'\n```\n> a")
    one.end()
    assert capsys.readouterr().out == "bold code\n\npython\nx = 'y'\n\n> a\n"


WORDS = r"""
* ** *** _ __ ` `` ~~~ 👩‍🚀 | [ ] ( ) < > \ \( \) \[ \] $ $$ ! = a word snake_case __init__ 4*8 世界 重点。 （注） é
~~x~~ [^1] - + &amp; [x](http://a/b_c) ![i](u) <div> </div> <int> \begin{a} \end{a} http://x.y/a*b_c* C:\*.txt \_ \*
"""
INLINE = WORDS.split()
BLOCK = [
    "\n",
    "\n\n",
    "\n- ",
    "\n  - ",
    "\n1. ",
    "\n3) ",
    "\n# ",
    "\n> ",
    "\n    ",
    "\n---\n",
    "\n===\n",
    "\n```\n",
    "\n```py\n",
]
BLOCK += [
    "\n|---|---|\n",
    "| a | b |",
    "\n\\[\n",
    "\n\\]\n",
    "\n$$\n",
    "  \n",
    "\t",
    "\r\n",
    "some longer words to fill lines",
]
HOSTILE = ["\x1b[31m", "\x9b1m", "\u202e", "\x07"]
ATOMS = [*INLINE, *BLOCK, *HOSTILE]
# characters that Markdown has as marks, and what is drawn for them
MARKS = re.compile(r"[\s*_`#+>()\[\]\\|:~•─│┼-]")


@pytest.mark.parametrize("seed", [0, 1, *slow(*range(2, 12))])
def test_random_texts_lose_nothing_and_command_nothing(shown, seed):
    rng = Random(seed)
    for _ in range(15):
        text = "".join(rng.choice(ATOMS) + rng.choice(("", "", " ")) for _ in range(rng.randrange(1, 40)))
        whole = ESCAPES.sub("", shown(text))
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", whole.replace("\t", "")), repr(text)
        # the info of a fence is shown, so no letter is lost anywhere
        assert MARKS.sub("", whole) == MARKS.sub("", harmless(text)), repr(text)
        assert _in_order(whole, harmless(text)), repr(text)
        assert shown(text, 20) == shown(text, 20, size=rng.randrange(1, 12)), repr(text)


def _in_order(shown, text):
    """Whether all that is shown stands in the text, in this order; what is drawn stands for one of its marks."""
    drawn = re.sub(r"[\s─│┼]", "", shown)
    rest = iter(text)
    return all(any(char == other or (char == "•" and other in "*-") for other in rest) for char in drawn)


@pytest.mark.parametrize("seed", range(4))
def test_commonmark_shows_nothing_that_is_not_shown(seed):
    """Of a paragraph, every character that CommonMark itself shows is there, in order, but for backslashes."""
    from markdown_it import MarkdownIt

    rng = Random(seed)
    for _ in range(40):
        text = " ".join(rng.choice(INLINE) for _ in range(rng.randrange(1, 30))).strip()
        tokens = MarkdownIt("commonmark").disable(["autolink", "entity"]).parseInline(text)[0].children
        rest = iter("".join(run.text for run in inline(text).runs))
        expected = re.sub(r"[\s\\]", "", "".join(token.content for token in tokens))
        missing = [char for char in expected if char not in rest]
        assert missing == [], repr(text)
