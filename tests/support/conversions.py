"""Conversions in tests: running one, and reading what it wrote by plain code that shares no line with the converter."""

import contextlib
import io
import json
import re
import sys
from pathlib import Path

import torch

from dsv4cli import cli
from dsv4cli.kernels.block_scale import dequantise
from tests.support import damage
from tests.support.damage import Stored
from tests.support.oracle import RENAMES

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
TORCH = {
    "F32": torch.float32, "BF16": torch.bfloat16, "I64": torch.int64, "I8": torch.int8, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu, "F4": torch.int8,
}  # fmt: skip
# official convert.py: the component before .weight or .scale, or the last one, and the dimension that it cuts
CUT = {"embed": 0, "head": 0, "wq_b": 0, "wo_a": 0, "attn_sink": 0, "weights_proj": 0, "wo_b": 1}
CUT |= {"markov_w1": 0, "markov_w2": 0}
EXPERT = re.compile(r"\.ffn\.experts\.(\d+)\.w([123])\.weight$")


def convert(*arguments: object) -> str:
    """`dsv4 convert` in this process; returns stdout, fails with stderr."""
    code, out, err = run("convert", *arguments)
    assert code == 0, err
    return out


def run(*arguments: object) -> tuple[int, str, str]:
    """`dsv4` in this process: exit code, stdout, stderr."""
    before, sys.argv = sys.argv, ["dsv4", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("main came back")


def files(folder: Path) -> dict[str, bytes]:
    """The content of every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def stored(folder: Path) -> dict[str, Stored]:
    """Every stored tensor by name, from the files that the index names, or all."""
    index = folder / damage.INDEX
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
    paths = [folder / name for name in names] if names else sorted(folder.glob("model*.safetensors"))
    found: dict[str, Stored] = {}
    for path in paths:
        shard = damage.read_shard(path)
        assert not found.keys() & shard.keys()
        found |= shard
    return found


def ranks(folder: Path, count: int) -> list[dict[str, Stored]]:
    """The tensors of each of the official files for `count` ranks."""
    return [damage.read_shard(folder / f"model{rank}-mp{count}.safetensors") for rank in range(count)]


def tensor(entry: Stored) -> torch.Tensor:
    """A stored tensor; F4 packed, two values in a byte."""
    flat = torch.frombuffer(bytearray(entry.data), dtype=TORCH[entry.dtype])
    shape = [*entry.shape[:-1], entry.shape[-1] // 2] if entry.dtype == "F4" else entry.shape
    return flat.view(shape)


def official_values(tensors: dict[str, Stored]) -> dict[str, torch.Tensor]:
    """Values by weight of a checkpoint with official names: fp32, integers as they are; NVFP4 experts too."""
    values = {}
    for name, entry in tensors.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scale", ".weight_scale", ".weight_scale_2", ".input_scale")):
            continue
        if entry.dtype == "U8":
            scale = tensor(tensors[f"{stem}.weight_scale"]).float() * tensor(tensors[f"{stem}.weight_scale_2"])
            values[name] = e2m1(entry) * scale.repeat_interleave(16, dim=1)
        elif f"{stem}.scale" in tensors:
            values[name] = dequantise(tensor(entry), tensor(tensors[f"{stem}.scale"]))
        else:
            value = tensor(entry)
            values[name] = value.float() if value.is_floating_point() else value
    return values


def e2m1(entry: Stored) -> torch.Tensor:
    """The codes' values, without any scale."""
    packed = tensor(entry).view(torch.uint8).long()
    return torch.stack((E2M1[packed & 15], E2M1[packed >> 4]), dim=-1).flatten(1)


def transformers_values(tensors: dict[str, Stored], names: list[str]) -> dict[str, torch.Tensor]:
    """Values by official name of a checkpoint with transformers' names; every stored tensor must be used up."""
    values, used = {}, set()
    for name in names:
        key, expert, half = transformers_place(name)
        value = tensor(tensors[key])
        value = value if expert is None else value[expert]
        value = value if half is None else value.chunk(2)[half]
        values[name] = value.float() if value.is_floating_point() else value
        used.add(key)
    assert used == tensors.keys()
    return values


def transformers_place(name: str) -> tuple[str, int | None, int | None]:
    """The parameter of transformers that holds a weight; the expert in it, and the half of gate_up_proj."""
    if name.startswith("mtp."):
        return name, None, None
    found = EXPERT.search(name)
    if found is None:
        for pattern, replacement in RENAMES:
            name = re.sub(pattern, replacement, name)
        return name, None, None
    expert, matrix = int(found[1]), found[2]
    prefix = f"model.{name[: found.start()]}.mlp.experts."
    if matrix == "2":
        return prefix + "down_proj", expert, None
    return prefix + "gate_up_proj", expert, int(matrix == "3")


def cut_dimension(name: str) -> int | None:
    """The dimension that the official convert.py cuts; not of routed experts."""
    parts = name.split(".")
    leaf = parts[-2] if parts[-1] in ("weight", "scale") else parts[-1]
    return CUT.get(leaf)


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bit for bit, the sign of zero included."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    bits = torch.int32 if first.dtype == torch.float32 else first.dtype
    return torch.equal(first.contiguous().view(bits), second.contiguous().view(bits))


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> list[str]:
    """The names that only one side has or whose values are not the same bit for bit."""
    names = first.keys() | second.keys()
    return sorted(
        name for name in names if name not in first or name not in second or not same(first[name], second[name])
    )
