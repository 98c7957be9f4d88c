"""Decoding: a step of one token of each sequence, captured in a CUDA graph for some numbers of sequences and replayed.

A graph reads its numbers from memory that stays where it is. Rows that no sequence fills belong to the padding
sequence, which has no tokens, so that capturing and padding touch no live state.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from threading import Lock

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, MAX_SLOTS
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.cache import Cache, Sequence
from dsv4cli.engine.runtime.prepare import Extent, Numbers, batch_of
from dsv4cli.kernels.workspace import Workspace

SIZES = (1, 2, 4, 8, 16, 32, MAX_SLOTS)
# how often a step runs before it is captured: compiles kernels, and finds the memory that they share
WARM = 2
# to capture begins with a wait for the whole device, which CUDA refuses while another thread captures
_CAPTURING = Lock()


def do_nothing() -> None:
    """Reports no preparation."""


class GraphRunner:
    """Decodes the sequences of one cache, which must have a slot to spare; on a CPU without graphs."""

    def __init__(self, model: Transformer, cache: Cache, tokens: int, workspace: Workspace | None = None) -> None:
        """tokens: the most that a sequence has, its next one included. workspace: of the engine around it."""
        self.model = model
        self.cache = cache
        self.columns = -(-tokens // BLOCK_TOKENS)
        self.padding = cache.allocate()
        self._steps: dict[int, CapturedStep] = {}
        self._blocks = 0
        self._workspace = workspace or Workspace()  # graphs hold addresses in it
        self._memory = torch.cuda.graph_pool_handle() if cache.device.type == "cuda" else None

    def lengthen(self, tokens: int) -> None:
        """A sequence may have so many tokens from now on; steps are prepared anew where that is more."""
        columns = -(-tokens // BLOCK_TOKENS)
        if columns > self.columns:
            self.columns = columns
            self.forget()

    def forget(self) -> None:
        """Prepares steps anew when they are needed."""
        self._steps.clear()

    def logits(self, work: Items[tuple[Sequence, int]], on_preparing: Callable[[], None] = do_nothing) -> torch.Tensor:
        """What follows each sequence's next token: fp32 [B, V], overwritten by the next call. Reserves their blocks.

        work: up to MAX_SLOTS sequences. Lengths do not change. on_preparing is called where a step has to be prepared
        first. Raises NotEnoughMemory.
        """
        return self.filled(work, on_preparing).run()[: len(work)]

    def filled(
        self, work: Items[tuple[Sequence, int]], on_preparing: Callable[[], None] = do_nothing
    ) -> "CapturedStep":
        """The step for these sequences, with their numbers in it."""
        for sequence, _ in work:
            self.cache.reserve(sequence, 1)
        if self._blocks != self.cache.blocks:  # the pools lie elsewhere now
            self._steps.clear()
            self._blocks = self.cache.blocks
        size = next(size for size in SIZES if size >= len(work))
        if size not in self._steps:
            on_preparing()
            self._steps[size] = self._prepared(size)
        self._steps[size].fill(work)
        return self._steps[size]

    def batch(self, numbers: Numbers) -> Batch:
        """The batch of a step of one token of each sequence, as large for every context."""
        size, columns = numbers.blocks.shape
        return batch_of(self.cache, numbers, Extent.of(self.model.config, [1] * size, columns * BLOCK_TOKENS))

    @torch.no_grad()
    def _compute(self, numbers: Numbers) -> torch.Tensor:
        with self._workspace.current():
            return self.model.logits(self.model(self.batch(numbers), self.cache.layers).streams)

    def _prepared(self, size: int) -> "CapturedStep":
        step = CapturedStep(self.cache, size, self.columns, self.padding.slot)
        numbers = step.numbers  # nothing that `run` holds refers to the step: it goes when it is forgotten
        if self._memory is None:
            step.run = lambda: self._compute(numbers)
            return step
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self._compute(numbers)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL asks for its events from a thread of its own
        with _CAPTURING, torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            logits = self._compute(numbers)

        def replay() -> torch.Tensor:
            graph.replay()
            return logits

        step.run = replay
        return step


class CapturedStep:
    """The step of `size` sequences: its numbers on the host and on the device; `run` computes logits [size, V] from
    these."""

    run: Callable[[], torch.Tensor]

    def __init__(self, cache: Cache, size: int, columns: int, padding: int) -> None:
        self._padding = padding
        on_gpu = cache.device.type == "cuda"
        # slots, starts and ids; the blocks have their own, they change seldom
        self._few = torch.zeros(3, size, dtype=torch.int64, pin_memory=on_gpu)
        self._blocks = torch.zeros(size, columns, dtype=torch.int64, pin_memory=on_gpu)
        self._few[0] = padding
        self._rows: list[tuple[Sequence, int] | None] = [None] * size  # whose blocks lie in each row, which of them
        few, blocks = self._few.to(cache.device), self._blocks.to(cache.device)
        self._on_device = few, blocks
        self._arrived = torch.cuda.Event() if on_gpu else None
        self.numbers = Numbers(few[0], few[1], torch.ones_like(few[0]), few[2], blocks)

    def fill(self, work: Items[tuple[Sequence, int]]) -> None:
        """Takes the numbers of these sequences, when those of the last call have arrived on the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        few = self._few.numpy()
        few[:, len(work) :] = [[self._padding], [0], [0]]
        few[:, : len(work)] = list(zip(*((one.slot, one.length, token) for one, token in work), strict=True))
        self._on_device[0].copy_(self._few, non_blocking=True)
        if self._fill_blocks([one for one, _ in work]):
            self._on_device[1].copy_(self._blocks, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def _fill_blocks(self, sequences: list[Sequence]) -> bool:
        """Whether the blocks of a row are others than before."""
        changed = False
        for row, sequence in enumerate(sequences):
            if self._rows[row] != (sequence, sequence.changes):
                self._rows[row] = sequence, sequence.changes
                self._blocks[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks)
                changed = True
        return changed
