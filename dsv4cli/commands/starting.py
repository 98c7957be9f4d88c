"""The import of PyTorch, which takes one second from memory and many from a slow disk."""

import os
import sys
from importlib import import_module

from dsv4cli.errors import UsageError
from dsv4cli.output import Output


def import_torch(out: Output) -> Output:
    """Import PyTorch, say so on a terminal meanwhile, and return the output.

    Call it before the first import of a module that needs PyTorch.
    """
    if "torch" in sys.modules:
        return out
    if not _has_folder():
        raise UsageError("the current folder has been removed, and PyTorch does not load in it", "go to another folder")
    out.wait("importing PyTorch …")
    try:
        import_module("torch")
    finally:
        out.wait("")
    return out


def _has_folder() -> bool:
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True
