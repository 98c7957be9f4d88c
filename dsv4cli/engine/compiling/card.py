"""Which card kernels are compiled for: one of this machine, or one that is named."""

import torch

from dsv4cli.engine.system.device import resolve_device
from dsv4cli.errors import UnsupportedHardware, UsageError
from dsv4cli.kernels.card import CARDS, Card, card_of, unsuited

__all__ = ["Card", "card_of", "find_card"]


def find_card(name: str | None) -> tuple[str, Card, torch.device | None]:
    """The card of this name, or the first of this machine; its name; its device where it is here.

    Raises UsageError for another name, UnsupportedHardware where this machine has none that the kernels run on.
    """
    if name is not None:
        known = name.lower()
        if known not in CARDS:
            raise UsageError(f"--card cannot be {name!r}", f"use one of {', '.join(CARDS)}")
        return known, CARDS[known], None
    device = resolve_device("auto")
    if device.type != "cuda":
        raise UnsupportedHardware("this machine has no GPU to compile for", "name one, as in --card h200")
    if reason := unsuited(device):
        raise UnsupportedHardware(f"{device}: {reason}", "name a card that is not here, as in --card h200")
    return torch.cuda.get_device_name(device), card_of(device), device
