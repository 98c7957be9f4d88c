"""The logit biases of requests, on the device."""

from collections.abc import Sequence
from itertools import chain
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.system.device import upload


class LogitBiases:
    """The biases of each request that has any, as a row of the vocabulary's width.

    A row is made at the first step of its request, and freed with it: a request may bias the whole vocabulary. Answers
    to one prompt share their row.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: WeakKeyDictionary[Request, torch.Tensor] = WeakKeyDictionary()

    def add_to(self, logits: torch.Tensor, ready: Sequence[Chunk]) -> None:
        """Add each request's biases to its rows of the logits fp32 [R, V], in place. Nothing waits for the device.

        Each chunk has a row for its newest token and one for each draft token.
        """
        first = 0
        for chunk in ready:
            end = first + 1 + len(chunk.drafts)
            if chunk.request.sampling.logit_bias:
                logits[first:end] += self._row(chunk.request, logits.shape[1])
            first = end

    def _row(self, request: Request, width: int) -> torch.Tensor:
        if request not in self._rows:
            bias = request.sampling.logit_bias
            same = (row for other, row in self._rows.items() if other.sampling.logit_bias is bias)
            row = next(same, None)
            self._rows[request] = upload(_dense(bias, width), self._device) if row is None else row
        return self._rows[request]


def _dense(bias: Sequence[tuple[int, float]], width: int) -> torch.Tensor:
    """Return the bias of every token, fp32 [V] on the host."""
    ids, biases = np.fromiter(chain.from_iterable(bias), float, 2 * len(bias)).reshape(-1, 2).T
    dense = torch.zeros(width, device="cpu")
    dense[torch.from_numpy(ids).long()] = torch.from_numpy(biases).float()
    return dense
