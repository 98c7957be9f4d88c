"""Decode steps of a few tokens per sequence, captured as CUDA graphs for some batch sizes and replayed.

A graph reads its inputs from fixed addresses. Rows that no sequence fills belong to the padding sequence, which has no
tokens and one block for the entries that they complete, so that neither capture nor padding touches live state.
"""

from collections.abc import Callable
from collections.abc import Sequence as Items
from threading import Lock
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, ROLLBACK, columns_of
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.runtime.batch_builder import Extent, Numbers, batch_of
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.state.cache import Cache
from dsv4cli.engine.runtime.step_sizes import DECODE_BATCHES, DECODE_TOKENS, batch_size
from dsv4cli.kernels.card import is_there
from dsv4cli.kernels.workspace import Workspace

T = TypeVar("T")
# runs of a step before it is captured: they compile kernels and allocate shared memory
WARM = 2
# a capture starts by synchronizing the device, which CUDA refuses while another thread captures
_CAPTURING = Lock()


def do_nothing() -> None:
    """Ignore the report."""


class StepOutput(NamedTuple):
    """A step's batch, the model's output, and the logits of every row, fp32 [T, V]."""

    batch: Batch
    hidden: HiddenStates
    logits: torch.Tensor


class GraphRunner:
    """Runs decode steps of the sequences of one cache, which needs a spare slot. Without a GPU it uses no graphs."""

    def __init__(self, model: Transformer, cache: Cache, tokens: int, workspace: Workspace | None = None) -> None:
        """Create a runner without captured steps.

        Args:
            tokens: maximum length of a sequence, including its next token.
            workspace: the engine's workspace.
        """
        self.model = model
        self.cache = cache
        self.columns = columns_of(tokens)
        self.padding = cache.allocate()
        cache.reserve(self.padding, ROLLBACK)
        self._steps: dict[tuple[int, int], CapturedStep] = {}
        self._blocks = 0
        self._workspace = workspace or Workspace()  # graphs hold addresses in it
        on_gpu = is_there(cache.device)
        self._memory = torch.cuda.graph_pool_handle() if on_gpu else None
        # graphs reuse each other's temporary memory only if they are captured on the same stream
        self._stream = torch.cuda.Stream(cache.device) if on_gpu else None

    def lengthen(self, tokens: int) -> None:
        """Allow sequences of this many tokens. If that is more than before, steps are captured again."""
        if columns_of(tokens) > self.columns:
            self.columns = columns_of(tokens)
            self.forget()

    def forget(self) -> None:
        """Drop all captured steps; they are captured again when needed."""
        self._steps.clear()

    def filled(
        self, work: Items[tuple[Sequence, list[int]]], on_preparing: Callable[[], None] = do_nothing
    ) -> "CapturedStep":
        """Return the step for these sequences, with its inputs filled in. Reserves their blocks; lengths do not change.

        Args:
            work: up to MAX_SLOTS sequences and their next tokens, up to ROLLBACK each. All sequences get the same
                number of rows, at least that of the longest; rows after a sequence's tokens have no meaning.
            on_preparing: called if the step must be captured first.

        Raises NotEnoughMemory.
        """
        rows = next(rows for rows in DECODE_TOKENS if rows >= max(len(ids) for _, ids in work))
        for sequence, _ in work:
            self.cache.reserve(sequence, rows)
            self.cache.touch(sequence, rows)
        key = batch_size(len(work)), rows
        if not self._holds(key):
            on_preparing()
            self._steps[key] = self._prepared(*key)
        self._steps[key].fill(work)
        return self._steps[key]

    def prepare(self, most: int) -> bool:
        """Capture one missing step of one token per sequence, for up to `most` sequences. Return whether any was
        missing.
        """
        missing = [size for size in DECODE_BATCHES if size <= batch_size(most) and not self._holds((size, 1))]
        if missing:
            self._steps[missing[0], 1] = self._prepared(missing[0], 1)
        return bool(missing)

    def prepared(self, sequences: int) -> bool:
        """Return whether the step of one token for this many sequences is captured."""
        return self._blocks == self.cache.blocks and (batch_size(sequences), 1) in self._steps

    def batch(self, numbers: Numbers) -> Batch:
        """Return the batch of a step with the same number of tokens per sequence; no shape depends on the context."""
        size, columns = numbers.blocks.shape
        each = [numbers.ids.numel() // size] * size
        return batch_of(self.cache, numbers, Extent.of(self.model.config, each, columns * BLOCK_TOKENS))

    def capture(self, compute: Callable[[], T]) -> Callable[[], T]:
        """Return a function that repeats `compute` into the same memory.

        `compute` may read only tensors at fixed addresses, and the caller must keep them alive: a graph does not.
        """
        compute, stream = self._within(compute), self._stream
        if stream is None:
            return compute
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL queries its events from its own thread
        with _CAPTURING, torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            output = compute()

        def replay() -> T:
            graph.replay()
            return output

        return replay

    def _within(self, compute: Callable[[], T]) -> Callable[[], T]:
        workspace = self._workspace

        def within() -> T:
            with torch.inference_mode(), workspace.current():
                return compute()

        return within

    def _holds(self, key: tuple[int, int]) -> bool:
        if self._blocks != self.cache.blocks:  # the pools were reallocated
            self._steps.clear()
            self._blocks = self.cache.blocks
        return key in self._steps

    def _prepared(self, size: int, rows: int) -> "CapturedStep":
        step = CapturedStep(self.cache, size, rows, self.columns, self.padding)
        numbers = step.numbers  # `run` must not refer to the step, so that the step is freed with its last reference

        def compute() -> StepOutput:
            batch = self.batch(numbers)
            hidden = self.model(batch, self.cache.layers)
            return StepOutput(batch, hidden, self.model.logits(hidden.streams))

        computed, held = self.capture(compute), step.held

        def run() -> StepOutput:
            held[:] = [computed()]
            return held[0]

        step.run = run
        return step


class CapturedStep:
    """A step of `rows` tokens for each of `size` sequences, with its inputs on the host and on the device.

    Attributes:
        held: the output of its last run.
    """

    run: Callable[[], StepOutput]

    def __init__(self, cache: Cache, size: int, rows: int, columns: int, padding: Sequence) -> None:
        self.size, self.rows = size, rows
        self.held: list[StepOutput] = []
        self._padding = padding
        on_gpu = is_there(cache.device)
        # slots, starts, and the ids of each; the blocks have their own, they change seldom
        self._few = torch.zeros(2 + rows, size, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        self._blocks = torch.full(
            (size, columns), padding.blocks[0], dtype=torch.int64, pin_memory=on_gpu, device="cpu"
        )
        self._few[0] = padding.slot
        self._counts: list[int] = []  # the tokens of each sequence
        self._rows: list[tuple[Sequence, int] | None] = [None] * size  # block table of each row, by version
        self._routed = torch.zeros(size * rows, dtype=torch.int64, pin_memory=on_gpu, device="cpu")
        few, blocks, routed = (one.to(cache.device) for one in (self._few, self._blocks, self._routed))
        self._on_device = few, blocks, routed
        self._arrived = torch.cuda.Event() if on_gpu else None
        counts, none = torch.full_like(few[0], rows), torch.zeros_like(few[0])
        self.numbers = Numbers(few[0], few[1], counts, none, few[2:].view(-1), blocks, routed)

    def fill(self, work: Items[tuple[Sequence, list[int]]]) -> None:
        """Set the inputs to these sequences, once the previous inputs have reached the device. Unused tokens are 0."""
        if self._arrived is not None:
            self._arrived.synchronize()
        few, ids = self._few.numpy(), self._few[2:].view(self.size, self.rows).numpy()
        few[0], few[1:] = self._padding.slot, 0
        for row, (sequence, own) in enumerate(work):
            few[:2, row] = sequence.slot, sequence.length
            ids[row, : len(own)] = own
        self._on_device[0].copy_(self._few, non_blocking=True)
        if self._fill_blocks([one for one, _ in work] + [self._padding] * (self.size - len(work))):
            self._on_device[1].copy_(self._blocks, non_blocking=True)
        if self._fill_routed([len(own) for _, own in work]):
            self._on_device[2].copy_(self._routed, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def feed(self, ids: torch.Tensor) -> None:
        """Copy the newest tokens of the first sequences on the device, int64 [n], if each sequence has one token."""
        self.numbers.ids[: len(ids)].copy_(ids)

    def _fill_blocks(self, sequences: list[Sequence]) -> bool:
        """Fill the block tables and return whether any changed."""
        changed = False
        for row, sequence in enumerate(sequences):
            if self._rows[row] != (sequence, sequence.changes):
                self._rows[row] = sequence, sequence.changes
                self._blocks[row, : len(sequence.blocks)] = torch.tensor(sequence.blocks, device="cpu")
                changed = True
        return changed

    def _fill_routed(self, counts: list[int]) -> bool:
        """Set, for each row, the row whose experts it uses, and return whether that changed.

        Unused rows copy the experts of other rows: those after a sequence's tokens copy its last token, and rows
        without a sequence copy the other rows.
        """
        if counts == self._counts:
            return False
        self._counts = counts
        each = np.minimum(np.arange(self.rows), np.array(counts)[:, None] - 1)
        rows = each + self.rows * np.arange(len(counts))[:, None]
        self._routed.numpy()[:] = np.resize(rows, self.size * self.rows)
        return True
