"""Progress while prompts are read: of many prompts before the model loads, and of the prefill of long ones."""

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import TypeVar

from dsv4cli.output import Output, duration_text

# minimum tokens of a prompt for which progress is shown
MANY_TOKENS = 1000
# items between updates of the progress of many
ITEMS_BETWEEN = 500

Item = TypeVar("Item")


def each(out: Output, items: Sequence[Item], label: str) -> Iterator[Item]:
    """Yield the items. If there are many, show how many are done."""
    try:
        for number, item in enumerate(items):
            if number and number % ITEMS_BETWEEN == 0:
                out.wait(f"{label}: {number:,} of {len(items):,} …")
            yield item
    finally:
        out.wait("")


class Reading:
    """Prefill progress of one prompt, or of several in one batch."""

    def __init__(self, out: Output) -> None:
        self._out = out
        self._begun: tuple[float, int] | None = None  # start time, and tokens prefilled before

    def show(self, done: int, total: int) -> None:
        """Show how many prompt tokens are prefilled, the speed and the remaining time, until all are."""
        if not done < total >= MANY_TOKENS:
            self._out.wait("")
            return
        now = perf_counter()
        start, first = self._begun = self._begun or (now, done)
        words = f"prefilling {total:,} tokens: {100 * done // total} %"
        if done > first:
            rate = (done - first) / max(now - start, 1e-9)
            words += f", {rate:,.0f} tokens/s, {duration_text((total - done) / rate)} left"
        self._out.wait(f"{words} …")
