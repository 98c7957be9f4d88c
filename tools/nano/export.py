"""From the twin's fp32 parameters to a checkpoint in the official layout: the codes that training has seen.

`python -m tools.nano.export MASTERS... --out FOLDER` writes what training would have written.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.conversion.metadata import metadata_files
from dsv4cli.engine.weights.fill import TORCH_DTYPES
from dsv4cli.kernels.recode import to_fp4, to_fp8
from tools.nano.shape import FORMATS, GENERATION, VALUES, nano_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


def stored_tensors(parameters: Mapping[str, torch.Tensor], config: ModelConfig) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint by key, in its stored dtype, on the CPU.

    parameters: by the names of shape.parameter_table, fp32 (tid2eid int64).
    """
    tensors: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    for spec in expected_tensors(config, FORMATS).values():
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


def export(parameters: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Writes config.json, generation_config.json, model.safetensors and its index; what else is there stays."""
    config = nano_config()
    tensors = stored_tensors(parameters, config)
    folder.mkdir(parents=True, exist_ok=True)
    # metadata_files starts from the config.json of a folder
    _write_json(folder / "config.json", VALUES)
    for name, text in metadata_files(folder, config, FORMATS, "official").items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_json(folder / "generation_config.json", GENERATION)
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    # safetensors makes files that only their owner can read
    (folder / WEIGHTS).chmod(0o644)
    size = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = dict.fromkeys(sorted(tensors), WEIGHTS)
    _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _write_json(path: Path, values: object) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Reads the arguments and exports."""
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
