"""Detects Triton compilation during a measurement, which would make its times wrong."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4cli.errors import UnsoundResult


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """Raise UnsoundResult at the end of the block if Triton compiled a kernel in it."""
    if "triton" not in sys.modules:
        yield
        return
    runtime, names = sys.modules["triton"].knobs.runtime, list[str]()
    before = runtime.jit_post_compile_hook

    def note(*arguments: Any, **details: Any) -> None:
        names.append(str(details["fn"].name))
        if before is not None:
            before(*arguments, **details)

    runtime.jit_post_compile_hook = note
    try:
        yield
    finally:
        runtime.jit_post_compile_hook = before
    if names:
        count = f"{len(names)} kernel{'s were' if len(names) > 1 else ' was'}"
        raise UnsoundResult(
            f"{count} compiled during timing, first {names[0]}",
            "report this as a bug: warm-up steps should compile every kernel",
        )
