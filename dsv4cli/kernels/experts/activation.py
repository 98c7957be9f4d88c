"""The activation between an expert's linears."""

import torch
import torch.nn.functional as F


def gated(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """Return silu(min(gate, limit)) * clamp(up, -limit, limit) in fp32. limit 0 clamps nothing."""
    gate, up = gate.float(), up.float()
    if limit > 0:
        gate, up = gate.clamp_max(limit), up.clamp(-limit, limit)
    return F.silu(gate) * up
