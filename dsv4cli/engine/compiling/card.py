"""Selects the GPU model to compile kernels for: a GPU of this machine, or a named one."""

import torch

from dsv4cli.engine.system.device import resolve_device
from dsv4cli.errors import UnsupportedHardware, UsageError
from dsv4cli.kernels.card import CARDS, Card, card_of, unsuited

__all__ = ["Card", "card_of", "find_card"]


def find_card(name: str | None) -> tuple[str, Card, torch.device | None]:
    """Return the name, the card and the device of a GPU model. The device is None if the card is selected by name.

    Args:
        name: name of a known card; None for the first GPU of this machine.

    Raises:
        UsageError: the name is unknown.
        UnsupportedHardware: this machine has no GPU that the kernels support.
    """
    if name is not None:
        known = name.lower()
        if known not in CARDS:
            raise UsageError(f"--card cannot be {name!r}", f"use one of {', '.join(CARDS)}")
        return known, CARDS[known], None
    device = resolve_device("auto")
    if device.type != "cuda":
        raise UnsupportedHardware(
            "this machine has no GPU to compile for", "specify a GPU model, for example --card h200"
        )
    if reason := unsuited(device):
        raise UnsupportedHardware(f"{device}: {reason}", "use another GPU model, for example --card h200")
    return torch.cuda.get_device_name(device), card_of(device), device
