"""What an answer says: numbers, choices, formulas, and what stands beside them."""

from fractions import Fraction

import pytest

from dsv4cli.engine.evaluation.extract import boxed, choice_in, number_in, number_of, same_formula


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("17 + 25 = 42.", 42),
        ("So she has 3 boxes and 18 eggs.", 18),
        ("The total is $1,234.50 in all", Fraction("1234.5")),
        ("It is -5 degrees.", -5),
        ("It costs -$5", -5),
        ("it is 3-4", 4),
        ("The list 1,2,3", 3),
        ("a\n#### 72\nbecause of 5", 72),
        ("First 7, then \\boxed{1{,}000} and 9 more", 1000),
        ("\\boxed{\\frac{3}{4}}", Fraction(3, 4)),
        ("\\boxed{-\\dfrac{1}{2}}", Fraction(-1, 2)),
        ("\\boxed{\\frac12}", Fraction(1, 2)),
        ("\\boxed{5 + 3 = 8 \\text{ apples in 2 days}}", 8),
        ("The answer is 18 eggs.\nIt took 2 days", 18),
        ("**Answer:** 42 (of 50)", 42),
        ("The answer is simple: 42", 42),
        ("\\boxed{x} hence 7", 7),
        ("half is .5", Fraction(1, 2)),
        ("\N{MINUS SIGN}3", -3),
        ("18.0", 18),
        ("version 1.2.3", 3),
        ("no number", None),
        ("", None),
        ("9" * 100, None),
    ],
)
def test_the_number_of_an_answer(text, number):
    assert number_in(text) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("18", 18), ("1,000", 1000), ("3/4", Fraction(3, 4)), ("1 3/4", Fraction(7, 4)), ("none", None)],
)
def test_the_number_that_is_expected(text, number):
    assert number_of(text) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\boxed{a{b}c}d}", "a{b}c"),
        ("\\boxed{open", None),
        ("none", None),
    ],
)
def test_a_box_ends_with_its_own_brace(text, content):
    assert boxed(text) == content


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("B", "B"),
        ("b", "B"),
        ("(C)", "C"),
        ("**D**", "D"),
        ("B. Paris", "B"),
        ("B) Paris", "B"),
        ("Because of A and C.\nAnswer: B", "B"),
        ("the answer is (D).", "D"),
        ("Answer: A, then later.\nAnswer: C", "C"),
        ("The final answer: \\boxed{\\text{B}}", "B"),
        ("**Answer: C**", "C"),
        ("Answer: B because of it", "B"),
        ("A good question", None),
        ("Answer: E", None),
        ("I do not know", None),
        ("Both answers are good", None),
        ("", None),
    ],
)
def test_the_letter_of_an_answer(text, letter):
    found = choice_in(text, "ABCD")
    assert found == (None if letter is None else "ABCD".index(letter))


def test_a_choice_may_be_a_text():
    choices = ("Paris", "New York")
    assert choice_in("new york.", choices) == 1
    assert choice_in("I think so.\nAnswer: Paris", choices) == 0
    assert choice_in("Paris or New York", choices) is None


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("\\dfrac12", "\\frac{1}{2}", True),
        ("\\frac1{2}", "\\frac{1}{2}", True),
        ("x = 5", "5", True),
        ("90^\\circ", "90", True),
        ("\\left( 3, \\frac{\\pi}{2} \\right)", "(3,\\frac{\\pi}{2})", True),
        ("\\text{Evelyn}", "Evelyn", True),
        ("1,000", "1000", True),
        ("0.50", ".5", True),
        ("50\\%", "50", True),
        ("\\$18.90", "18.9", True),
        ("\\frac{3}{4}", "3/4", True),
        ("1 3/4", "13/4", False),
        ("1+x", "x+1", False),
        ("5", "6", False),
        ("(1,2)", "(12)", False),
    ],
)
def test_formulas_that_are_written_alike(one, other, same):
    assert same_formula(one, other) is same
    assert same_formula(other, one) is same
