"""The mixture of experts: a router (scored, or by token id in hash layers), routed experts, one shared expert."""

import torch
from torch import nn

from dsv4cli.engine.batch import Batch
from dsv4cli.engine.config import ModelConfig
from dsv4cli.engine.linear import Fp32Linear, Linear, StoredMatrix, unfilled
from dsv4cli.engine.numerics import Numerics
from dsv4cli.engine.parallel import World
from dsv4cli.kernels import experts, routing


class Router(Fp32Linear):
    """`ffn.gate`: scores all experts, chooses by biased score or, in a hash layer, by token id."""

    tid2eid: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, is_hash: bool) -> None:
        super().__init__()
        self.config = config
        self.register_parameter("tid2eid", unfilled() if is_hash else None)
        self.register_parameter("bias", None if is_hash else unfilled())

    def route(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [T, D], token ids int64 [T] -> expert numbers int64 [T, k] and their weights fp32 [T, k]."""
        score = routing.scores(self(x))
        if self.tid2eid is not None:
            chosen = self.tid2eid[ids]
        else:
            assert self.bias is not None
            chosen = routing.choose(score, self.bias, self.config.num_experts_per_tok)
        return chosen, routing.weigh(score, chosen, self.config.routed_scaling_factor)


class Experts(nn.Module):
    """The routed experts, each matrix stacked over all of them; a rank holds its share of their inner width."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.numerics = numerics
        self.w1 = StoredMatrix()
        self.w2 = StoredMatrix()
        self.w3 = StoredMatrix()

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [T, D], chosen int64 [T, k], weights fp32 [T, k] -> the weighted sum, fp32 [T, D]."""
        w1, w2, w3 = self.w1, self.w2, self.w3
        stored = experts.ExpertWeights(w1.weight, w1.scale, w2.weight, w2.scale, w3.weight, w3.scale)
        round_inputs = self.numerics.simulate and w1.scale is not None
        return experts.routed_experts(x, stored, chosen, weights, self.limit, round_inputs)


class SharedExpert(nn.Module):
    """The expert that every token goes through, with the same clamp."""

    def __init__(self, config: ModelConfig, numerics: Numerics) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.w1 = Linear(numerics)
        self.w2 = Linear(numerics)
        self.w3 = Linear(numerics)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, D] -> [T, D]."""
        return self.w2(experts.gated(self.w1(x), self.w3(x), self.limit).to(x.dtype))


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer."""

    def __init__(self, config: ModelConfig, numerics: Numerics, is_hash: bool, world: World) -> None:
        super().__init__()
        self.world = world
        self.gate = Router(config, is_hash)
        self.experts = Experts(config, numerics)
        self.shared_experts = SharedExpert(config, numerics)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x: normed hidden state [T, D] -> [T, D]."""
        chosen, weights = self.gate.route(x, batch.ids)
        routed = self.world.all_reduce(self.experts(x, chosen, weights))
        return (routed + self.shared_experts(x).float()).to(x.dtype)
