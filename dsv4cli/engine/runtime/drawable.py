"""The logits that tokens are drawn from: the model's, changed as samplings and constraints ask."""

from collections.abc import Mapping, Sequence

import torch

from dsv4cli.engine.runtime.scheduler import Chunk
from dsv4cli.engine.system.device import upload

# far below any logit, and finite at the lowest temperature
BANNED = -1e30
# of a row: what is added to the logits of tokens
Addends = Mapping[int, float]


def drawable(ready: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
    """The logits fp32 [R, V] with each request's bias, and `BANNED` for what its constraint does not let come.

    Of each chunk a row for its newest token, and one for each draft behind it; what a constraint bans matters to the
    first of them only. The given logits stay, and are returned where nothing is asked. Nothing waits for the device.
    """
    addends: dict[int, Addends] = {}
    masks: dict[int, bytes] = {}
    first = 0
    for chunk in ready:
        sampling, constraint = chunk.request.sampling, chunk.request.constraint
        rows = range(first, first + 1 + len(chunk.drafts))
        if sampling.logit_bias:
            addends |= {row: dict(sampling.logit_bias) for row in rows}
        if constraint is not None:
            banned = constraint.banned()
            if banned:
                addends[first] = {**addends.get(first, {}), **dict.fromkeys(banned, BANNED)}
            found = zip(rows, constraint.masks(chunk.drafts), strict=False)
            masks |= {row: mask for row, mask in found if mask is not None}
        first = rows.stop
    if not addends and not masks:
        return logits
    logits = logits.clone()
    if addends:
        _add(logits, addends)
    if masks:
        _mask(logits, masks)
    return logits


def _add(logits: torch.Tensor, addends: Mapping[int, Addends]) -> None:
    entries = [(row, token, value) for row, own in addends.items() for token, value in own.items()]
    # fp64 holds all of it exactly
    columns = upload(torch.tensor(entries, dtype=torch.float64).T.contiguous(), logits.device)
    rows, tokens = columns[:2].long()
    logits[rows, tokens] += columns[2].float()


def _mask(logits: torch.Tensor, masks: Mapping[int, bytes]) -> None:
    """masks: as of `Constraint.masks`, by row."""
    packed = torch.frombuffer(bytearray(b"".join(masks.values())), dtype=torch.uint8).view(len(masks), -1)
    rows = upload(torch.tensor([*masks]), logits.device)
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    allowed = (upload(packed, logits.device)[:, :, None] >> bits & 1).flatten(1)  # [M, 8 * bytes]
    logits[rows] = logits[rows].masked_fill(allowed[:, : logits.shape[1]] == 0, BANNED)
