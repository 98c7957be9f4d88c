"""The MTP drafter in a GGUF file, under one set of names; no numpy.

llama.cpp keeps it in the block after the layers, with `nextn.` names and one matrix for e_proj and h_proj (source:
llama.cpp, src/models/deepseek4.cpp). ds4 names it `mtp.0.`, as dsv4 does here.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dsv4cli.engine.checkpoint.headers import TensorInfo
from dsv4cli.kernels.ggml.types import TYPES

Tensors = Mapping[str, TensorInfo]
PREFIX = "mtp.0."
IN_BLOCK, NEXTN = re.compile(r"blk\.(\d+)\.(.*)"), re.compile(r"blk\.(\d+)\.nextn\.")
FUSED = "nextn.eh_proj.weight"
HALVES = ("e_proj.weight", "h_proj.weight")
RENAMED = {
    "nextn.enorm.weight": "enorm.weight",
    "nextn.hnorm.weight": "hnorm.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
# tensors of the main model that llama.cpp uses where the block has none of its own
SHARED = {
    "norm.weight": "output_norm.weight",
    "hc_head_fn.weight": "output_hc_fn.weight",
    "hc_head_base.weight": "output_hc_base.weight",
    "hc_head_scale.weight": "output_hc_scale.weight",
}


@dataclass(frozen=True, slots=True)
class HalfInfo(TensorInfo):
    """One half of the columns of a stored matrix; `begin` and `end` are those of the whole. half: 0 or 1."""

    half: int = 0


@dataclass(frozen=True)
class StoredDrafter:
    """The drafter's tensors by name; no tensors if the file has none.

    stored: number of its tensors in the file. problem: why dsv4 cannot use it, '' if it may.
    """

    tensors: Tensors
    stored: int
    problem: str = ""

    def note(self, missing: Iterable[str] = ()) -> str:
        """Return the sentence about a drafter that is not used. missing: tensors that it lacks."""
        lacks = next(iter(missing), "")
        why = self.problem or f"{lacks.removeprefix(PREFIX)} is missing"
        return f"its drafter ({self.stored:,} tensors) is not used: {why}"


def drafter_blocks(tensors: Iterable[str]) -> set[int]:
    """Return the numbers of the blocks that are drafters by llama.cpp's names."""
    return {int(match[1]) for match in map(NEXTN.match, tensors) if match}


def split_drafter(tensors: Tensors) -> tuple[dict[str, TensorInfo], StoredDrafter]:
    """Return the tensors of the main model, and the drafter."""
    blocks = drafter_blocks(tensors)
    own = {name for name in tensors if name.startswith("mtp.") or _block(name) in blocks}
    main = {name: info for name, info in tensors.items() if name not in own}
    if not own:
        return main, StoredDrafter({}, 0)
    stages = len(blocks) + len({name.split(".")[1] for name in own if name.startswith("mtp.")})
    if stages > 1:
        return main, StoredDrafter({}, len(own), f"it has {stages} blocks, and dsv4 runs MTP drafters of one block")
    found: dict[str, TensorInfo] = {}
    for name in sorted(own):
        match = IN_BLOCK.fullmatch(name)
        found |= _renamed(match[2] if match else name.removeprefix(PREFIX), tensors[name])
    if "nextn.embed_tokens.weight" in found or "nextn.shared_head_head.weight" in found:
        return main, StoredDrafter({}, len(own), "it has an embedding or a head of its own")
    shared = {name: main[other] for name, other in SHARED.items() if other in main}
    return main, StoredDrafter({PREFIX + name: info for name, info in (shared | found).items()}, len(own))


def _block(name: str) -> int | None:
    match = IN_BLOCK.fullmatch(name)
    return int(match[1]) if match else None


def _renamed(name: str, info: TensorInfo) -> dict[str, TensorInfo]:
    """Return a tensor under its name in the drafter; the fused projection as two halves, if these are whole blocks."""
    if name != FUSED or len(info.shape) != 2 or info.shape[1] % (2 * TYPES[info.dtype].values):
        return {RENAMED.get(name, name): info}
    shape = (info.shape[0], info.shape[1] // 2)
    place = (info.name, info.dtype, shape, info.file, info.begin, info.end)
    return {half: HalfInfo(*place, half=number) for number, half in enumerate(HALVES)}
