"""The parameters of a hyper-connection."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Connection:
    """How N streams of width D are collapsed to the input of a sublayer, and its output is given back to them.

    fn: fp32 [(2 + N) * N, N * D], rows pre, post, comb; of the head [N, N * D], rows pre.
    scale: fp32 [3] for pre, post, comb; of the head [1].
    base: fp32, as many as fn has rows.
    iterations: of Sinkhorn; 0 for the head, which makes no comb.
    hc_eps: added to pre and in the iterations. norm_eps: of the norm of all streams.
    """

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    iterations: int
    hc_eps: float
    norm_eps: float
