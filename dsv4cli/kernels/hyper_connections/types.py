"""The parameters of a hyper-connection."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Connection:
    """How N streams of width D are collapsed to a sublayer's input, and how its output is added to them.

    Attributes:
        fn: fp32 [(2 + N) * N, N * D], rows pre, post, comb; for the head [N, N * D], rows pre.
        scale: fp32 [3] for pre, post, comb; for the head [1].
        base: fp32, one value per row of fn.
        iterations: Sinkhorn iterations; 0 for the head, which has no comb.
        hc_eps: added to pre and in the iterations.
        norm_eps: eps of the norm of all streams.
    """

    fn: torch.Tensor
    scale: torch.Tensor
    base: torch.Tensor
    iterations: int
    hc_eps: float
    norm_eps: float
