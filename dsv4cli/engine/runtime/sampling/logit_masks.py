"""Applies logit biases, penalties and constraints to the model's logits before sampling."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from dsv4cli.engine.runtime.sampling.logit_biases import LogitBiases
from dsv4cli.engine.runtime.sampling.token_counts import TokenCounts
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.system.device import upload
from dsv4cli.kernels.sampling import BANNED


class RequestTables(NamedTuple):
    """Device tables of the requests that change their logits.

    Attributes:
        counts: the tokens that penalized requests have.
        biases: the biases of requests.
    """

    counts: TokenCounts
    biases: LogitBiases

    @classmethod
    def on(cls, device: torch.device) -> "RequestTables":
        """Return empty tables."""
        return cls(TokenCounts(device), LogitBiases(device))


def masked_logits(ready: Sequence[Chunk], logits: torch.Tensor, tables: RequestTables) -> torch.Tensor:
    """Return the logits fp32 [R, V] with each request's bias, then its penalties, and `BANNED` for tokens that its
    constraint forbids.

    Each chunk has a row for its newest token and one for each draft token. Banned tokens apply to the first of these
    rows
    only. The given logits are not changed, and are returned as they are if nothing applies. Nothing waits for the
    device.
    """
    banned: list[tuple[int, int]] = []
    masks: dict[int, bytes] = {}
    first = 0
    for chunk in ready:
        constraint = chunk.request.constraint
        rows = range(first, first + 1 + len(chunk.drafts))
        if constraint is not None:
            banned += [(first, token) for token in constraint.banned()]
            found = zip(rows, constraint.masks(chunk.drafts), strict=False)
            masks |= {row: mask for row, mask in found if mask is not None}
        first = rows.stop
    biased = any(chunk.request.sampling.logit_bias for chunk in ready)
    penalized = any(chunk.request.sampling.penalizes for chunk in ready)
    if biased or ((banned or masks) and not penalized):
        logits = logits.clone()
    if biased:
        tables.biases.add_to(logits, ready)
    if penalized:
        logits = tables.counts.penalized(ready, logits)
    if banned:
        rows_of, tokens = upload(torch.tensor(banned, device="cpu").T.contiguous(), logits.device)
        logits[rows_of, tokens] = BANNED
    if masks:
        _mask(logits, masks)
    return logits


def _mask(logits: torch.Tensor, masks: Mapping[int, bytes]) -> None:
    """Apply masks, by row, in the format of `Constraint.masks`."""
    width = -(-logits.shape[1] // 8)  # a mask may be longer, each by another length
    joined = bytearray(b"".join(mask[:width] for mask in masks.values()))
    packed = torch.frombuffer(joined, dtype=torch.uint8).view(len(masks), -1)
    rows = upload(torch.tensor([*masks], device="cpu"), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (upload(packed, logits.device)[:, :, None] >> bits & 1).flatten(1)  # [M, 8 * bytes]
    logits[rows] = logits[rows].masked_fill(allowed[:, : logits.shape[1]] == 0, BANNED)
