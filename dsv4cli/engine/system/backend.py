"""The choice of kernels for a run."""

from typing import Literal

import torch

from dsv4cli.errors import UnsupportedHardware
from dsv4cli.kernels.card import unsuited
from dsv4cli.kernels.dispatch import Backend, chosen, use

__all__ = ["Backend", "captures", "resolve_backend", "use"]


def resolve_backend(name: Backend, device: torch.device) -> Literal["triton", "torch"]:
    """Return the backend for a device: 'auto' is Triton on a GPU and plain PyTorch elsewhere.

    Raises UnsupportedHardware for Triton without a GPU, or on a GPU that its kernels do not support.
    """
    on_gpu = device.type == "cuda"
    if name == "triton" and not on_gpu:
        raise UnsupportedHardware(
            f"--backend triton needs a GPU, but the device is {device}", "use --backend auto, which selects torch here"
        )
    if not on_gpu or name == "torch":
        return "torch"
    if reason := unsuited(device):
        raise UnsupportedHardware(f"{device}: {reason}", "use --backend torch")
    return "triton"


def captures(device: torch.device) -> bool:
    """Return whether steps can be captured as CUDA graphs.

    This needs a GPU and the Triton kernels, which never wait for the host.
    """
    return device.type == "cuda" and chosen() != "torch"
