"""How often penalized requests have each token, counted on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dsv4cli.engine.runtime.request import ID, Request
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.system.device import step_memory, upload
from dsv4cli.kernels.sampling import IN_PROMPT, OCCURRENCE, penalize


@dataclass
class _Counted:
    """A request's row of the table, and how many of its ids are counted there."""

    row: int
    tokens: int


class TokenCounts:
    """The tokens of each penalized request as counts on the device, a row of the vocabulary's width for each.

    A step uploads only the tokens that came since a request's last step. Without penalized requests there is no table.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._table = torch.zeros(0, 0, dtype=torch.int32, device=device)
        self._counted: WeakKeyDictionary[Request, _Counted] = WeakKeyDictionary()

    def penalized(self, ready: Sequence[Chunk], logits: torch.Tensor) -> torch.Tensor:
        """Return the logits fp32 [R, V] with each request's penalties; see kernels/sampling.penalize.

        Each chunk has a row for its newest token and one for each draft token, which counts the draft tokens before it.
        Nothing waits for the device. Raises NotEnoughMemory.
        """
        with step_memory(self._device, "send fewer requests with penalties at a time"):
            self._count([chunk.request for chunk in ready if chunk.request.sampling.penalizes], logits.shape[1])
        drafted = max(len(chunk.drafts) for chunk in ready)
        places, drafts, penalties = [], [], []
        for chunk in ready:
            one, own = chunk.request.sampling, len(chunk.drafts)
            places += [self._counted[chunk.request].row if one.penalizes else -1] * (1 + own)
            penalties += [(one.repetition_penalty, one.frequency_penalty, one.presence_penalty)] * (1 + own)
            drafts += [chunk.drafts[:number] + [-1] * (drafted - number) for number in range(1 + own)]
        count = len(places)
        numbers = torch.zeros(1 + drafted + 2, count, dtype=torch.int64, device="cpu")
        numbers[: 1 + drafted] = torch.tensor([places, *zip(*drafts, strict=True)], device="cpu")
        # the last two rows hold three of fp32
        numbers[-2:].view(torch.float32).view(-1)[: 3 * count] = torch.tensor(penalties, device="cpu").T.flatten()
        numbers = upload(numbers, self._device)
        values = numbers[-2:].view(torch.float32).view(-1)[: 3 * count].view(3, count)
        return penalize(logits, self._table, numbers[0], numbers[1 : 1 + drafted], values)

    def _count(self, requests: Sequence[Request], width: int) -> None:
        """Count the tokens of these requests that are not counted yet."""
        for request in list(self._counted):
            if request.sequence is None:  # it has ended
                del self._counted[request]
        places: list[int] = []
        for request in requests:
            if request not in self._counted:
                self._begin(request, width)
            counted = self._counted[request]
            places += [counted.row * width + token for token in request.ids[counted.tokens :]]
            counted.tokens = len(request.ids)
        if places:
            index = upload(torch.tensor(places, dtype=torch.int64, device="cpu"), self._device)
            self._table.view(-1).scatter_add_(0, index, torch.full_like(index, OCCURRENCE, dtype=torch.int32))

    def _begin(self, request: Request, width: int) -> None:
        """Give a request a row, and mark the tokens of its prompt there."""
        taken = {one.row for one in self._counted.values()}
        row = next(row for row in range(len(taken) + 1) if row not in taken)
        if row == len(self._table):
            more = torch.zeros(max(1, row), width, dtype=torch.int32, device=self._device)
            self._table = torch.cat((self._table, more)) if row else more
        ids = torch.from_numpy(np.array(request.prompt, dtype=ID)).long()
        self._table[row].zero_().index_fill_(0, upload(ids, self._device), IN_PROMPT)
        self._counted[request] = _Counted(row, len(ids))
