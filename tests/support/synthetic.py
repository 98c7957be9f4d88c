"""Checkpoints of random weights in the official layout: files as published, scales as far apart as real ones.

Real shapes by the preset; a layer is in memory at a time.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec, expected_tensors
from dsv4cli.engine.config.presets import FLASH, TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.weights.random_weights import random_tensors
from tests.support.damage import INDEX

# three layers of Flash, one of each kind, and the draft stage: 2.3 GB with 20 experts and a quarter of the vocabulary
LARGE = FLASH | {
    "num_hidden_layers": 3,
    "num_hash_layers": 1,
    "compress_ratios": [0, 4, 128, 0],
    "n_routed_experts": 20,
    "vocab_size": 32768,
}
# the smallest model with a DSpark drafter of three stages
DSPARK = TINY | {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128, 0, 0, 0],
    "n_routed_experts": 4,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 500,
    "dspark_target_layer_ids": [0, 1, 2],
    "dspark_markov_rank": 32,
}
# the smallest model that has every kind of stored tensor
SMALL = TINY | {
    "num_hidden_layers": 2,
    "compress_ratios": [0, 4, 0],
    "n_routed_experts": 2,
    "vocab_size": 128,
}
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def write_checkpoint(folder: Path, values: dict[str, Any], seed: int = 0) -> Path:
    """Writes a model: one file for the embedding, one a layer, one for the head, one a draft stage, and the index."""
    config = parse_config(values, "synthetic")
    folder.mkdir(parents=True)
    text = json.dumps(values | {"expert_dtype": "fp4", "quantization_config": QUANTIZATION, "hidden_act": "silu"})
    (folder / "config.json").write_text(text)
    specs = sorted(expected_tensors(config, Formats()).values(), key=_file)
    groups = [list(group) for _, group in groupby(specs, _file)]
    weight_map = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file(dict(_tensors(group, seed, config.n_routed_experts)), folder / name, {"format": "pt"})
        weight_map |= {spec.name: name for spec in group}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_holes(folder: Path, values: dict[str, Any], count: int) -> tuple[int, int]:
    """Writes a model whose weights are holes (zeros) in `count` files: bytes of all tensors and of the largest file."""
    specs = list(expected_tensors(parse_config(values, "synthetic"), Formats()).values())
    per_file, total, index = -(-len(specs) // count), 0, {}
    for number in range(count):
        header, end, name = {}, 0, f"model-{number + 1:05}-of-{count:05}.safetensors"
        for spec in specs[number * per_file : (number + 1) * per_file]:
            start, end = end, end + prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8
            header[spec.name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": (start, end)}
        text = json.dumps(header).encode()
        (folder / name).write_bytes(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / name, 8 + len(text) + end)
        index |= dict.fromkeys(header, name)
        total += end
    (folder / INDEX).write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(values))
    return total, max(path.stat().st_size for path in folder.glob("*.safetensors"))


def _file(spec: TensorSpec) -> tuple[int, int]:
    """Sorts tensors by the file that they are in: embedding, layers, head, draft stages."""
    kind, _, rest = spec.name.partition(".")
    order = {"embed": 0, "layers": 1, "mtp": 3}.get(kind, 2)
    return order, int(rest.partition(".")[0]) if order in (1, 3) else 0


def _tensors(specs: Iterable[TensorSpec], seed: int, experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    for spec, tensor in random_tensors(specs, seed, experts):
        if spec.is_scale:
            tensor = _spread(tensor)
        elif spec.dtype == "I8":
            _awkward_codes(tensor.view(torch.uint8))
        elif spec.dtype == "F8_E4M3":
            # -0, the smallest code, the largest
            tensor.view(torch.uint8)[0, :3] = torch.tensor([0x80, 0x01, 0xFE], dtype=torch.uint8)
        elif spec.dtype == "BF16":
            tensor.view(-1)[0] = -0.0
        yield spec.name, tensor.contiguous()


def _spread(scale: torch.Tensor) -> torch.Tensor:
    """The scales with exponents up to 6 apart from where they were, most of them less than 2."""
    generator = torch.Generator().manual_seed(scale.numel())
    steps = (torch.randn(scale.shape, generator=generator) * 1.5).round().clamp(-6, 6)
    return (scale.view(torch.uint8) + steps).to(torch.uint8).view(torch.float8_e8m0fnu)


def _awkward_codes(packed: torch.Tensor) -> None:
    """Rows whose scales are not unique: groups of -0, of 0, of codes up to 1, and of one value among zeros."""
    packed[0, :16] = 0x88
    packed[1, :16] = 0x00
    packed[2, :16] &= 0x9A
    packed[3, :16] = 0x80
    packed[3, 5] = 0x87
