"""The two RoPE frequency tables: plain for layers of ratio 0, YaRN for layers of ratio 4 or 128.

Source: official model.py (`precompute_freqs_cis`): fp32 frequencies and angles, no attention factor, at every length.
"""

import math

import torch

from dsv4cli.engine.config.model_config import ModelConfig


def frequencies(config: ModelConfig, ratio: int) -> torch.Tensor:
    """Return the frequency of each RoPE pair for a layer of this ratio: fp32 [qk_rope_head_dim / 2]."""
    dims = config.qk_rope_head_dim
    theta = config.compress_rope_theta if ratio else config.rope_theta
    plain = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=torch.float32, device="cpu") / dims)
    if not ratio or not config.yarn.original_max_position_embeddings:
        return plain
    low, high = correction_range(config, theta)
    keep = 1 - ((torch.arange(dims // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    return plain / config.yarn.factor * (1 - keep) + plain * keep


def correction_range(config: ModelConfig, theta: float) -> tuple[float, float]:
    """Return the pairs (low, high) between which YaRN ramps up: `low` keeps its frequency, `high` is divided.

    The betas can put `high` below `low`; the ramp is then reversed, as in the official code.
    """
    dims, yarn = config.qk_rope_head_dim, config.yarn

    def pair(rotations: float) -> float:
        turns = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
        return dims * math.log(turns) / (2 * math.log(theta))

    low, high = max(math.floor(pair(yarn.beta_fast)), 0), min(math.ceil(pair(yarn.beta_slow)), dims - 1)
    return low, high if high != low else high + 0.001
