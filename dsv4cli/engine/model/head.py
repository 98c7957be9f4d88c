"""The hyper-head and the final norm, from residual streams to the head's input; for the model and each drafter."""

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.linear import RMSNorm, unfilled
from dsv4cli.kernels import hyper_connections
from dsv4cli.kernels.hyper_connections import Connection


def add_head(module: nn.Module, config: ModelConfig) -> None:
    """Add the parameters `hc_head_fn`, `hc_head_base`, `hc_head_scale` and the final `norm` to a module."""
    for name in ("fn", "base", "scale"):
        module.register_parameter(f"hc_head_{name}", unfilled())
    module.add_module("norm", RMSNorm(config.rms_norm_eps))


def collapse(module: nn.Module, config: ModelConfig, streams: torch.Tensor) -> torch.Tensor:
    """Merge streams [R, N, D] into one hidden state [R, D], before the norm. `module` was given to `add_head`."""
    fn, base, scale = (module.get_parameter(f"hc_head_{name}") for name in ("fn", "base", "scale"))
    connection = Connection(fn, scale, base, 0, config.hc_eps, config.rms_norm_eps)
    return hyper_connections.connect_head(streams, connection)
