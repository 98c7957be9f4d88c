"""Prefill progress of long prompts, shown on a terminal where the answer will appear."""

from time import perf_counter

from dsv4cli.output import Output, duration_text

# minimum tokens of a prompt for which progress is shown
MANY_TOKENS = 1000


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
