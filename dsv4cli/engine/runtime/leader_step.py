"""Runs a step on the leader: samples each request's next token and verifies its draft tokens."""

from collections.abc import Sequence
from typing import Literal

import torch

from dsv4cli.engine.runtime.drafts.stopwatch import Stopwatch
from dsv4cli.engine.runtime.orders import Orders
from dsv4cli.engine.runtime.request import Constraint, Request, Token
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.sampling.logit_masks import RequestTables, masked_logits
from dsv4cli.engine.runtime.sampling.logprobs import TokenLogprobs, logprobs_of, start_logprobs
from dsv4cli.engine.runtime.sampling.sampler import Draws, sample
from dsv4cli.engine.runtime.step import Chunk, ComputedStep, StepChoice
from dsv4cli.engine.system.device import step_memory


class LeaderStep:
    """Runs steps, samples their tokens and drafts the next ones.

    Attributes:
        watch: times of the last step's two parts.
    """

    def __init__(self, runner: Runner, orders: Orders) -> None:
        """Args:
        orders: collects what the other ranks must do as well.
        """
        self.watch, self._next_watch = (Stopwatch(runner.cache.device) for _ in range(2))
        self._runner, self._orders = runner, orders
        self._tables = RequestTables.on(runner.cache.device)

    def step(
        self, count: int, ahead: bool, pick: StepChoice | None = None
    ) -> tuple[ComputedStep, list[list[Token]], list[list[float]]]:
        """Run the next step and return it, the tokens of each ready request, and `count` new draft tokens for each.

        Waits for the device once, and again if a constraint requires other tokens than those that were sampled.

        Args:
            count: how many draft tokens to make for each ready request, as `speculate` does.
            ahead: whether to launch the next step before this one is read, if possible.
            pick: which requests share the step; None for all.

        Raises:
            UnsoundResult: logits are not finite.
            NotEnoughMemory: the step needs more memory than there is.
        """
        if self._runner.ahead.launched:
            self.watch, self._next_watch = self._next_watch, self.watch
        else:
            self.watch.start()
        ran = self._runner.run(pick)
        with self._runner.threads(len(ran.ready)), step_memory(self._runner.cache.device):
            found, drafts = self._draw(ran, count, ahead and self._runner.ahead.follows(ran))
            self._runner.finish(ran, [[token.id for token in own] for own in found])
        return ran, found, drafts

    def _draw(self, ran: ComputedStep, count: int, ahead: bool) -> tuple[list[list[Token]], list[list[float]]]:
        ready = ran.ready
        logits = ran.hidden.streams.new_empty(0, 1, dtype=torch.float32) if ran.logits is None else ran.logits
        tokens = sampled(ran, logits, self._tables)
        self.watch.mark()
        if ahead or self._runner.drafts is not None:
            tokens = self._runner.share(tokens)
        made = self._speculate(ran, tokens, [len(chunk.drafts) for chunk in ready], count)
        self.watch.mark()
        if not ready:
            return [], []
        if ahead and any(chunk.request.constraint for chunk in ready):
            logits = logits.clone()  # the next step overwrites them
        read = start_logprobs(logits, tokens, max(one.request.limits.logprobs for one in ready), made)
        if ahead:
            self._next_watch.start()
            self._runner.run_ahead(ran, tokens)
        known, drafts = read()
        found, again = self._taken(ready, logits, known)
        if again and ahead:
            self._take_back(ready, found, known)
        elif again and made is not None:
            drafts = self._speculate_again(ran, found, count)
        return found, drafts

    def _taken(
        self, ready: list[Chunk], logits: torch.Tensor, known: list[TokenLogprobs]
    ) -> tuple[list[list[Token]], bool]:
        """Return each request's tokens, and whether a request that continues has others than those that were
        sampled.
        """
        runner, found, again = self._runner, [], False
        for chunk, row in zip(ready, first_rows(ready), strict=True):
            rows, request = slice(row, row + 1 + len(chunk.drafts)), chunk.request
            stop_ids = runner.model.config.eos_token_ids if request.stop_ids is None else request.stop_ids
            own = taken(chunk, logits[rows], known[rows], stop_ids, runner.preparing.happened)
            found.append(own)
            again |= not own[-1].finish and [token.id for token in own] != agreed(chunk, known[rows])
        return found, again

    def _take_back(self, ready: list[Chunk], found: list[list[Token]], known: list[TokenLogprobs]) -> None:
        """Remove requests from the step ahead that continue with another token than it assumed."""
        for chunk, own, sampled in zip(ready, found, known, strict=True):
            if own[0].id != sampled[0]:
                self._runner.ahead.take_back(chunk.request)
                self._orders.add("take_back", number=chunk.request.number)

    def _speculate(
        self, ran: ComputedStep, tokens: torch.Tensor, considered: list[int], count: int
    ) -> torch.Tensor | None:
        return None if self._runner.drafts is None else self._runner.speculate(ran, tokens, considered, count)

    def _speculate_again(self, ran: ComputedStep, found: list[list[Token]], count: int) -> list[list[float]]:
        """Draft again, after tokens that differ from those that were sampled."""
        considered = [len(own) - 1 for own in found]
        self._orders.add("speculate", considered=considered, count=count)
        self._orders.send_orders()
        padded = [
            [token.id for token in own] + [0] * (len(chunk.drafts) - most)
            for own, chunk, most in zip(found, ran.ready, considered, strict=True)
        ]
        tokens = torch.tensor([token for row in padded for token in row], device=ran.hidden.streams.device)
        tokens = self._runner.share(tokens)
        made: list[list[float]] = self._runner.speculate(ran, tokens, considered, count).tolist()
        return made


def sampled(ran: ComputedStep, logits: torch.Tensor, tables: RequestTables) -> torch.Tensor:
    """Sample a token from each row of a step, assuming its draft tokens are right: fp32 [R, V] -> int64 [R].

    The newest token's row gives the token that the request's constraint forces, if it forces one.
    """
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    requests = [chunk.request for chunk in ran.ready for _ in range(1 + len(chunk.drafts))]
    positions = [len(chunk.request.ids) + number for chunk in ran.ready for number in range(1 + len(chunk.drafts))]
    draws = Draws.of([request.sampling for request in requests], positions, logits.device)
    tokens = sample(masked_logits(ran.ready, logits, tables), draws)
    for chunk, row in zip(ran.ready, first_rows(ran.ready), strict=True):
        forced = None if chunk.request.constraint is None else chunk.request.constraint.forced()
        if forced is not None:
            tokens[row] = forced
    return tokens


def first_rows(ready: Sequence[Chunk]) -> list[int]:
    """Return, for each chunk, the row of its newest token among the sampled rows."""
    rows, row = [], 0
    for chunk in ready:
        rows.append(row)
        row += 1 + len(chunk.drafts)
    return rows


def taken(
    chunk: Chunk, logits: torch.Tensor, sampled: Sequence[TokenLogprobs], stop_ids: Sequence[int], prepared: bool
) -> list[Token]:
    """Return a request's tokens: from the first row, and from each next row while the draft token before it was right.

    Args:
        logits: fp32 [1 + n, V], of the newest token and its n draft tokens.
        sampled: what was sampled from these rows.

    A row in which the constraint bans tokens is left to the next step.
    """
    request, tokens = chunk.request, list[Token]()
    constraint = request.constraint
    for number, one in enumerate(sampled):
        if constraint is not None:
            if number and constraint.banned():
                break
            wanted = _wanted(constraint, one[0], forced=constraint.forced() if number else None)
            if wanted != one[0]:
                given = torch.full((1,), wanted, dtype=torch.int64, device=logits.device)
                [one] = logprobs_of(logits[number : number + 1], given, request.limits.logprobs)
            constraint.push(one[0])
        token, logprob, top = one
        finish = _finish(request, token, len(request.ids) + len(tokens) + 1, stop_ids)
        tokens.append(Token(token, logprob, top[: request.limits.logprobs], finish, prepared))
        if finish or number == len(chunk.drafts) or token != chunk.drafts[number]:
            break
    return tokens


def _wanted(constraint: Constraint, sampled: int, forced: int | None) -> int:
    """Return the token that a constraint puts in place of a sampled one."""
    token = sampled if forced is None else forced
    other = constraint.instead(token)
    return token if other is None else other


def agreed(chunk: Chunk, sampled: Sequence[TokenLogprobs]) -> list[int]:
    """Return the tokens that a request would get without constraints, as the device assumes."""
    tokens: list[int] = []
    for number, (token, _, _) in enumerate(sampled):
        tokens.append(token)
        if number == len(chunk.drafts) or token != chunk.drafts[number]:
            break
    return tokens


def _finish(request: Request, token: int, length: int, stop_ids: Sequence[int]) -> Literal["stop", "length"] | None:
    if token in stop_ids:
        return "stop"
    return "length" if length >= request.end else None
