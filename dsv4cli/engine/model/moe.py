"""Mixture of experts: a router (by score, or by token id in hash layers), routed experts and one shared expert."""

from typing import Protocol

import torch
from torch import nn

from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.linear import Linear, MatrixParameters, unfilled
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.parallel.world import World
from dsv4cli.kernels import experts, routing
from dsv4cli.kernels.experts import ExpertWeights


class Router(nn.Module):
    """The router `ffn.gate`: selects the top-k experts by score plus bias, or by token id in a hash layer."""

    tid2eid: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: ModelConfig, is_hash: bool) -> None:
        super().__init__()
        self.config = config
        self.weight = unfilled()
        self.register_parameter("tid2eid", unfilled() if is_hash else None)
        self.register_parameter("bias", None if is_hash else unfilled())

    def forward(
        self, x: torch.Tensor, ids: torch.Tensor, routed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Route x [T, D] with token ids int64 [T]: expert numbers int64 [T, k] and weights fp32 [T, k].

        routed: as in `Batch`.
        """
        scale = self.config.routed_scaling_factor
        if self.tid2eid is not None:
            return routing.route_by_id(x, self.weight, self.tid2eid, ids, scale, routed)
        assert self.bias is not None
        return routing.route(x, self.weight, self.bias, self.config.num_experts_per_tok, scale, routed)


class ExpertSource(Protocol):
    """Source of a layer's routed experts: its own parameters, or weights/offload.py."""

    def fetch(self, chosen: torch.Tensor) -> ExpertWeights:
        """Return the experts. Those in `chosen`, int64 [T, k], stay on the device until the next call for any layer."""

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert's matrices and scales."""


class Experts(nn.Module):
    """The routed experts, each matrix stacked over all of them. A rank holds a shard of each expert's inner width."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = MatrixParameters()
        self.w2 = MatrixParameters()
        self.w3 = MatrixParameters()

    def fetch(self, chosen: torch.Tensor) -> ExpertWeights:
        """Return all experts; `chosen` is ignored."""
        return matrices(self)

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert."""
        return sum(part[0].nbytes for part in self.parameters())


class SharedExpert(nn.Module):
    """The expert that processes every token, with the same clamp as the routed ones."""

    def __init__(self, numerics: Numerics) -> None:
        super().__init__()
        self.w1 = Linear(numerics)
        self.w2 = Linear(numerics)
        self.w3 = Linear(numerics)


class MoE(nn.Module):
    """Router, routed experts and shared expert of one layer. A rank holds a shard of each expert's inner width."""

    def __init__(self, config: ModelConfig, numerics: Numerics, is_hash: bool, world: World) -> None:
        super().__init__()
        self.limit = config.swiglu_limit
        self.simulate = numerics.simulate
        self.world = world
        self.gate = Router(config, is_hash)
        self.experts: ExpertSource = Experts()
        self.shared_experts = SharedExpert(numerics)

    def forward(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the experts' output for x: normed hidden state [T, D], or only this rank's rows of it."""
        rows, tokens = len(x), len(batch.ids)
        # if ranks hold different rows, another rank may hold the row that padding copies: padding is then routed itself
        routed_as = batch.routed if rows == tokens else None
        chosen, weights = self.gate(x, batch.ids[self.world.rows_held(rows, tokens)], routed_as)
        x, chosen, weights = self.world.gather_rows([x, chosen, weights], tokens)
        routed, shared = self.experts.fetch(chosen), matrices(self.shared_experts)
        # partial results of several ranks are summed in fp32 and rounded once
        dtype = x.dtype if self.world.size == 1 else torch.float32
        part = experts.mixture(x, routed, shared, chosen, weights, self.limit, self.simulate, dtype)
        return self.world.sum_rows(part, rows, x.dtype)


def matrices(module: Experts | SharedExpert) -> ExpertWeights:
    """Return a module's weights as the kernels expect them."""
    return ExpertWeights(module.w1.matrix, module.w2.matrix, module.w3.matrix)
