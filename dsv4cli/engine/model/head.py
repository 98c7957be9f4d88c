"""From the streams to the input of the head: the hyper-head and the final norm, of the model and of each drafter."""

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.linear import RMSNorm, unfilled
from dsv4cli.kernels import hyper_connections
from dsv4cli.kernels.hyper_connections import Connection


def add_head(module: nn.Module, config: ModelConfig) -> None:
    """Gives a module the parameters `hc_head_fn`, `hc_head_base`, `hc_head_scale` and the final `norm`."""
    for name in ("fn", "base", "scale"):
        module.register_parameter(f"hc_head_{name}", unfilled())
    module.add_module("norm", RMSNorm(config.rms_norm_eps))


def collapse(module: nn.Module, config: ModelConfig, streams: torch.Tensor) -> torch.Tensor:
    """One hidden state [R, D] of the streams [R, N, D], not yet normed; `module` has the parameters of add_head."""
    fn, base, scale = (module.get_parameter(f"hc_head_{name}") for name in ("fn", "base", "scale"))
    connection = Connection(fn, scale, base, 0, config.hc_eps, config.rms_norm_eps)
    return hyper_connections.connect_head(streams, connection)
