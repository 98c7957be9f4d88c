"""Nano with attention heads of 512 dimensions, as Flash has, and the same answers: the other dimensions are 0.

llama.cpp takes a KV cache for the indexer's if its heads have as many dimensions as the indexer's (`llama-kv-cache.cpp`
of b11549), as those of nano do, and then divides by 0. The norms of a head see four times as many dimensions, so their
outputs double: half the norm weights and half the softmax scale make up for it, both exact.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.conversions import convert

NARROW, WIDE = 128, 512


def make_wide_nano(folder: Path) -> Path:
    """Write the model to a folder, in BF16 and without its drafter. Returns the folder."""
    convert("nano", folder, "--to", "bf16", "--no-mtp", "--verify", "off")
    [file] = folder.glob("*.safetensors")
    save_file({name: _widened(name, tensor) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    for name in ("model.safetensors.index.json", "SHA256SUMS"):
        (folder / name).unlink()
    file.rename(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_dim": WIDE}))
    return folder


def _widened(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if ".indexer." in name:
        return tensor
    if name.endswith(("attn.kv_norm.weight", "attn.compressor.norm.weight")):
        return _padded(tensor / 2, 0)
    if name.endswith(("wq_b.weight", "attn.wkv.weight", "compressor.wkv.weight", "compressor.wgate.weight")):
        return _padded(tensor, 0)
    return _padded(tensor, 1) if name.endswith(("compressor.ape", "wo_a.weight")) else tensor


def _padded(tensor: torch.Tensor, axis: int) -> torch.Tensor:
    """Insert zeros before the dimensions of each head; its last ones are rotated, and stay last."""
    heads = tensor.unflatten(axis, (-1, NARROW))
    shape = [*heads.shape]
    shape[axis + 1] = WIDE - NARROW
    return torch.cat([heads.new_zeros(shape), heads], axis + 1).flatten(axis, axis + 1).contiguous()
