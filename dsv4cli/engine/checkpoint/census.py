"""Detection of a checkpoint's storage formats by a majority of its headers; no torch."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dsv4cli.engine.checkpoint.foreign import RESCALE, Foreign, refusal
from dsv4cli.engine.checkpoint.headers import Checkpoint
from dsv4cli.engine.config.formats import CODE_DTYPES, E8M0_DTYPES, STORAGE, FormatName
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
    """Return the storage format of most weights of each kind; the others count as mistyped (see `coverage`)."""
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
    """Return the storage format of most of these weights, by their dtype and, if ambiguous, their scales' dtype."""
    dtype = Counter(checkpoint.tensors[name].dtype for name in weights).most_common(1)[0][0]
    allowed = ALLOWED_FORMATS.get(field, MATRIX_FORMATS)
    scale = _scale_dtype(checkpoint, weights, ("scale", "weight_scale") if dtype in CODE_DTYPES else ("scale",))
    if dtype in CODE_DTYPES:
        # without scales the dtype of the codes tells: I8 in the releases, U8 in ModelOpt's exports
        is_nvfp4 = scale == "F8_E4M3" if scale else dtype == STORAGE["nvfp4"].dtype
        forms: list[FormatName] = [form for form in allowed if form == ("nvfp4" if is_nvfp4 else "fp4")]
    else:
        forms = [form for form in allowed if STORAGE[form].dtype == dtype]
    if not forms:
        known = ", ".join(STORAGE[form].words for form in allowed)
        what = f"a checkpoint whose {field} weights are stored as {dtype}"
        raise refusal(checkpoint.folder, Foreign(what), f"known are {known}")
    if not scale:
        return forms[0]
    known_scales = {form: STORAGE[form].scales[0].dtype for form in forms if STORAGE[form].scales}
    found = "F8_E8M0" if scale in E8M0_DTYPES else scale
    fitting = [form for form in forms if known_scales.get(form, found) == found]
    if not fitting:
        what = f"a checkpoint whose {field} weights are {dtype} with block scales stored as {scale}"
        known = " or ".join(dict.fromkeys(known_scales.values()))
        raise refusal(checkpoint.folder, Foreign(what, RESCALE), f"known are {known}")
    return fitting[0]


def _scale_dtype(checkpoint: Checkpoint, weights: list[str], roles: tuple[str, ...]) -> str:
    """Return the dtype of most scales with these roles, '' if these weights have none."""
    census = Counter[str]()
    for weight in weights:
        matrix = weight.removesuffix("_packed").removesuffix(".weight")
        infos = (checkpoint.tensors.get(f"{matrix}.{last}") for last in roles)
        census.update(info.dtype for info in infos if info is not None)
    return census.most_common(1)[0][0] if census else ""


def dtype_aliases(checkpoint: Checkpoint, formats: Formats) -> dict[str, str]:
    """Return the header dtype, by name, of each tensor that may hold codes or e8m0 scales under an unusual dtype."""
    usual, drafter = STORAGE[formats.experts].dtype, STORAGE[formats.drafter].dtype
    found = {name: info.dtype for name, info in checkpoint.tensors.items() if info.dtype in CODE_DTYPES}

    def is_unusual(name: str, dtype: str) -> bool:
        if "/" in name:
            return dtype != "F4"  # in the files of the official convert.py
        if name.endswith(("_packed", ".weight_scale")):
            return False  # U8 in those of compressed-tensors
        return dtype != (drafter if name.startswith("mtp.") else usual)

    return {name: dtype for name, dtype in found.items() if is_unusual(name, dtype)}


def alias_notes(aliases: Mapping[str, str], formats: Formats) -> Iterator[str]:
    """Yield a sentence for each unusual dtype with the same bytes as the usual one. aliases: from `dtype_aliases`."""
    codes, scales = Counter[tuple[FormatName, str]](), Counter[str]()
    for name, dtype in aliases.items():
        if name.endswith(".scale"):
            scales[dtype] += 1
        elif ".experts." in name and name.endswith(".weight"):
            codes[formats.drafter if name.startswith("mtp.") else formats.experts, dtype] += 1
    for (form, dtype), count in codes.items():
        usual = STORAGE[form].dtype
        yield f"the {form} codes of {count:,} matrices are stored as {dtype}, which has the same bytes as {usual}"
    for dtype, count in scales.items():
        yield f"{count:,} e8m0 scales are stored as {dtype}, which has the same bytes as F8_E8M0"
