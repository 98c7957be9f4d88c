"""Observes one block: hooks where a stage is a module's input or output, wrapped methods elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.hooks import RemovableHandle

from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.block import Block, PendingResidual
from dsv4cli.engine.model.indexer import RATIO
from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.model.state import CompressorState, LayerCache
from dsv4cli.engine.tracing.observer import Observer, Watched
from dsv4cli.engine.tracing.short_sums import with_moved_shared_expert
from dsv4cli.engine.tracing.stages import AFTER_ATTENTION, STREAMS
from dsv4cli.kernels.block_scale import dequantise

# arguments or results of a method; untyped, as in torch's own modules
Call = tuple[Any, ...]


class BlockObserver:
    """Passes the stages of one layer to an observer."""

    def __init__(self, observer: Observer, layer: int, block: nn.Module) -> None:
        assert isinstance(block, Block)
        self.observer, self.layer, self.block = observer, layer, block

    def hooks(self) -> list[RemovableHandle]:
        """Hook the modules whose input or output is a stage."""
        block = self.block
        return [
            block.register_forward_pre_hook(self._takes),
            block.register_forward_hook(lambda *_: self.observer.sink.end_layer(self.layer)),
            block.attn.register_forward_pre_hook(lambda _, args: self._take("attn.input", args[0])),
            block.attn.register_forward_hook(lambda _, __, output: self._take("attn.output", output)),
            block.ffn.register_forward_pre_hook(lambda _, args: self._take("ffn.input", args[0])),
            block.ffn.gate.register_forward_hook(lambda _, __, output: self._routed(*output)),
            block.ffn.register_forward_hook(self._experts_summed),
        ]

    @contextmanager
    def methods(self) -> Iterator[None]:
        """Wrap the methods whose arguments or results are stages, while the block runs."""
        attn = self.block.attn
        with ExitStack() as stack:
            for owner, name, before, after in (
                (self.block, "connect", None, self._connected),
                (self.block, "step", self._between, self._stepped),
                (attn, "queries_and_keys", self._before_queries, self._projected),
                (attn, "heads", self._summed, None),
                *((attn.indexer, "heads", self._summed, None) for _ in range(attn.ratio == RATIO)),
                (attn, "entries", None, self._listed),
                (attn, "output", self._before_output, None),
            ):
                stack.enter_context(_seen(owner, name, before, after))
            yield

    def _take(self, stage: str, rows: torch.Tensor) -> None:
        self.observer.take(self.layer, stage, rows)

    def _takes(self, _: nn.Module, args: tuple[Any, Batch, LayerCache]) -> tuple[Any, Batch, LayerCache]:
        """Record the streams before the block, and replace them if the observer feeds others.

        If the streams are still pending and are not fed, they are recorded after the step that computes them.
        """
        before, batch, cache = args
        if isinstance(before, torch.Tensor):
            self._take(STREAMS, before)
            return self.observer.given(self.layer, STREAMS, before), batch, cache
        return self._fed(before, STREAMS), batch, cache

    def _between(self, args: Call) -> Call:
        """Feed the streams between attention and the experts. args: pending residual, part, norm."""
        return (self._fed(args[0], AFTER_ATTENTION), *args[1:]) if args[1] == "ffn" else args

    def _fed(self, before: PendingResidual, stage: str) -> PendingResidual:
        """Compute and record the streams of a pending residual, and return what replaces it."""
        if self.observer.feed is None:
            return before
        own = before.connect_post()
        self._take(stage, own)
        return pending(before, self.observer.given(self.layer, stage, own))

    def _connected(self, args: Call, result: Call) -> None:
        """Record the hyper-connection weights. args: streams, part; result: x, post, comb."""
        self._weights(args[1], *result[1:])

    def _stepped(self, args: Call, result: Call) -> None:
        """Record streams and weights. args: pending residual, part, norm; result: streams, x, post, comb."""
        part, streams = args[1], result[0]
        if self.observer.feed is None:
            self._take(AFTER_ATTENTION if part == "ffn" else STREAMS, streams)
        self._weights(part, *result[2:])

    def _weights(self, part: str, post: torch.Tensor, comb: torch.Tensor) -> None:
        self._take(f"hc_{part}.post", post)
        self._take(f"hc_{part}.comb", comb)

    def _before_queries(self, args: Call) -> Call:
        """Record the latent queries. args: latent queries and keys, batch, ring buffer."""
        latent, keys = map(self.observer.summed, args[:2])
        self._take("attn.wq_a", latent)
        return (latent, keys, *args[2:])

    def _summed(self, args: Call) -> Call:
        """Replace the queries by short sums if needed. args: queries of all heads."""
        return (self.observer.summed(args[0]),)

    def _before_output(self, args: Call) -> None:
        self._take("attn.o", args[0])

    def _projected(self, _: Call, result: Call) -> None:
        """Record the results: queries, keys, the indexer's queries."""
        for stage, rows in zip(("attn.q", "attn.kv", "indexer.q"), result, strict=True):
            if rows is not None:
                self._take(stage, rows)

    def _listed(self, args: Call, result: Call) -> None:
        """Record the compressed entries and the indexer's choice.

        args: raw rows of the compressors, the indexer's queries, batch, cache; result: pool, lists.
        """
        rows, _, batch, cache = args
        watched, ratio = self.observer.watched, self.block.attn.ratio
        if watched is None or not ratio:
            return
        self._made("attn.entries", cache.compressed, batch, watched)
        if ratio == RATIO:
            self._take("indexer.weights", rows[-1])
            self._made("indexer.entries", cache.index, batch, watched)
            if self.observer.wants(self.layer, "indexer.chosen"):
                longest = max(len(text.ids) for text in self.observer.manifest.texts)
                width = min(self.block.attn.indexer.topk, longest // RATIO)
                self._take("indexer.chosen", chosen_entries(result[1], batch, watched, width))

    def _experts_summed(self, ffn: MoE, args: Call, output: torch.Tensor) -> torch.Tensor:
        """Record the experts' output. args: x, batch."""
        if self.observer.moves_sums:
            output = with_moved_shared_expert(ffn, args[0], output, self.observer.summed)
        self._take("ffn.output", output)
        return output

    def _made(self, stage: str, state: CompressorState, batch: Batch, watched: Watched) -> None:
        """Record the entries that the text's tokens completed in this step."""
        if not self.observer.wants(self.layer, stage):
            return
        ratio = self.block.attn.ratio
        first, end = watched.position // ratio, (watched.position + watched.count) // ratio
        cells = batch.entries[ratio].table[watched.sequence, first:end]
        values = state.entries.data[cells]
        scale = state.tensors().scale
        if scale is not None:
            values = dequantise(values, scale.view(torch.uint8)[cells].view(scale.dtype)).bfloat16()
        self.observer.take_entries(self.layer, stage, first, values)

    def _routed(self, chosen: torch.Tensor, weights: torch.Tensor) -> None:
        """Record experts and their weights [T, k], sorted by expert, because the router's order has no meaning."""
        order = chosen.argsort(1)
        self._take("gate.chosen", chosen.gather(1, order).int())
        self._take("gate.weights", weights.gather(1, order))


def pending(before: PendingResidual, streams: torch.Tensor) -> PendingResidual:
    """Return a pending residual that evaluates to exactly these streams [T, N, D]."""
    identity = torch.eye(streams.shape[1], dtype=before.comb.dtype, device=streams.device)
    return PendingResidual(
        torch.zeros_like(before.x), streams, torch.zeros_like(before.post), identity.expand_as(before.comb).contiguous()
    )


def chosen_entries(lists: torch.Tensor, batch: Batch, watched: Watched, width: int) -> torch.Tensor:
    """Return the entries in a CSA layer's attention lists [T, L], ascending: int32 [T, width], padded with -1.

    Rows of other sequences than the watched one have no meaning.
    """
    count = lists.shape[1] - batch.window_index.shape[1]
    columns = batch.window_columns[:, None] + torch.arange(count, device=lists.device)
    cells = lists.gather(1, columns) - batch.window_rows
    table = batch.entries[RATIO].table[watched.sequence, : (watched.position + watched.count) // RATIO]
    none = torch.iinfo(torch.int32).max
    # cell -> entry number; the last place is for cells below 0 (no entry) and cells of other sequences
    number = lists.new_full((int(torch.cat((cells.flatten(), table, cells.new_zeros(1))).max()) + 2,), none)
    number[table] = torch.arange(len(table), device=lists.device)
    entries = number[cells.clamp_min(-1)].sort(1).values[:, :width]
    entries = F.pad(entries, (0, width - entries.shape[1]), value=none)
    return entries.masked_fill(entries == none, -1).int()


@contextmanager
def _seen(
    owner: nn.Module,
    name: str,
    before: Callable[[Call], Call | None] | None,
    after: Callable[[Call, Call], None] | None,
) -> Iterator[None]:
    """Wrap a method of this one object: `before` sees and may replace its arguments, `after` sees its result."""
    method = getattr(owner, name)

    def call(*args: Any) -> Any:
        if before is not None:
            args = before(args) or args
        result = method(*args)
        if after is not None:
            after(args, result)
        return result

    setattr(owner, name, call)
    try:
        yield
    finally:
        delattr(owner, name)
