"""dsv4: the command-line toolkit for DeepSeek-V4 models, and `Model`, its Python API."""

from importlib import import_module
from typing import TYPE_CHECKING

from dsv4cli.version import __version__

if TYPE_CHECKING:
    from dsv4cli.api import Model, Reply, Score

__all__ = ["Model", "Reply", "Score", "__version__"]


def __getattr__(name: str) -> object:
    """Import Model, Reply or Score, and with them PyTorch, on first use."""
    if name not in ("Model", "Reply", "Score"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("dsv4cli.api"), name)
