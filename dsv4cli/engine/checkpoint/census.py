"""In which formats the weights of a checkpoint are, as the headers of most of them tell; no torch."""

import re
from collections import Counter
from typing import Any

from dsv4cli.engine.checkpoint.foreign import Foreign, refusal
from dsv4cli.engine.checkpoint.headers import Checkpoint
from dsv4cli.engine.config.formats import STORAGE, FormatName
from dsv4cli.engine.config.storage import Formats

# patterns of the weights that tell a storage format, one for each field of Formats
FORMAT_SIGNS = {
    "linear": r"\.attn\.(wq_a|wq_b|wkv|wo_b)\.weight(_packed)?$|\.self_attn\.(q_a|q_b|kv|o_b)_proj\.weight$",
    "experts": r"layers\.\d+\.ffn\.experts\.\d+\.w[123]\.weight(_packed)?$|\.mlp\.experts\.(gate_up|down)_proj$",
    "dense": r"norm\.weight$",
    "wo_a": r"\.attn\.wo_a\.weight(_packed)?$|\.self_attn\.o_a_proj\.weight$",
    "draft_experts": r"mtp\.\d+\.ffn\.experts\.\d+\.w[123]\.weight(_packed)?$",
}
ALLOWED_FORMATS = {"experts": tuple(STORAGE), "draft_experts": tuple(STORAGE), "dense": ("bf16", "f32")}
ALLOWED_FORMATS |= {"wo_a": ("fp8", "fp8_f32", "bf16", "f32")}
MATRIX_FORMATS: tuple[FormatName, ...] = ("fp8", "fp8_f32", "nvfp4", "bf16", "f32")


def stored_formats(checkpoint: Checkpoint) -> Formats:
    """The storage format of most weights of each kind; the others count as mistyped (see coverage)."""
    found: dict[str, Any] = {}
    for field, pattern in FORMAT_SIGNS.items():
        sign = re.compile(pattern)
        weights = [name for name in checkpoint.tensors if sign.search(name)]
        if weights:
            found[field] = _format(checkpoint, field, weights)
    for field, usual in (("wo_a", "linear"), ("draft_experts", "experts")):
        if found.get(field) == found.get(usual):
            found.pop(field, None)
    return Formats(**found)


def _format(checkpoint: Checkpoint, field: str, weights: list[str]) -> FormatName:
    """The storage format of most of these weights: by their dtype and, where several have it, that of their scales."""
    dtype = Counter(checkpoint.tensors[name].dtype for name in weights).most_common(1)[0][0]
    if dtype == "U8" and _has_e8m0(checkpoint, weights):
        dtype = "I8"
    allowed = ALLOWED_FORMATS.get(field, MATRIX_FORMATS)
    forms = [form for form in allowed if STORAGE[form].dtype == ("I8" if dtype == "F4" else dtype)]
    if not forms:
        known = ", ".join(STORAGE[form].words for form in allowed)
        what = f"a checkpoint whose {field} weights are stored as {dtype}"
        raise refusal(checkpoint.folder, Foreign(what), f"known are {known}")
    if len(forms) == 1:
        return forms[0]
    scales = (checkpoint.tensors.get(name.removesuffix("weight") + "scale") for name in weights)
    census = Counter(info.dtype for info in scales if info is not None)
    if not census:
        return forms[0]
    scale = census.most_common(1)[0][0]
    fitting = [form for form in forms if STORAGE[form].scale("scale").dtype == scale]
    if not fitting:
        what = f"a checkpoint whose {field} weights are {dtype} with block scales stored as {scale}"
        known = " or ".join(STORAGE[form].scale("scale").dtype for form in forms)
        raise refusal(checkpoint.folder, Foreign(what), f"known are {known}")
    return fitting[0]


def _has_e8m0(checkpoint: Checkpoint, weights: list[str]) -> bool:
    """Whether most packed weights of compressed-tensors have e8m0 scales, which makes them FP4."""
    scales = (checkpoint.tensors.get(name.removesuffix("packed") + "scale") for name in weights)
    census = Counter(info.dtype for info in scales if info is not None)
    return bool(census) and census.most_common(1)[0][0] in ("U8", "F8_E8M0")
