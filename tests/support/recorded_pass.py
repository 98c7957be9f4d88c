"""Compares two backends on a whole model, block by block: roundings in one block do not count in the next.

They grow from block to block otherwise. And where two experts have nearly equal scores, rounding decides which one a
token gets, and its row differs by half. So each block of the second pass gets the inputs and experts of the first.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch

from dsv4cli.engine.model.block import Block, PendingResidual
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.kernels import routing


class RecordedPass:
    """What a model's blocks got and returned in one pass, in the order of the calls.

    Attributes:
        outputs: of the blocks.
        chosen: the experts that routers selected by score, int64 [T, k].
        alike: whether another pass selected the same experts for a token, bool [T].
    """

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.outputs: list[PendingResidual] = []
        self.chosen: list[torch.Tensor] = []
        self.alike: list[torch.Tensor] = []
        self._inputs: list[torch.Tensor | PendingResidual] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the pass that runs inside the `with` block."""
        select = routing.route

        def route(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
            chosen, weights = select(*arguments)
            self.chosen.append(chosen)
            return chosen, weights

        def keep(_: Block, given: tuple[Any, ...], output: PendingResidual) -> None:
            self._inputs.append(given[0])
            self.outputs.append(output)

        with ExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(routing, "route", route)
            for layer in self.model.layers:
                stack.callback(layer.register_forward_hook(keep).remove)
            yield

    @contextmanager
    def replaying(self) -> Iterator[list[PendingResidual]]:
        """Give the blocks of the pass inside the `with` block the recorded inputs and experts.

        Yields the list of the blocks' outputs. The first block's own inputs, the embeddings, must have the same bits.
        """
        select, inputs, choices, outputs = routing.route, iter(self._inputs), iter(self.chosen), list[PendingResidual]()

        def route(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, k: int, scale: float, routed: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            own, weights = select(x, weight, bias, k, scale, routed)
            chosen = next(choices)
            alike = (own == chosen).all(-1)
            self.alike.append(alike)
            # the same backend's weights of these experts
            _, others = routing.route_by_id(x, weight, chosen, torch.arange(len(x), device=x.device), scale, routed)
            return chosen, torch.where(alike[:, None], weights, others)

        def give(_: Block, given: tuple[Any, ...]) -> tuple[Any, ...]:
            (own, *rest), recorded = given, next(inputs)
            assert isinstance(recorded, PendingResidual) or torch.equal(own, recorded)
            return recorded, *rest

        with ExitStack() as stack:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(routing, "route", route)
            for layer in self.model.layers:
                stack.callback(layer.register_forward_pre_hook(give).remove)
                stack.callback(layer.register_forward_hook(lambda *call: outputs.append(call[2])).remove)
            yield outputs
