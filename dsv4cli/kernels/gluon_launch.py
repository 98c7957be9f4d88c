"""Launches of kernels in Gluon, Triton's language in which a kernel says itself what each warp does.

Gluon is experimental: what imports this asks first that the version of Triton is among `launch.READ`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from triton.experimental.gluon._runtime import GluonJITFunction

from dsv4cli.kernels.launch import Kernel


def gluon_launched(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """`launch.launched` of a kernel in Gluon."""
    return partial(gluon_launched, **options) if function is None else GluonKernel(function, **options)


class GluonKernel(Kernel, GluonJITFunction):  # type: ignore[misc] # Triton has no types
    """A kernel in Gluon, and the ways in which it was called so far."""
