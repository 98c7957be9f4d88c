"""The supported commands and environments of LaTeX math, and their Unicode characters."""


def _pairs(text: str) -> dict[str, str]:
    words = text.split()
    return dict(zip(words[::2], words[1::2], strict=True))


# binary operators and relations, shown with a space on each side
OPERATORS = _pairs(r"""
    times × cdot · div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet • oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ wedge ∧ land ∧
    vee ∨ lor ∨ cup ∪ cap ∩ setminus ∖ le ≤ leq ≤ leqslant ≤ ge ≥ geq ≥ geqslant ≥ ne ≠ neq ≠ ll ≪ gg ≫ approx ≈
    equiv ≡ cong ≅ sim ∼ simeq ≃ propto ∝ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ supset ⊃ supseteq ⊇ mid ∣ nmid ∤
    parallel ∥ perp ⊥ to → gets ← rightarrow → leftarrow ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐
    Leftrightarrow ⇔ implies ⟹ impliedby ⟸ iff ⟺ longrightarrow ⟶ Longrightarrow ⟹ mapsto ↦ uparrow ↑
    downarrow ↓ vdash ⊢ models ⊨ coloneqq ≔ bmod mod mod mod lt < gt > prec ≺ succ ≻ asymp ≍ doteq ≐
    rightleftharpoons ⇌
""")

SYMBOLS = _pairs(r"""
    alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
    lambda λ mu μ nu ν xi ξ pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ
    psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω infty ∞
    partial ∂ nabla ∇ forall ∀ exists ∃ nexists ∄ emptyset ∅ varnothing ∅ neg ¬ lnot ¬ top ⊤ bot ⊥ angle ∠
    triangle △ square □ blacksquare ■ Box □ therefore ∴ because ∵ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ wp ℘ imath ı
    jmath ȷ prime ′ degree ° dagger † ddagger ‡ checkmark ✓ sum ∑ prod ∏ coprod ∐ int ∫ iint ∬ iiint ∭ oint ∮
    bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigvee ⋁ bigwedge ⋀ ldots … dots … cdots ⋯ dotsc … dotsb ⋯ vdots ⋮
    ddots ⋱ lfloor ⌊ rfloor ⌋ lceil ⌈ rceil ⌉ langle ⟨ rangle ⟩ lvert | rvert | lVert ‖ rVert ‖ vert | Vert ‖
    lbrace { rbrace } lbrack [ rbrack ] backslash \ colon : S § P ¶ pounds £ copyright © % % $ $ # # & & _ _ { {
    } } | ‖
""")

# commands shown as their names
FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "coth", "log", "ln",
    "lg", "exp", "lim", "limsup", "liminf", "max", "min", "sup", "inf", "arg", "argmax", "argmin", "det", "dim", "ker",
    "deg", "gcd", "lcm", "hom", "Pr", "rank", "tr",
})  # fmt: skip

# commands for spacing or style only
SPACES = {
    "quad": "  ", "qquad": "  ", ",": " ", ";": " ", ":": " ", ">": " ", " ": " ", "\n": "\n", "!": "", "limits": "",
    "displaystyle": "", "textstyle": "", "scriptstyle": "", "nolimits": "", "nonumber": "", "notag": "", "hline": "",
}  # fmt: skip

ACCENTS = {
    "hat": "\u0302", "widehat": "\u0302", "tilde": "\u0303", "widetilde": "\u0303", "bar": "\u0304",
    "overline": "\u0305", "dot": "\u0307", "ddot": "\u0308", "vec": "\u20d7", "underline": "\u0332",
}  # fmt: skip

BLACKBOARD = dict(zip("CHNPQRZ", "ℂℍℕℙℚℝℤ", strict=True))

SUPERSCRIPTS = dict(zip(
    "0123456789+-=()abcdefghijklmnoprstuvwxyzABDEGHIJKLMNOPRTUVWβγδθφχ∘'′",
    "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ᵃᵇᶜᵈᵉᶠᵍʰⁱʲᵏˡᵐⁿᵒᵖʳˢᵗᵘᵛʷˣʸᶻᴬᴮᴰᴱᴳᴴᴵᴶᴷᴸᴹᴺᴼᴾᴿᵀᵁⱽᵂᵝᵞᵟᶿᵠᵡ°′′", strict=True,
))  # fmt: skip
SUBSCRIPTS = dict(zip(
    "0123456789+-=()aehijklmnoprstuvxβγρφχ", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵦᵧᵨᵩᵪ", strict=True
))  # fmt: skip

# environments with brackets around their rows, and environments without
BRACKETS = {"pmatrix": "()", "bmatrix": "[]", "Bmatrix": "{}", "vmatrix": "||", "Vmatrix": "‖‖", "cases": "{"}
PLAIN = frozenset({
    "matrix", "array", "aligned", "align", "align*", "equation", "equation*", "gather", "gather*", "gathered", "split",
})  # fmt: skip
# commands with arguments: text, math in another style, fractions
TEXTS = frozenset({
    "text", "textbf", "textit", "textrm", "texttt", "mathrm", "mathsf", "mathtt", "operatorname", "operatorname*",
    "mbox",
})  # fmt: skip
STYLES = ("mathbf", "mathit", "boldsymbol", "bm", "mathcal", "mathscr", "mathfrak", "pmb")
FRACTIONS = ("frac", "dfrac", "tfrac", "cfrac")
