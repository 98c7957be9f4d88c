"""Whether Triton compiled anything meanwhile: what is measured must have been compiled before."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dsv4cli.errors import UnsoundResult


@contextmanager
def nothing_compiles() -> Iterator[None]:
    """Raises UnsoundResult, at the end, where Triton has compiled a kernel inside."""
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
            f"{count} compiled while time was taken, the first is {names[0]}",
            "report it: every kernel that a step needs is to be compiled in the steps before",
        )
