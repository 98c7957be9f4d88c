"""A PyTorch without its compiler, which operations on tensors without data would import, 2 s, to be kept away from it.

For processes of tests alone; imported before any such operation.
"""

import sys
from types import ModuleType
from typing import Any

import torch


def _left_alone(function: Any, *_: Any, **__: Any) -> Any:
    return function


torch._dynamo = sys.modules["torch._dynamo"] = ModuleType("torch._dynamo")
torch._dynamo.__path__ = [f"{torch.__path__[0]}/_dynamo"]  # fake tensors read its settings
torch._dynamo.disable = _left_alone  # type: ignore[attr-defined]
