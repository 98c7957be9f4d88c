"""Memory, bandwidth, compute and host link of GPUs, each with its source; no torch.

Memory is what nvidia-smi reports. Compute is dense bf16 with fp32 sums. The link is PCIe x16 in one direction: 31.5
GB/s for generation 4, 63 GB/s for generation 5. docs/hardware.md lists the same numbers and addresses.
"""

import re
from dataclasses import dataclass

GB = 10**9
PCIE_4, PCIE_5 = 31.5 * GB, 63 * GB


@dataclass(frozen=True)
class CardSpec:
    """A GPU.

    Attributes:
        mib: memory that nvidia-smi reports, in MiB.
        bandwidth: of its memory, in bytes/s.
        flops: dense bf16 operations/s.
        link: bandwidth from host memory, in bytes/s.
        source: keys of SOURCES: the page with the bandwidth, and the page with the compute if it is another one.
    """

    mib: int
    bandwidth: float
    flops: float
    link: float
    source: tuple[str, ...]


def _card(mib: int, gb_per_s: float, tflops: float, link: float, *source: str) -> CardSpec:
    return CardSpec(mib, gb_per_s * GB, tflops * 1e12, link, source)


SYSTEMS = "https://github.com/ai-dynamo/aiconfigurator/blob/main/src/aiconfigurator/systems"
# public pages with the numbers of the cards, looked up on 2026-11-29
SOURCES = {
    "torchtitan": "https://github.com/pytorch/torchtitan/blob/main/torchtitan/tools/utils.py",
    "open-instruct": "https://github.com/allenai/open-instruct/blob/main/open_instruct/utils.py",
    "leetcuda": "https://github.com/xlite-dev/LeetCUDA",
    "ao": "https://github.com/pytorch/ao/pull/4002",
    "nvidiaGPU": "https://github.com/frank622/nvidiaGPU",
    "ecer": "https://www.ecer.com/corp/details-uuuedqa-p1bsay9-multi-display-setups-supported-by-48gb-gddr6-ecc-memory-"
    "nvidia-a40-gpu-and-vga-outputs.html",
    "a100": "https://glennklockwood.com/garden/processors/A100",
    "b300": "https://glennklockwood.com/garden/processors/B300",
    "l4": "https://pcpartdb.com/gpus/compare/nvidia-l4--vs--nvidia-l20",
    "l20": "https://www.topcpu.net/en/gpu-c/a40-pcie-vs-l20",
    "l40": "https://www.mullet.se/product.html?product_id=355414",
    "h20": f"{SYSTEMS}/h20_sxm.yaml",
    "h800": f"{SYSTEMS}/h800_sxm.yaml",
    "h100-pcie": "https://manuals.plus/m/56b0c3ef7d0a1c470c0af8f05a0bd1f29a778007472ba941201fbbb185c9bccd",
    "h100-nvl": "https://grokipedia.com/page/210100120",
    "h200": "https://www.morphllm.com/nvidia-h200",
    "a6000": "https://servethehome.com/nvidia-rtx-a6000-48gb-gpu-drops-quadro-designation",
    "pro6000": f"{SYSTEMS}/rtx_pro_6000_server.yaml",
    "3090": "https://gpu.spicedreamphone.com/en/gpu/a40-pcie-vs-geforce-rtx-3090",
    "4090": "https://waredb.com/processor/nvidia-geforce-rtx-4090",
    "geforce": "https://ctc.archdevil.net/blog/23/674d47808ec559d480fae6d8",
    "5080": "https://www.tweaktown.com/news/102205/nvidias-new-geforce-rtx-5080-expected-to-feature-faster-30gbps-gddr7-"
    "memory-400w-power/index.html",
    "5080-compute": "https://hmc-tech.com/gpu/nvidia-geforce-rtx-5080-vs-amd-radeon-rx-540",
    "5090": f"{SYSTEMS}/rtx_5090.yaml",
    "5090-compute": "https://www.spheron.network/blog/nvidia-rtx-5090-specs/",
}
CARDS: dict[str, CardSpec] = {
    # data center, Ampere and Ada
    "A10": _card(23028, 600, 125, PCIE_4, "nvidiaGPU"),
    "A40": _card(46068, 696, 150, PCIE_4, "ecer"),
    "A100": _card(81920, 2039, 312, PCIE_4, "a100"),
    "A10040GB": _card(40960, 1555, 312, PCIE_4, "a100"),
    "L4": _card(23034, 300, 121, PCIE_4, "l4"),
    "L20": _card(46068, 864, 119, PCIE_4, "l20", "leetcuda"),
    "L40": _card(46068, 864, 181, PCIE_4, "l40"),
    "L40S": _card(46068, 864, 362, PCIE_4, "l40"),
    # Hopper and Blackwell; a B300 has PCIe 6, but the CPUs of its hosts have PCIe 5
    "H20": _card(97871, 4000, 148, PCIE_5, "h20"),
    "H100": _card(81559, 3350, 989, PCIE_5, "h200", "torchtitan"),
    "H100PCIE": _card(81559, 2000, 756, PCIE_5, "h100-pcie", "torchtitan"),
    "H100NVL": _card(95830, 3930, 835, PCIE_5, "h100-nvl", "torchtitan"),
    "H800": _card(81559, 3350, 989, PCIE_5, "h800"),
    "H200": _card(143771, 4800, 989, PCIE_5, "h200", "torchtitan"),
    "H200NVL": _card(143771, 4800, 835, PCIE_5, "h200"),
    "B200": _card(183359, 7672, 2250, PCIE_5, "ao", "torchtitan"),
    "B300": _card(275040, 8000, 2250, PCIE_5, "b300"),
    # workstation
    "A6000": _card(49140, 768, 155, PCIE_4, "a6000", "open-instruct"),
    "6000ADA": _card(49140, 960, 364, PCIE_4, "open-instruct"),
    "PRO6000": _card(97887, 1792, 503, PCIE_5, "pro6000", "open-instruct"),
    # GeForce: bf16 with fp32 sums has twice the rate of fp32, half that of fp16 with fp16 sums
    "3090": _card(24576, 936, 71, PCIE_4, "3090", "geforce"),
    "4080": _card(16376, 716, 97, PCIE_4, "5080", "geforce"),
    "4090": _card(24564, 1008, 165, PCIE_4, "4090"),
    "5080": _card(16303, 960, 113, PCIE_5, "5080", "5080-compute"),
    "5090": _card(32607, 1792, 210, PCIE_5, "5090", "5090-compute"),
}


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
