"""Clusters by name, as in `2x8xH200`, or by this machine's GPUs; no torch."""

import re
from collections.abc import Mapping

from dsv4cli.engine.deployment.cluster import Architecture, Cluster
from dsv4cli.engine.inspection.fit.cards import CARDS, card_named
from dsv4cli.engine.inspection.fit.machine import Device, parse_machine
from dsv4cli.errors import UsageError

NODES = re.compile(r"(\d{1,4})\s*[x×]\s*(\d{1,4}\s*[x×].*)", re.ASCII | re.IGNORECASE)
ARCHITECTURES: Mapping[Architecture, str] = {
    "hopper": "H20 H100 H100PCIE H100NVL H800 H200 H200NVL GH200",
    "blackwell": "B200 B300 PRO6000 5080 5090",
}
KNOWN: Mapping[str, Architecture] = {card: name for name, cards in ARCHITECTURES.items() for card in cards.split()}


def parse_cluster(text: str | None, nodes: int | None = None) -> Cluster:
    """Return a cluster such as `2x8xH200` or `8x141GB`; None stands for this machine's GPUs.

    Args:
        nodes: number of machines; None for the number in the text, or 1.

    Raises:
        UsageError: the text is invalid, has other GPUs in one machine, or another number of machines; there is no GPU.
    """
    match = NODES.fullmatch(text.strip()) if text is not None else None
    if match and nodes is not None and int(match[1]) != nodes:
        raise UsageError(f"--nodes {nodes} contradicts --gpus {text}", "use one of them")
    gpus = parse_machine(match[2] if match else text, None).gpus
    if not gpus:
        raise UsageError("nvidia-smi reports no GPU that is supported", "name the GPUs of a machine: --gpus 8xH200")
    count = int(match[1]) if match else nodes or 1
    if len({gpu.label for gpu in gpus}) > 1 or not count:
        raise UsageError(f"--gpus {text} has GPUs of several kinds or none", "name equal GPUs: --gpus 8xH200")
    return Cluster(count, len(gpus), *_kind(gpus[0]))


def _kind(gpu: Device) -> tuple[str, int, Architecture | None]:
    """Return the name of a GPU for `--gpus`, its memory in bytes and its architecture."""
    card = card_named(gpu.name)
    if card is None:
        return gpu.label, gpu.total, None
    return card, CARDS[card].mib * 2**20, KNOWN.get(card, "older")
