"""Memory, bandwidth, compute and host link of GPUs, by data sheet; no torch.

Sources: NVIDIA's data sheet or architecture white paper of each card. Memory is what nvidia-smi reports. Compute is
dense bf16 with fp32 sums. The link is PCIe x16 in one direction: 31.5 GB/s for generation 4, 63 GB/s for generation 5.
"""

import re
from dataclasses import dataclass

GB = 10**9
PCIE_4, PCIE_5 = 31.5 * GB, 63 * GB
# bandwidth from the CPU's memory over NVLink-C2C, in one direction
C2C = 450 * GB


@dataclass(frozen=True)
class CardSpec:
    """A GPU.

    Attributes:
        mib: memory that nvidia-smi reports, in MiB.
        bandwidth: of its memory, in bytes/s.
        flops: dense bf16 operations/s.
        link: bandwidth from host memory, in bytes/s.
        source: the document with these numbers.
        measured: whether dsv4's throughput was measured on this card, so that estimates are calibrated to it.
    """

    mib: int
    bandwidth: float
    flops: float
    link: float
    source: str
    measured: bool = False


def _card(
    mib: int, gb_per_s: float, tflops: float, link: float, source: str = "data sheet", *, measured: bool = False
) -> CardSpec:
    return CardSpec(mib, gb_per_s * GB, tflops * 1e12, link, source, measured)


CARDS: dict[str, CardSpec] = {
    # data center, Ampere and Ada
    "A10": _card(23028, 600, 125, PCIE_4), "A30": _card(24576, 933, 165, PCIE_4),
    "A40": _card(46068, 696, 150, PCIE_4), "A100": _card(81920, 2039, 312, PCIE_4),
    "A10040GB": _card(40960, 1555, 312, PCIE_4), "L4": _card(23034, 300, 121, PCIE_4),
    "L20": _card(49140, 864, 119, PCIE_4), "L40": _card(46068, 864, 181, PCIE_4),
    "L40S": _card(46068, 864, 362, PCIE_4),
    # Hopper and Blackwell
    "H20": _card(97871, 4000, 148, PCIE_5), "H100": _card(81559, 3350, 989, PCIE_5, measured=True),
    "H100PCIE": _card(81559, 2000, 756, PCIE_5), "H100NVL": _card(95830, 3900, 835, PCIE_5),
    "H800": _card(81559, 3350, 989, PCIE_5), "H200": _card(143771, 4800, 989, PCIE_5, measured=True),
    "H200NVL": _card(143771, 4800, 835, PCIE_5), "GH200": _card(97871, 4000, 989, C2C),
    "B200": _card(183359, 8000, 2250, PCIE_5), "B300": _card(275040, 8000, 2250, PCIE_5),
    # workstation
    "A5000": _card(24564, 768, 111, PCIE_4), "A6000": _card(49140, 768, 155, PCIE_4),
    "6000ADA": _card(49140, 960, 364, PCIE_4),
    "PRO6000": _card(97887, 1792, 503, PCIE_5, "RTX Blackwell PRO white paper"),
    # GeForce: bf16 with fp32 sums runs at half the rate of fp16
    "3090": _card(24576, 936, 71, PCIE_4, "Ampere GA102 white paper"),
    "4080": _card(16376, 717, 97, PCIE_4, "Ada white paper"),
    "4090": _card(24564, 1008, 165, PCIE_4, "Ada white paper"),
    "5080": _card(16303, 960, 113, PCIE_5, "RTX Blackwell white paper"),
    "5090": _card(32607, 1792, 210, PCIE_5, "RTX Blackwell white paper"),
}  # fmt: skip


def bare_name(name: str) -> str:
    """Return the name of a card as spelled in CARDS."""
    return re.sub(r"[\s_-]|NVIDIA|GEFORCE|RTX", "", name.upper())


def card_named(name: str) -> str | None:
    """Return the key of the card with a name such as nvidia-smi's, None if it is unknown."""
    # the size of the memory may come before or after the kind: "H100 80GB HBM3", "A100-SXM4-40GB"
    bare = bare_name(re.sub(r"\b\d+\s*GB\b.*", "", name))
    found = [key for key in CARDS if bare.startswith(key) and not bare[len(key) :][:1].isdigit()]
    if "A100" in found and bare_name(name).endswith("40GB"):
        return "A10040GB"
    return max(found, key=len, default=None)
