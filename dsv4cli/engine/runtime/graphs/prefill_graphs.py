"""Prefill steps, captured as CUDA graphs for some numbers of rows and replayed: the host launches one graph.

A step holds several sequences, each with a chunk of its prompt or the tokens that it decodes, and as many groups of
compressed entries as these can complete. Unused rows and groups belong to the padding sequence.
"""

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from time import perf_counter

import torch

from dsv4cli.engine.config.capacity import BLOCK_TOKENS, captured_rows
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.transformer import HiddenStates
from dsv4cli.engine.runtime.batch_builder import Extent, Numbers, batch_of
from dsv4cli.engine.runtime.graphs.decode_graphs import GraphRunner
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.runtime.step_sizes import prefill_sequences, rows_needed, sequences_in
from dsv4cli.engine.system.device import upload
from dsv4cli.kernels.card import is_there

# runs of a step before it is timed
WARM = 1

Output = tuple[HiddenStates, Batch]
# sequences and their next tokens
Work = Items[tuple[Sequence, list[int]]]


class PrefillGraphs:
    """Runs captured prefill steps on the cache of a `GraphRunner`, which says how long sequences may be.

    Attributes:
        seconds: the time of each size at capture, by rows.
    """

    def __init__(self, graphs: GraphRunner) -> None:
        self.seconds: dict[int, float] = {}
        self._graphs = graphs
        self._chunks: dict[int, CapturedPrefill] = {}
        self._made_for = self._key()

    def hold(self, work: Work) -> bool:
        """Return whether a captured step fits the next tokens of these sequences."""
        rows = rows_needed([len(ids) for _, ids in work])
        return len(work) <= _most_sequences(self._graphs) and rows <= self._sizes()[-1]

    def run(self, work: Work, on_preparing: Callable[[], None]) -> Output:
        """Return the model's output for the next tokens of these sequences and for padding, and the batch of all rows.

        The batch is for layers with a sliding window only. The next call overwrites the output. Reserves blocks. Raises
        NotEnoughMemory.
        """
        for sequence, ids in work:
            self._graphs.cache.reserve(sequence, len(ids))
        sizes = self._sizes()
        size = sizes[bisect_left(sizes, rows_needed([len(ids) for _, ids in work]))]
        if not self._holds(size):
            on_preparing()
            self._capture(size)
        return self._chunks[size].run(work)

    def prepare(self) -> bool:
        """Capture one missing size. Return whether any was missing.

        The largest comes first, so that the others can reuse its memory.
        """
        *sizes, largest = self._sizes()
        missing = [size for size in (largest, *sizes) if not self._holds(size)]
        if missing:
            self._capture(missing[0])
        return bool(missing)

    def forget(self) -> None:
        """Drop all captured steps; they are captured again when needed."""
        self._chunks.clear()

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes that are captured. They are the same on every rank."""
        return captured_rows(self._graphs.columns, self._graphs.model.world.size)

    def _capture(self, size: int) -> None:
        self._chunks[size] = chunks = CapturedPrefill(self._graphs, size)
        self.seconds[size] = chunks.timed(self._graphs.model.config.vocab_size)

    def _holds(self, size: int) -> bool:
        if self._made_for != self._key():
            self.forget()
            self._made_for = self._key()
        return size in self._chunks

    def _key(self) -> tuple[int, int]:
        """Return what the captured steps depend on: the address of the pools, and the longest sequence."""
        return self._graphs.cache.blocks, self._graphs.columns


class CapturedPrefill:
    """A captured step of some number of rows, for the tokens of several sequences."""

    def __init__(self, graphs: GraphRunner, rows: int) -> None:
        self._rows, self._columns, self._padding = rows, graphs.columns, graphs.padding
        self._most = sequences_in(rows, _most_sequences(graphs))
        cache, model, sequences = graphs.cache, graphs.model, self._most + 1
        self._numbers = upload(self._listed([(graphs.padding, [0])]), cache.device)
        ids, few, blocks = self._numbers.split([rows, 4 * sequences, sequences * self._columns])
        slots, starts, counts, fewest = few.view(4, sequences)
        extent = Extent.around(cache.config, rows, sequences, self._columns * BLOCK_TOKENS)

        def compute() -> Output:
            routed = torch.arange(rows, device=cache.device) % (rows - counts[-1:])  # padding goes where the chunks go
            numbers = Numbers(slots, starts, counts, fewest, ids, blocks.view(sequences, -1), routed)
            batch = batch_of(cache, numbers, extent)
            # drop what only the model reads, so that the next graph can reuse its memory
            return model(batch, cache.layers), replace(batch, entries={}, every_entry=batch.window_index)

        self._run = graphs.capture(compute)

    def run(self, work: Work) -> Output:
        """Return the model's output for the next tokens of these sequences, in the first rows."""
        self._numbers.copy_(upload(self._listed(work), self._numbers.device))
        return self._run()

    def timed(self, vocabulary: int) -> float:
        """Return the time of a full step of the padding sequence, in seconds.

        The tokens differ, so that many experts are used.
        """
        ids, seconds = [(7 * place + 1) % vocabulary for place in range(self._rows)], 0.0
        for _ in range(WARM + 1):
            begin = perf_counter()
            self.run([(self._padding, ids)])
            if is_there(self._numbers.device):
                torch.cuda.current_stream(self._numbers.device).synchronize()
            seconds = perf_counter() - begin
        return seconds

    def _listed(self, work: Work) -> torch.Tensor:
        """Return the inputs of a step. Ids come first, aligned to 16 bytes; the last sequence is padding."""
        given = [token for _, ids in work for token in ids]
        behind, unused, padding = self._rows - len(given), self._most - len(work), self._padding
        numbers = [*given, *[0] * behind]
        numbers += [*(one.slot for one, _ in work), *[padding.slot] * (unused + 1)]
        numbers += [*(one.length for one, _ in work), *[0] * (unused + 1)]
        numbers += [*(len(ids) for _, ids in work), *[0] * unused, behind]
        numbers += [*(one.fewest_columns for one, _ in work), *[0] * (unused + 1)]
        blocks = torch.full((self._most + 1, self._columns), padding.blocks[0], device="cpu")
        for row, (one, _) in enumerate(work):
            blocks[row, : len(one.blocks)] = torch.tensor(one.blocks, device="cpu")
        return torch.cat((torch.tensor(numbers, device="cpu"), blocks.flatten()))


def _most_sequences(graphs: GraphRunner) -> int:
    return prefill_sequences(graphs.cache.slots - 1)  # one slot is the padding's
