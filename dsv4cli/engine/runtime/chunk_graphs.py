"""Chunks of one prompt, captured in CUDA graphs for some numbers of rows and replayed: the host launches one graph.

Rows behind the chunk are the padding sequence's, at least one. A step of n rows has as many groups of entries wherever
the chunk ends, since n is one more than a multiple of the ratios.
"""

from bisect import bisect_left
from collections.abc import Callable
from time import perf_counter

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates
from dsv4cli.engine.runtime.cache import Sequence
from dsv4cli.engine.runtime.graphs import GraphRunner
from dsv4cli.engine.runtime.prepare import Extent, Numbers, batch_of
from dsv4cli.engine.system.device import upload
from dsv4cli.kernels.card import is_there

# the most tokens of a chunk in each; the host launches larger ones as fast as a GPU computes them. With one row more
# 60 are few enough for kernels that stream weights
TOKENS = (32, 60, 128, 256, 384, 512, 640, 768, 896, 1024, 1536, 2048)
# how often a chunk runs before it is timed
WARM = 1

Output = tuple[HiddenStates, Batch]


class ChunkGraphs:
    """Runs chunks of one prompt for the cache of other graphs, which says how long sequences may be.

    seconds: what a chunk of each size took when it was captured, by its tokens.
    """

    def __init__(self, graphs: GraphRunner) -> None:
        self.seconds: dict[int, float] = {}
        self._graphs = graphs
        self._chunks: dict[int, CapturedChunk] = {}
        self._made_for = self._key()

    def hold(self, tokens: int) -> bool:
        """Whether a chunk of so many tokens is one of these."""
        return tokens <= max(self._sizes(), default=0)

    def run(self, sequence: Sequence, ids: list[int], on_preparing: Callable[[], None]) -> Output:
        """What the model gives for the next tokens of a sequence and for padding behind them, overwritten by the next
        call, and the batch of all these rows. Reserves blocks. Raises NotEnoughMemory."""
        self._graphs.cache.reserve(sequence, len(ids))
        size = TOKENS[bisect_left(TOKENS, len(ids))]
        if not self._holds(size):
            on_preparing()
            self._capture(size)
        return self._chunks[size].run(sequence, ids)

    def prepare(self) -> bool:
        """Captures chunks of one size, if one is missing; whether one was."""
        missing = [size for size in self._sizes() if not self._holds(size)]
        if missing:
            self._capture(missing[0])
        return bool(missing)

    def forget(self) -> None:
        """Captures anew when they are needed."""
        self._chunks.clear()

    def _sizes(self) -> list[int]:
        """Those that a sequence may have as many tokens as."""
        return [size for size in TOKENS if size <= self._graphs.columns * BLOCK_TOKENS]

    def _capture(self, size: int) -> None:
        self._chunks[size] = chunk = CapturedChunk(self._graphs, size)
        self.seconds[size] = chunk.timed(self._graphs.model.config.vocab_size)

    def _holds(self, size: int) -> bool:
        if self._made_for != self._key():
            self.forget()
            self._made_for = self._key()
        return size in self._chunks

    def _key(self) -> tuple[int, int]:
        """What they are captured for: the pools where they lie, and the length of sequences."""
        return self._graphs.cache.blocks, self._graphs.columns


class CapturedChunk:
    """Steps of up to `tokens` tokens of a sequence, in one more row than these."""

    def __init__(self, graphs: GraphRunner, tokens: int) -> None:
        self._rows, self._columns, self._padding = tokens + 1, graphs.columns, graphs.padding
        cache, model, columns = graphs.cache, graphs.model, graphs.columns
        self._numbers = upload(torch.tensor(self._listed(graphs.padding, [0])), cache.device)
        ids, slots, starts, counts, blocks = self._numbers.split([tokens + 1, 2, 2, 2, 2 * columns])
        extent = Extent.of(cache.config, [tokens, 1], columns * BLOCK_TOKENS)

        def compute() -> Output:
            routed = torch.arange(tokens + 1, device=cache.device) % counts[:1]  # padding goes where the chunk goes
            batch = batch_of(cache, Numbers(slots, starts, counts, ids, blocks.view(2, columns), routed), extent)
            return model(batch, cache.layers), batch

        self._run = graphs.capture(compute)

    def run(self, sequence: Sequence, ids: list[int]) -> Output:
        """What the model gives for these tokens, in the first rows."""
        numbers = torch.tensor(self._listed(sequence, ids))
        self._numbers.copy_(upload(numbers, self._numbers.device))
        return self._run()

    def timed(self, vocabulary: int) -> float:
        """Seconds of a whole chunk, of tokens that differ, so that they go to many experts, in the padding sequence."""
        ids, seconds = [(7 * place + 1) % vocabulary for place in range(self._rows - 1)], 0.0
        for _ in range(WARM + 1):
            begin = perf_counter()
            self.run(self._padding, ids)
            if is_there(self._numbers.device):
                torch.cuda.current_stream(self._numbers.device).synchronize()
            seconds = perf_counter() - begin
        return seconds

    def _listed(self, sequence: Sequence, ids: list[int]) -> list[int]:
        """The numbers of a step: ids, slots, starts, counts, and the blocks of both sequences."""
        behind, padding = self._rows - len(ids), self._padding
        few = [sequence.slot, padding.slot, sequence.length, 0, len(ids), behind]
        own = sequence.blocks + padding.blocks[:1] * (self._columns - len(sequence.blocks))
        return [*ids, *[0] * behind, *few, *own, *padding.blocks[:1] * self._columns]
