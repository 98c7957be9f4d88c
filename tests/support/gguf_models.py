"""nano as a GGUF file in the types of published files: llama.cpp's, ds4's and unsloth's mixes.

Types without an encoder here get random blocks with the RMS of the matrix: such a model runs, and says nothing.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dsv4cli.engine.checkpoint.gguf.header import gguf_header, tensor_bytes, tensor_places
from dsv4cli.engine.checkpoint.gguf.naming import GgufNaming, gguf_name
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.layout import expected_tensors, matrices
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.gguf.encode import encode
from dsv4cli.engine.conversion.gguf.metadata import gguf_metadata
from dsv4cli.kernels.ggml.types import TYPES, decode
from dsv4cli.kernels.recode import to_fp4
from tests.support.conversions import official_values, stored
from tests.support.ggml_blocks import random_rows

NANO = Path("dsv4cli/nano")
# type by a pattern of the tensor's name, the first that matches; a row of no whole number of blocks becomes Q8_0
VECTORS = {r"norm|_base|_scale|sinks|_b\.bias": "F32", r"tid2eid": "I32"}
LLAMA = VECTORS | {
    r"ffn_down_exps": "Q6_K", r"_exps": "Q4_K", r"token_embd": "Q4_K", r"^output\.": "Q6_K",
    r"gate_inp|_ape|hc_": "F32", r"attn_q_b": "Q5_0", r"attn_kv": "Q5_K", r"attn_output_a": "Q4_0",
    r"compressor": "BF16", r"": "Q4_K",
}  # fmt: skip
DS4 = VECTORS | {
    r"ffn_down_exps": "Q2_K", r"_exps": "IQ2_XXS", r"token_embd|gate_inp|hc_|compressor|indexer|_ape": "F16",
    r"": "Q8_0",
}  # fmt: skip
UNSLOTH = VECTORS | {
    r"blk\.0\.ffn_down_exps": "IQ3_S", r"blk\.1\.ffn_down_exps": "IQ4_XS", r"blk\.2\.ffn_down_exps": "MXFP4",
    r"blk\.3\.ffn_down_exps": "Q3_K", r"blk\.0\..*_exps": "IQ2_XS", r"blk\.1\..*_exps": "IQ2_S",
    r"blk\.3\..*_exps": "IQ4_NL", r"_exps": "IQ3_XXS", r"_ape|hc_|indexer\.proj": "F32", r"gate_inp": "BF16",
    r"shexp|output_b": "Q6_K", r"": "Q8_0",
}  # fmt: skip
MIXES = {"llama.cpp": LLAMA, "ds4": DS4, "unsloth": UNSLOTH}
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def write_nano(
    folder: Path,
    kinds: Mapping[str, str],
    *,
    parts: int = 1,
    change: Callable[[dict[str, Any]], Any] = lambda metadata: None,
    seed: int = 0,
    drafter: str = "",
) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write nano. Return the first file, and the official names with the values that it stores.

    Args:
        kinds: tensor type by a pattern of the GGUF name.
        parts: number of files; if more than one, the first holds no tensors, as gguf-split can write it.
        change: changes the metadata in place.
        drafter: "nextn" for the names of llama.cpp, "mtp" for those of ds4, "" for none.
    """
    identity = identify(NANO)
    metadata = gguf_metadata(identity, identity.config.without_drafter(), Formats("f32", "fp4", "bf16"), {})
    tensors, contents, values = _stored(tuple(kinds.items()), seed, bool(drafter))
    if drafter == "nextn":
        tensors, contents = _as_nextn(tensors, contents, metadata)
    change(metadata)
    return _write(folder, metadata, tensors, contents, parts), values


def _as_nextn(
    tensors: Tensors, contents: Mapping[str, bytes], metadata: dict[str, Any]
) -> tuple[Tensors, dict[str, bytes]]:
    """Return the tensors with the drafter as llama.cpp stores it: in the block after the layers, e_proj and h_proj
    side by side, and without a hyper-head of its own."""
    layers = metadata["deepseek4.block_count"]
    metadata["deepseek4.block_count"], metadata["deepseek4.nextn_predict_layers"] = layers + 1, 1
    metadata["deepseek4.attention.compress_ratios"] = [*metadata["deepseek4.attention.compress_ratios"], 0]
    own = {"enorm.weight": "enorm", "hnorm.weight": "hnorm", "norm.weight": "shared_head_norm"}
    renamed, found = Tensors(), dict[str, bytes]()
    for name, (kind, shape) in tensors.items():
        short = name.removeprefix("mtp.0.")
        if short == name:
            renamed[name], found[name] = (kind, shape), contents[name]
        elif short in own:
            new = f"blk.{layers}.nextn.{own[short]}.weight"
            renamed[new], found[new] = (kind, shape), contents[name]
        elif short == "e_proj.weight":
            both = [
                np.frombuffer(contents[f"mtp.0.{half}_proj.weight"], np.uint8).reshape(shape[0], -1) for half in "eh"
            ]
            new = f"blk.{layers}.nextn.eh_proj.weight"
            renamed[new], found[new] = (kind, (shape[0], 2 * shape[1])), np.concatenate(both, axis=1).tobytes()
        elif short != "h_proj.weight" and not short.startswith("hc_head"):
            new = f"blk.{layers}.{short}"
            renamed[new], found[new] = (kind, shape), contents[name]
    return renamed, found


@cache
def _stored(
    kinds: tuple[tuple[str, str], ...], seed: int, drafter: bool
) -> tuple[Tensors, dict[str, bytes], dict[str, torch.Tensor]]:
    """Return type and shape of each tensor, its bytes, and by official name the values that they stand for."""
    config = identify(NANO).config
    config = config if drafter else config.without_drafter()
    originals, table = official_values(stored(NANO)), expected_tensors(config, Formats("f32", "f32", "f32"))
    naming, rng = GgufNaming(config.n_routed_experts, {}), np.random.default_rng(seed)
    tensors, data, values = Tensors(), dict[str, list[np.ndarray]](), dict[str, torch.Tensor]()
    for roles in matrices(table.values()).values():
        spec = roles["weight"]
        name, shape = gguf_name(spec), naming.shape(spec)
        kind = _kind(name, shape, dict(kinds))
        rows = _rows(kind, originals[spec.name].numpy(), int(rng.integers(1 << 30)))
        tensors[name] = kind, shape
        data.setdefault(name, []).append(rows)
        found = rows.astype(np.int64) if kind == "I32" else decode(kind, rows.view(np.uint8))
        values[spec.name] = torch.from_numpy(np.array(found)).reshape(originals[spec.name].shape)
    return tensors, {name: b"".join(part.tobytes() for part in rows) for name, rows in data.items()}, values


def _kind(name: str, shape: tuple[int, ...], kinds: Mapping[str, str]) -> str:
    kind = next(kind for pattern, kind in kinds.items() if re.search(pattern, name))
    if len(shape) == 1:
        return "F32" if kind != "I32" else kind
    return kind if shape[-1] % TYPES[kind].values == 0 else "Q8_0"


def _rows(kind: str, values: np.ndarray, seed: int) -> np.ndarray:
    if kind in ("F32", "I32"):
        return values.astype({"F32": np.float32, "I32": np.int32}[kind])
    if kind == "F16":
        return values.astype(np.float16)
    if kind == "BF16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    if kind == "Q8_0":
        return encode("Q8_0", {"weight": values})
    if kind == "MXFP4":
        weight, scale = to_fp4(torch.from_numpy(values))
        return encode("MXFP4", {"weight": weight.numpy(), "scale": scale.view(torch.uint8).numpy()})
    columns = values.shape[-1] // TYPES[kind].values
    # decoded values are linear in the block scales
    size = np.sqrt(np.mean(np.square(decode(kind, random_rows(kind, 16, 4, seed, 1.0)))))
    scale = float(np.sqrt(np.mean(np.square(values))) / size)
    return random_rows(kind, len(values), columns, seed, scale)


def _write(folder: Path, metadata: dict[str, Any], tensors: Tensors, data: Mapping[str, bytes], parts: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    groups = [names] if parts == 1 else [[], *(names[part :: parts - 1] for part in range(parts - 1))]
    paths = []
    for number, group in enumerate(groups):
        said, path = dict(metadata) if number == 0 else {}, folder / "nano.gguf"
        if parts > 1:
            said |= {"split.no": number, "split.count": parts, "split.tensors.count": len(tensors)}
            path = folder / f"nano-{number + 1:05}-of-{parts:05}.gguf"
        mine = {name: tensors[name] for name in group}
        content = bytearray(gguf_header(said, mine))
        start = len(content)
        for name, (begin, _) in zip(mine, tensor_places(mine), strict=True):
            content += bytes(start + begin - len(content)) + data[name]
            assert len(data[name]) == tensor_bytes(*mine[name]), name
        path.write_bytes(content)
        paths.append(path)
    return paths[0]
