"""A follower rank: runs the steps that the leader orders. It sees token ids, never text."""

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.orders import Order, prompt_of
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.runtime.step import StepChoice
from dsv4cli.engine.settings import Limits, Sampling
from dsv4cli.errors import UnsoundResult

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.step import ComputedStep


def follow(model: Transformer, device: torch.device | str, receive_orders: Callable[[], list[Order] | None]) -> None:
    """Carry out the leader's orders until there are no more. Raises NotEnoughMemory."""
    follower = Follower(model, device)
    while (orders := receive_orders()) is not None:
        follower.carry_out(orders)
    follower.close()


class Follower:
    """A copy of the leader's requests, and the same steps with them."""

    def __init__(self, model: Transformer, device: torch.device | str) -> None:
        self._model, self._device = model, device
        self._runner: Runner | None = None
        self._requests: dict[int, Request] = {}
        self._ran: ComputedStep | None = None
        self._carry_out: dict[str, Callable[..., None]] = {
            "begin": self._begin,
            "add": self._add,
            "end": self._end,
            "forget": self._forget,
            "prepare": self._prepare,
            "step": self._step,
            "speculate": self._speculate,
            "take_back": self._take_back,
            "finish": self._finish,
        }

    @property
    def runner(self) -> Runner:
        """The runner that the leader asked for."""
        assert self._runner is not None
        return self._runner

    def carry_out(self, orders: list[Order]) -> None:
        """Carry out orders in sequence. Raises NotEnoughMemory."""
        for order, given in orders:
            self._carry_out[order](**given)

    def close(self) -> None:
        """Release requests and graphs."""
        self._ran = None  # holds the graph that it came from
        if self._runner is not None:
            self._runner.close()

    def _begin(self, **capacity: Any) -> None:
        self.close()
        self._runner = Runner(self._model, Capacity(**capacity), self._device)

    def _add(
        self,
        number: int,
        prompt: str,
        prefill_chunk: int,
        max_context: int | None,
        sampling: dict[str, Any],
        **given: Any,
    ) -> None:
        limits = Limits(prefill_chunk=prefill_chunk, max_context=max_context)
        self._requests[number] = request = Request(
            prompt_of(prompt), Sampling(**sampling), limits, number=number, **given
        )
        self.runner.add(request)

    def _end(self, number: int) -> None:
        self.runner.end(self._requests.pop(number))

    def _forget(self) -> None:
        self.runner.forget()
        self._requests.clear()

    def _prepare(self) -> None:
        self.runner.prepare()

    def _step(self, drafts: list[tuple[int, list[int]]], count: int, ahead: bool, pick: dict[str, Any] | None) -> None:
        for request in self._requests.values():
            request.drafts = []
        for number, tokens in drafts:
            self._requests[number].drafts = tokens
        with suppress(UnsoundResult):  # the leader says so
            self._ran = ran = self.runner.run(None if pick is None else StepChoice(**pick))
            ahead = ahead and self.runner.ahead.follows(ran)
            if ahead or self.runner.drafts is not None:
                sampled = self._sampled(ran)
            if self.runner.drafts is not None:
                self.runner.speculate(ran, sampled, [len(chunk.drafts) for chunk in ran.ready], count)
            if ahead:
                self.runner.run_ahead(ran, sampled)

    def _sampled(self, ran: "ComputedStep") -> torch.Tensor:
        """Return the tokens that the leader sampled."""
        rows = sum(1 + len(chunk.drafts) for chunk in ran.ready)
        return self.runner.share(torch.zeros(rows, dtype=torch.int64, device=ran.hidden.streams.device))

    def _speculate(self, considered: list[int], count: int) -> None:
        assert self._ran is not None
        self.runner.speculate(self._ran, self._sampled(self._ran), considered, count)

    def _take_back(self, number: int) -> None:
        self.runner.ahead.take_back(self._requests[number])

    def _finish(self, sampled: list[list[int]]) -> None:
        assert self._ran is not None
        self.runner.finish(self._ran, sampled)
