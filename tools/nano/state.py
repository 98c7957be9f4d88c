"""The state of a training run between two steps (parameters, optimizer, counters), and how it is saved."""

import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv4cli.engine.config.model_config import ModelConfig
from tools.nano.export import export, read_masters
from tools.nano.shape import initial_parameters

STATE, COUNTERS = "state.pt", "counters.json"
BETAS, DECAY = (0.9, 0.95), 0.1
# maximum size of one file of fp32 parameters, in bytes
PIECE_BYTES = 15 * 2**20


@dataclass
class State:
    """The state of a training run.

    Attributes:
        parameters: fp32 masters and tables by name.
        batches: number of batches used.
        seconds: training time so far.
        warmed_from: step at which the optimizer started.
    """

    parameters: dict[str, torch.Tensor]
    optimiser: torch.optim.Optimizer
    step: int = 0
    batches: int = 0
    evaluations: int = 0
    seconds: float = 0.0
    warmed_from: int = 0

    def trained(self) -> list[torch.Tensor]:
        """Return the parameters that have a gradient."""
        return [tensor for tensor in self.parameters.values() if tensor.requires_grad]


def new_state(config: ModelConfig, seed: int, device: torch.device, rate: float) -> State:
    """Return the state of a new run."""
    return state_of(initial_parameters(config, seed), device, rate)


def state_of(parameters: Mapping[str, torch.Tensor], device: torch.device, rate: float) -> State:
    """Return the state of a new run with these parameters."""
    placed = {name: tensor.to(device) for name, tensor in parameters.items()}
    for name, tensor in placed.items():
        tensor.requires_grad_(tensor.is_floating_point() and not name.endswith("gate.bias"))
    return State(placed, _optimiser(placed, rate))


def _optimiser(parameters: Mapping[str, torch.Tensor], rate: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay only for matrices of linears."""
    trained = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
    decayed = [name for name in trained if _decays(name, trained[name])]
    groups = [
        {"params": [trained[name] for name in decayed], "weight_decay": DECAY},
        {"params": [trained[name] for name in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def _decays(name: str, tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and name.endswith(".weight") and name != "embed.weight"


def load_state(folder: Path, device: torch.device, rate: float) -> State:
    """Load a run that `save_state` saved. Without state.pt, load the masters and start with a new optimizer."""
    path = folder / STATE
    if path.is_file():
        saved = torch.load(path, map_location="cpu", weights_only=True)
        state = state_of(saved["parameters"], device, rate)
        state.optimiser.load_state_dict(saved["optimiser"])
    else:
        state = state_of(read_masters(folder), device, rate)
    for name, value in json.loads((folder / COUNTERS).read_text(encoding="utf-8")).items():
        setattr(state, name, value)
    if not path.is_file():
        state.warmed_from = state.step
    return state


def save_state(state: State, folder: Path) -> None:
    """Save state.pt and counters.json to continue from, the fp32 parameters, and the checkpoint.

    The parameters are in masters-N.safetensors, the checkpoint in folder/checkpoint.
    """
    parameters = {name: tensor.detach().cpu() for name, tensor in state.parameters.items()}
    partial = folder / (STATE + ".partial")
    torch.save({"parameters": parameters, "optimiser": state.optimiser.state_dict()}, partial)
    partial.replace(folder / STATE)
    counters = {field.name: getattr(state, field.name) for field in fields(State) if field.default is not MISSING}
    (folder / COUNTERS).write_text(json.dumps(counters) + "\n", encoding="utf-8")
    save_masters(state, folder)
    export(parameters, folder / "checkpoint")


def save_masters(state: State, folder: Path) -> None:
    """Save the fp32 parameters as masters-N.safetensors."""
    parameters = {name: tensor.detach().cpu() for name, tensor in state.parameters.items()}
    for number, piece in enumerate(_pieces(parameters), 1):
        save_file(piece, folder / f"masters-{number}.safetensors")


def _pieces(parameters: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    pieces: list[dict[str, torch.Tensor]] = [{}]
    size = 0
    for name, tensor in parameters.items():
        if size + tensor.nbytes > PIECE_BYTES:
            pieces.append({})
            size = 0
        pieces[-1][name] = tensor.contiguous()
        size += tensor.nbytes
    return pieces
