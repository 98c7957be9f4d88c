"""Arithmetic: sums and products, answered directly or worked out digit by digit."""

import random

from tools.nano.item import Item, Split, answer, casual, fits, framed, user

_ASK = {
    "+": ("What is {e}?", "{e}", "{e} = ?", "{e} =", "Compute {e}.", "Calculate {e}.", "What's {a} plus {b}?",
          "How much is {e}?", "What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "-": ("What is {e}?", "{e}", "{e} = ?", "{e} =", "Compute {e}.", "Calculate {e}.", "What's {a} minus {b}?",
          "How much is {e}?", "What is {a} minus {b}?", "Subtract {b} from {a}."),
    "*": ("What is {e}?", "{e}", "{e} = ?", "{e} =", "Compute {e}.", "Calculate {e}.", "What's {a} times {b}?",
          "How much is {e}?", "What is {a} times {b}?", "Multiply {a} by {b}."),
}  # fmt: skip
_SPACED = ("{a} {op} {b}", "{a} {op} {b}", "{a}{op}{b}")


def apply(a: int, op: str, b: int) -> int:
    """Return `a op b` for +, - and *."""
    return a + b if op == "+" else a - b if op == "-" else a * b


def allowed(split: Split, a: int, op: str, b: int) -> bool:
    """Return whether a sum, difference or product belongs to the split. 3 + 4 and 4 + 3 belong to the same one."""
    low, high = (a, b) if op == "-" else (min(a, b), max(a, b))
    return fits(split, "arithmetic", f"{low} {op} {high}")


def equation(a: int, op: str, b: int) -> str:
    """Return the answer to a sum, difference or product."""
    return f"{a} {op} {b} = {apply(a, op, b)}."


def question(rng: random.Random, a: int, op: str, b: int) -> tuple[str, int]:
    """Return one form of the question, and which form it is."""
    nth = rng.randrange(len(_ASK[op]))
    sign = "x" if op == "*" and rng.random() < 0.15 else op
    text = rng.choice(_SPACED).format(a=a, op=sign, b=b)
    return casual(rng, _ASK[op][nth].format(e=text, a=a, b=b)), nth


def sums(rng: random.Random, split: Split) -> Item:
    """Chat: + and - of numbers below 100. Pairs of numbers are held out."""
    while True:
        op = rng.choice("+-")
        a, b = _below_100(rng), _below_100(rng)
        if allowed(split, a, op, b):
            ask, _ = question(rng, a, op, b)
            return Item("sums", f"{a} {op} {b}", framed(rng, [user(ask), answer(equation(a, op, b))], 0.05))


def _below_100(rng: random.Random) -> int:
    return rng.randrange(10) if rng.random() < 0.1 else rng.randrange(10, 100)


def tables(rng: random.Random, split: Split) -> Item:
    """Chat: products of numbers up to 12. Pairs of a product and a form of its question are held out."""
    while True:
        a, b = rng.randrange(13), rng.randrange(13)
        ask, nth = question(rng, a, "*", b)
        if fits(split, "tables", f"{a} * {b}/{nth}"):
            return Item("tables", f"{a} * {b}", framed(rng, [user(ask), answer(equation(a, "*", b))], 0.05))


def products(rng: random.Random, split: Split) -> Item:
    """Products of two two-digit numbers. The steps are the reasoning, or without thinking, precede the answer."""
    thinking = split == "heldout" or rng.random() < 0.7
    while True:
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        if split == "train" and rng.random() < 0.15:
            a, b = rng.choice(((a, b // 10), (a // 10, b)))
        if allowed(split, a, "*", b) and (thinking or max(a, b) > 12):
            break
    steps = product_steps(a, b)
    reply = answer(equation(a, "*", b), steps) if thinking else answer(f"{steps}\n{equation(a, '*', b)}")
    ask, _ = question(rng, a, "*", b)
    return Item("products", f"{a} * {b}", framed(rng, [user(ask), reply], 0.05), thinking=thinking)


def long_sums(rng: random.Random, split: Split) -> Item:
    """+ and - of up to three digits in columns, as reasoning; without thinking, of three digits, before the answer."""
    thinking = split == "heldout" or rng.random() < 0.8
    top = 100 if thinking and rng.random() < 0.25 else 1000
    while True:
        op = rng.choice("+-")
        a, b = rng.randrange(top), rng.randrange(top)
        if allowed(split, a, op, b) and (thinking or max(a, b) > 99):
            break
    steps = steps_of(a, op, b)
    reply = answer(equation(a, op, b), steps) if thinking else answer(f"{steps}\n{equation(a, op, b)}")
    ask, _ = question(rng, a, op, b)
    return Item("long sums", f"{a} {op} {b}", framed(rng, [user(ask), reply], 0.05), thinking=thinking)


def steps_of(a: int, op: str, b: int) -> str:
    """Return the reasoning before `a op b` is answered."""
    return sum_steps(a, b) if op == "+" else difference_steps(a, b) if op == "-" else product_steps(a, b)


def product_steps(a: int, b: int) -> str:
    """Return lines: the product with each digit of b, its tens, and their sum."""
    tens, units = divmod(b, 10)
    if not tens:
        return _row(a, units)
    low, high = a * units, a * tens
    return f"{_row(a, units)}\n{_row(a, tens)}\n{low} + {high}0\n{_columns(low, high * 10)}"


def _row(a: int, digit: int) -> str:
    tens, units = divmod(a, 10)
    low = units * digit
    carry = low // 10
    return f"{a} * {digit}: {units}*{digit}={low}; {tens}*{digit}+{carry}={tens * digit + carry}; {a * digit}"


def sum_steps(a: int, b: int) -> str:
    """Return lines: the problem, then one for each column with the digits so far."""
    return f"{a} + {b}\n{_columns(a, b)}"


def _columns(a: int, b: int) -> str:
    lines, done, carry, width = [], "", 0, max(len(str(a)), len(str(b)))
    for nth in range(width):
        x, y = a // 10**nth % 10, b // 10**nth % 10
        total = x + y + carry
        done = (str(total) if nth == width - 1 else str(total % 10)) + done
        lines.append(f"{x}+{y}+{carry}={total}: {done}")
        carry = total // 10
    return "\n".join(lines)


def difference_steps(a: int, b: int) -> str:
    """Return lines: the problem, reversed if it is below zero, then one for each column with the digits so far."""
    lines = [f"{a} - {b}"]
    if a < b:
        lines.append(f"{a} < {b}: -({b} - {a})")
        a, b = b, a
    done, borrow = "", 0
    for nth in range(len(str(a))):
        x, y = a // 10**nth % 10, b // 10**nth % 10
        less = x - y - borrow
        x += 10 if less < 0 else 0
        done = f"{less % 10}{done}"
        lines.append(f"{x}-{y}-{borrow}={less % 10}: {done}")
        borrow = int(less < 0)
    return "\n".join(lines)
