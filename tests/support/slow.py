"""Cases of a parametrized test that are off by default, because another case of the test covers the same lines.

`@pytest.mark.parametrize("tokens", [1, *slow(70, 140)])`
"""

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Return each value of a single argument as a case of the slow tier."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_rows(*rows: tuple[Any, ...]) -> list[Any]:
    """Return each row of values, one for each argument, as a case of the slow tier."""
    return [pytest.param(*row, marks=pytest.mark.slow) for row in rows]


def slow_except(few: Iterable[Any], cases: Iterable[Any]) -> list[Any]:
    """Return the cases in their order, all but a few of them as cases of the slow tier. A tuple is a row of values."""
    kept = [*few]
    return [case if case in kept else (slow_rows if isinstance(case, tuple) else slow)(case)[0] for case in cases]
