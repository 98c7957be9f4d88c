"""Converts the twin's fp32 parameters to a checkpoint in the official layout, with the codes that training used.

`python -m tools.nano.export MASTERS... --out FOLDER` writes what training would have written.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from dsv4cli.engine.checkpoint.layout import expected_tensors, matrices
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.conversion.metadata import metadata_files
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.kernels.block_scale import dequantise
from dsv4cli.kernels.recode import to_fp4, to_fp8
from tools.nano.shape import FORMATS, GENERATION, VALUES, nano_config, parameter_table

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
# prefix of the keys of a drafter's tensors
DRAFTER = "mtp."


def stored_tensors(
    parameters: Mapping[str, torch.Tensor], config: ModelConfig, prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint whose key begins with `prefix`, in its stored dtype, on the CPU.

    Args:
        parameters: by the names of shape.parameter_table, fp32 (tid2eid int64).
    """
    tensors: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    for spec in expected_tensors(config, FORMATS).values():
        if not spec.name.startswith(prefix):
            continue
        if spec.is_scale:
            tensors[spec.name] = scales[spec.matrix]
            continue
        whole = parameters[spec.parameter].detach().cpu()
        values = whole if spec.expert is None else whole[spec.expert]
        if spec.dtype in ("I8", "F8_E4M3"):
            quantise = to_fp4 if spec.dtype == "I8" else to_fp8
            tensors[spec.name], scales[spec.matrix] = quantise(values.contiguous())
        else:
            # a copy: tensors that share memory cannot be saved
            tensors[spec.name] = values.to(TORCH_DTYPES[spec.dtype], copy=True).contiguous()
    return tensors


def trunk_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return every stored tensor of nano's checkpoint except those of its drafter."""
    return {key: tensor for key, tensor in load_file(folder / WEIGHTS).items() if not key.startswith(DRAFTER)}


def parameters_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the parameters of nano's checkpoint by the names of shape.parameter_table: fp32 values, tid2eid int64."""
    tensors, config = load_file(folder / WEIGHTS), nano_config()
    table = parameter_table(config)
    rows: dict[str, list[torch.Tensor]] = defaultdict(list)
    for parts in matrices(expected_tensors(config, FORMATS).values()).values():
        spec = parts["weight"]
        scale = tensors[parts["scale"].name] if "scale" in parts else None
        weight = tensors[spec.name]
        rows[spec.parameter].append(weight if spec.dtype == "I64" else dequantise(weight, scale))
    return {name: torch.stack(found).view(table[name].shape) for name, found in rows.items()}


def export(parameters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write config.json, generation_config.json, model.safetensors and its index.

    Other files in the folder are kept.
    """
    _write(stored_tensors(parameters, nano_config()), VALUES, folder)


def export_drafter(parameters: Mapping[str, torch.Tensor], values: Mapping[str, Any], nano: Path, folder: Path) -> None:
    """Export the model that `values` configure: its drafter's parameters, and nano's trunk byte for byte."""
    drafter = stored_tensors(parameters, parse_config(values, "nano"), DRAFTER)
    _write(trunk_tensors(nano) | drafter, values, folder)
    for name in TOKENIZER:
        (folder / name).write_bytes((nano / name).read_bytes())


def _write(tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # metadata_files starts from the config.json of a folder
    _write_json(folder / "config.json", values)
    for name, text in metadata_files(folder, parse_config(values, "nano"), FORMATS, "official").items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_json(folder / "generation_config.json", GENERATION)
    save_file(dict(tensors), folder / WEIGHTS, {"format": "pt"})
    # safetensors creates files that only their owner can read
    (folder / WEIGHTS).chmod(0o644)
    size = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = dict.fromkeys(sorted(tensors), WEIGHTS)
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def read_masters(folder: Path) -> dict[str, torch.Tensor]:
    """Return the fp32 parameters that a training wrote to masters-*.safetensors."""
    parameters: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("masters-*.safetensors")):
        parameters |= load_file(path)
    return parameters


def main() -> None:
    """Parse the arguments and export."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("masters", nargs="+", type=Path, help="the files masters-*.safetensors of a training")
    parser.add_argument("--out", required=True, type=Path, help="the folder of the checkpoint")
    arguments = parser.parse_args()
    parameters: dict[str, torch.Tensor] = {}
    for path in arguments.masters:
        parameters |= load_file(path)
    export(parameters, arguments.out)


if __name__ == "__main__":
    main()
