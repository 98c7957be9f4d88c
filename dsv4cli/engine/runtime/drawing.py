"""What a step's logits give each request: its next token, and those behind it that its drafts had right."""

from collections.abc import Sequence
from typing import Literal

import torch

from dsv4cli.engine.runtime.draft_steps import Ran
from dsv4cli.engine.runtime.logprobs import Drawn, drawn_of
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.runtime.sampler import Draws, sample
from dsv4cli.engine.runtime.scheduler import Chunk

# far below any logit, and finite at the lowest temperature
BANNED = -1e30


def sampled(ran: Ran, logits: torch.Tensor) -> torch.Tensor:
    """What each row of a step draws as if its drafts were right, fp32 [R, V] -> int64 [R]; that of the newest token as
    the request's constraint asks."""
    if not len(logits):
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    requests = [chunk.request for chunk in ran.ready for _ in range(1 + len(chunk.drafts))]
    positions = [len(chunk.request.ids) + number for chunk in ran.ready for number in range(1 + len(chunk.drafts))]
    firsts = first_rows(ran.ready)
    allowed = _allowed(ran.ready, firsts, logits)
    tokens = sample(allowed, Draws.of([request.sampling for request in requests], positions, logits.device))
    for chunk, row in zip(ran.ready, firsts, strict=True):
        forced = None if chunk.request.constraint is None else chunk.request.constraint.forced()
        if forced is not None:
            tokens[row] = forced
    return tokens


def first_rows(ready: Sequence[Chunk]) -> list[int]:
    """Of each, the row of its newest token among those that are drawn."""
    rows, row = [], 0
    for chunk in ready:
        rows.append(row)
        row += 1 + len(chunk.drafts)
    return rows


def taken(
    chunk: Chunk, logits: torch.Tensor, drawn: Sequence[Drawn], stop_ids: Sequence[int], prepared: bool
) -> list[Token]:
    """The tokens of a request: of the first row, and of each further one as long as the draft before it is what came.

    logits: fp32 [1 + n, V], drawn: of the newest token and its n drafts. A row in which the constraint bans tokens is
    left to the next step.
    """
    request, tokens = chunk.request, list[Token]()
    constraint = request.constraint
    for number, one in enumerate(drawn):
        if constraint is not None:
            if number and constraint.banned():
                break
            other = (constraint.forced() if number else None) or constraint.instead(one[0])
            if other is not None and other != one[0]:
                given = torch.full((1,), other, dtype=torch.int64, device=logits.device)
                [one] = drawn_of(logits[number : number + 1], given, request.limits.logprobs)
            constraint.push(one[0])
        token, logprob, top = one
        finish = _finish(request, token, len(request.ids) + len(tokens) + 1, stop_ids)
        tokens.append(Token(token, logprob, top[: request.limits.logprobs], finish, prepared))
        if finish or number == len(chunk.drafts) or token != chunk.drafts[number]:
            break
    return tokens


def agreed(chunk: Chunk, drawn: Sequence[Drawn]) -> list[int]:
    """The tokens of a request that nothing but its sampling decides: what the device takes them to be."""
    tokens: list[int] = []
    for number, (token, _, _) in enumerate(drawn):
        tokens.append(token)
        if number == len(chunk.drafts) or token != chunk.drafts[number]:
            break
    return tokens


def _allowed(ready: Sequence[Chunk], rows: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """The logits fp32 [R, V] without the tokens that constraints ban; the given ones stay."""
    allowed = logits
    for chunk, row in zip(ready, rows, strict=True):
        constraint = chunk.request.constraint
        banned = () if constraint is None else constraint.banned()
        if banned:
            allowed = logits.clone() if allowed is logits else allowed
            allowed[row, torch.tensor(banned, device=logits.device)] = BANNED
    return allowed


def _finish(request: Request, token: int, length: int, stop_ids: Sequence[int]) -> Literal["stop", "length"] | None:
    if token in stop_ids:
        return "stop"
    return "length" if length >= request.end else None
