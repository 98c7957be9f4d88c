"""Applies logit biases, penalties and constraints to the model's logits before sampling."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from dsv4cli.engine.runtime.sampling.token_counts import TokenCounts
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.settings import Sampling
from dsv4cli.engine.system.device import upload
from dsv4cli.kernels.sampling import BANNED


def masked_logits(ready: Sequence[Chunk], logits: torch.Tensor, counts: TokenCounts) -> torch.Tensor:
    """Return the logits fp32 [R, V] with each request's bias, then its penalties, and `BANNED` for tokens that its
    constraint forbids.

    Each chunk has a row for its newest token and one for each draft token. Banned tokens apply to the first of these
    rows
    only. The given logits are not changed, and are returned as they are if nothing applies. Nothing waits for the
    device.

    Args:
        counts: the tokens that penalized requests have.
    """
    biased: list[tuple[int, Sampling]] = []
    banned: list[tuple[int, int]] = []
    masks: dict[int, bytes] = {}
    first = 0
    for chunk in ready:
        sampling, constraint = chunk.request.sampling, chunk.request.constraint
        rows = range(first, first + 1 + len(chunk.drafts))
        if sampling.logit_bias:
            biased += [(row, sampling) for row in rows]
        if constraint is not None:
            banned += [(first, token) for token in constraint.banned()]
            found = zip(rows, constraint.masks(chunk.drafts), strict=False)
            masks |= {row: mask for row, mask in found if mask is not None}
        first = rows.stop
    if biased:
        logits = _biased(logits, biased)
    penalized = any(chunk.request.sampling.penalizes for chunk in ready)
    if penalized:
        logits = counts.penalized(ready, logits)
    if (banned or masks) and not biased and not penalized:
        logits = logits.clone()
    if banned:
        rows_of, tokens = upload(torch.tensor(banned, device="cpu").T.contiguous(), logits.device)
        logits[rows_of, tokens] = BANNED
    if masks:
        _mask(logits, masks)
    return logits


def _biased(logits: torch.Tensor, biased: Sequence[tuple[int, Sampling]]) -> torch.Tensor:
    """Return a copy of the logits with biases added.

    Args:
        biased: rows of the logits, each with the sampling whose biases are added.
    """
    packed = [np.frombuffer(sampling.packed_bias).reshape(2, -1) for _, sampling in biased]
    rows = np.repeat([float(row) for row, _ in biased], [own.shape[1] for own in packed])
    columns = upload(torch.from_numpy(np.vstack([rows, np.hstack(packed)])), logits.device)
    places = columns[:2].long()
    logits = logits.clone()
    logits[places[0], places[1]] += columns[2].float()
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
