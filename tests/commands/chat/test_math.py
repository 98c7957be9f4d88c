"""Math in a terminal: what is shown for LaTeX, that nothing is lost, and that it comes in pieces as it comes whole."""

import re
from random import Random

import pytest

from dsv4cli.commands.chat import renderer
from dsv4cli.commands.chat.inline import inline
from dsv4cli.commands.chat.math_text import readable_line, readable_math
from dsv4cli.commands.chat.renderer import Renderer
from dsv4cli.output import Colours, Output
from tests.support.slow import slow

READABLE = (
    (r"\frac{a}{b} + \frac12 + \dfrac{x+1}{2y}", "a/b + 1/2 + (x+1)/(2y)"),
    (r"2\frac{1}{2}, \frac{1}{2}x, x\frac12, \frac{\frac{a}{b}}{c}", "2 1/2, (1/2)x, x(1/2), (a/b)/c"),
    (r"\frac{n(n+1)}{2}, \frac{1}{a(b+c)}, \frac{\sin x}{x}", "n(n+1)/2, 1/(a(b+c)), (sin x)/x"),
    (r"\frac{d}{dx} x^n = nx^{n-1}", "(d/dx) xⁿ = nxⁿ⁻¹"),
    (r"x = \frac{-b \pm \sqrt{b^2 - 4ac}}{2a}", "x = (-b ± √(b² - 4ac))/(2a)"),
    (r"\sqrt{2}, \sqrt 2, \sqrt[3]{x+1}, \sqrt[n]{ab}", "√2, √2, ∛(x+1), ⁿ√(ab)"),
    (r"x^2 + y_1^{10} + a_{n+1} + x_{max} + T_c + q^{qq}", "x² + y₁¹⁰ + aₙ₊₁ + xₘₐₓ + T_c + q^(qq)"),
    (r"e^{i\pi} + 1 = 0, a^{b^c}, (a/b)^2, \left(\frac{a}{b}\right)^2", "e^(iπ) + 1 = 0, a^(bᶜ), (a/b)², (a/b)²"),
    (r"17 \times 23\cdot a\le\infty \neq 90^\circ", "17 × 23 · a ≤ ∞ ≠ 90°"),
    (r"\alpha\beta\Gamma \in \mathbb{R} \implies \mathcal{O}(n \log n)", "αβΓ ∈ ℝ ⟹ O(n log n)"),
    (r"\sum_{i=1}^{n} i = \int_0^1 f(x)\,dx", "∑ᵢ₌₁ⁿ i = ∫₀¹ f(x) dx"),
    (r"\lim_{x \to 0} \sin\theta \cos^2 x", "lim_(x → 0) sin θ cos² x"),
    (r"\boxed{42}, \text{if } x > 0, \operatorname{lcm}(a,b)", "[42], if x > 0, lcm(a,b)"),
    (r"\vec{v} \hat{x} \overline{AB} \binom{n}{k} 5 \pmod{3}", "v\u20d7 x\u0302 A\u0305B\u0305 C(n, k) 5 (mod 3)"),
    (r"50\% \{a, b\} \$5 a\quad b \left\lfloor \frac{n}{2} \right\rfloor", "50% {a, b} $5 a b ⌊ n/2 ⌋"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", "(1  2; 3  4)"),
    (r"\begin{cases} 1 & x > 0 \\ 0 & \text{else} \end{cases}", "{ 1  x > 0; 0  else"),
    (r"\begin{aligned} x &= 1 \\[2pt] y &= 2 \end{aligned}", "x = 1; y = 2"),
    # what is not known stays, and what is known around it is shown
    (r"\ce{H2O} + \frac{a}{b} \foo x \underbrace{a^2}_{b}", r"\ce{H2O} + (a/b) \foo x \underbrace{a²}_b"),
)  # fmt: skip


@pytest.mark.parametrize(("tex", "text"), READABLE, ids=range(len(READABLE)))
def test_math_is_readable(tex, text):
    assert readable_math(f"\\({tex}\\)") == readable_math(f"\\[ {tex} \\]") == readable_math(f"$${tex}$$") == text


@pytest.mark.parametrize(
    "tex", [r"\frac{a", r"a_{", r"a}", r"\left", "x^", r"\begin{foo}a\end{foo}", r"\begin{cases}", ""]
)
def test_what_cannot_be_read_stays_as_written(tex):
    assert readable_math(f"\\({tex}\\)") == f"\\({tex}\\)"


def shown_inline(text):
    return "".join(run.text for run in inline(text).runs)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("for $x$ and $E = mc^2$, $n!$ or $a + b$", "for x and E = mc², n! or a + b"),
        (r"$\text{speed} = \frac{d}{t}$", "speed = d/t"),
        ("costs $5 and $6, not 7$; US$ 5 or $10-$20", None),
        ("5$, 6$ and 7$; US$ 5", None),
        ("echo $HOME/$USER, $a_b and $c; ${x}", None),
        (r"a \(x^2\), \[y_1\] and `\(z^2\)`", r"a x², y₁ and \(z^2\)"),
        ("**\\(x_1\\)** is *\\(a*b\\)*", "x₁ is a*b"),
        ("a \\(x^2\n+ 1\\) b", "a x²\n+ 1 b"),
        ("\\(\\frac{a\n}{b}\\)", None),  # lines are not joined
        (r"open \(x^2 and $y^2 and \[", None),
    ],
)
def test_math_in_a_text(text, shown):
    assert shown_inline(text) == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["\\[", "  \\frac{a}{b} = c", "\\]"], ["  a/b = c"]),
        (["\\[ x^2", "+ 1 \\]"], ["x²", "+ 1"]),
        (["$$", "\\begin{aligned}", "x &= 1 \\\\", "y &= \\frac12 \\\\[2pt]", "\\end{aligned}"], ["x = 1", "y = 1/2"]),
        (["\\begin{pmatrix} 1 & 2 \\\\", "3 & 4 \\end{pmatrix}"], ["( 1  2", "3  4 )"]),
        (["\\frac{a}{", "b} * c"], ["\\frac{a}{", "b} * c"]),
    ],
)  # fmt: skip
def test_displayed_math_is_shown_line_by_line(lines, shown):
    assert [text for line in lines if (text := readable_line(line)) is not None] == shown


@pytest.fixture
def terminal(capsys, monkeypatch):
    """What a terminal gets of pieces."""

    def show(pieces, markdown=True):
        monkeypatch.setattr(renderer, "stdout_columns", lambda: 40)
        one = Renderer(Output(Colours()), markdown=markdown, thinking=False)
        for piece in pieces:
            one.push("content", piece)
        one.end()
        return capsys.readouterr().out

    return show


ANSWER = """The area is \\(A = \\pi r^2\\), so with $r = 3$ it costs $5 a piece:

\\[
A = \\pi \\cdot 3^2
\\]

- **Then** \\(\\frac{A}{2}\\) is what is left of it, which is a longer line.
  $$\\boxed{\\frac{9\\pi}{2}}$$

```tex
\\frac{a}{b}
```
"""


def test_an_answer_with_math(terminal):
    shown = (
        "The area is A = π r², so with r = 3 it costs $5 a piece: A = π · 3² • Then A/2 is what is left of it, "
        "which is a longer line. [9π/2] tex \\frac{a}{b}"
    )
    assert " ".join(terminal([ANSWER]).split()) == shown


def test_output_that_is_no_markdown_has_the_math_as_written(terminal):
    assert terminal([ANSWER], markdown=False) == ANSWER


WORDS = r"\( \) \[ \] $ $$ \frac{a}{b} x^2 x_ { } \alpha & \\ word 5 = + * ** ` | \begin{cases} \end{cases}"
ATOMS = [*WORDS.split(), "\n", "\n\n"]


@pytest.mark.parametrize("seed", [0, 1, *slow(*range(2, 6))])
def test_math_looks_the_same_however_it_is_cut(terminal, seed):
    rng = Random(seed)
    for _ in range(15):
        text = "".join(rng.choice(ATOMS) + rng.choice(("", " ")) for _ in range(rng.randrange(1, 60)))
        whole, size = terminal([text]), rng.randrange(1, 12)
        assert terminal(text[at : at + size] for at in range(0, len(text), size)) == whole, repr(text)
        assert terminal(re.findall(r"\S*\s*", text)) == whole, repr(text)
