"""Benchmark cases: indexer and attention over the KV cache."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.config.layer_kind import CSA, HCA, WINDOW
from dsv4cli.engine.profiling.bounds import ATTENTION, EXACT, SCORES
from dsv4cli.engine.profiling.case import Case, Competitor, Operation, Tensors, Work
from dsv4cli.engine.profiling.inputs import BenchmarkInputs
from dsv4cli.kernels import attention, indexer
from dsv4cli.kernels.attention import ref as attention_ref
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.indexer import IndexEntries, IndexKeys, IndexQueries, WindowList
from dsv4cli.kernels.indexer import ref as indexer_ref


def index(bench: BenchmarkInputs) -> Iterator[Case]:
    if bench.shapes.layer(ratio=CSA) is None or not bench.visible(CSA):
        return
    yield _scores(bench)
    tokens, entries, topk = bench.tokens, bench.visible(CSA), bench.config.index_topk
    words, needs = f"{min(topk, entries)} of {entries}", 2 * tokens * entries
    yield Case("top_entries", "indexer", words, needs, tokens * entries, EXACT, _choice, exact=True)
    words = f"{words}, after {bench.config.sliding_window} rows"
    yield Case("choose_entries", "indexer", words, needs, tokens * entries, EXACT, _choice_as_lists, exact=True)
    yield _best(bench)


def _scores(bench: BenchmarkInputs) -> Case:
    config, tokens, entries = bench.config, bench.tokens, bench.visible(CSA)
    heads, width = config.index_n_heads, config.index_head_dim
    flops = 2 * tokens * heads * width * entries
    factor = (width * heads) ** -0.5

    def through(operation: Operation) -> Operation:
        return lambda q, weights, keys, scale, *entries: operation(
            IndexQueries(q, weights, factor), IndexKeys(keys, scale), IndexEntries(*entries)
        )

    def build(bench: BenchmarkInputs) -> Work:
        q, *stored = _queries_and_keys(bench)
        inputs = (q, bench.randn(tokens, heads), *stored)
        return Work(inputs, through(indexer.index_scores), through(indexer_ref.index_scores), flops, compared=_finite)

    return Case("index_scores", "indexer", f"{heads} heads x {entries} entries", _keys(bench), flops, SCORES, build)


def _best(bench: BenchmarkInputs) -> Case:
    """Return the case of indexer scores and top-k in one call, as the model makes it."""
    config, tokens, entries = bench.config, bench.tokens, bench.visible(CSA)
    heads, topk = config.index_n_heads, config.index_topk
    flops = 2 * tokens * heads * config.index_head_dim * entries

    def build(bench: BenchmarkInputs) -> Work:
        batch = bench.batch
        q, *stored = _queries_and_keys(bench)
        # with weights of 1, sums of FP4 products are exact in any order
        inputs = (q, torch.ones_like(q[..., 0]), *stored, batch.window_index, batch.window_columns)

        def through(operation: Operation) -> Operation:
            return lambda q, weights, keys, scale, table, sequence, visible, index, columns: operation(
                IndexQueries(q, weights, 1.0), IndexKeys(keys, scale), topk,
                IndexEntries(table, sequence, visible), WindowList(index, columns, batch.window_rows),
            )  # fmt: skip

        return Work(inputs, through(indexer.best_entries), through(indexer_ref.best_entries), flops, compared=_in_order)

    words = f"{heads} heads, {min(topk, entries)} of {entries}, after {config.sliding_window} rows"
    return Case("best_entries", "indexer", words, _keys(bench), flops, EXACT, build, exact=True)


def _keys(bench: BenchmarkInputs) -> int:
    """Return the size of all indexer keys in bytes."""
    width = bench.config.index_head_dim
    return bench.cells(CSA) * (width // 2 + width // FP4_BLOCK)


def _queries_and_keys(bench: BenchmarkInputs) -> Tensors:
    """Return indexer queries and keys, both rounded to FP4 as in the model, and the index of the keys in the cache."""
    step, heads, width = bench.batch.entries[CSA], bench.config.index_n_heads, bench.config.index_head_dim
    q = block_scale_ref.fp4_round(bench.randn(bench.tokens, heads, width), FP4_BLOCK)
    keys, scale = block_scale_ref.fp4_codes(bench.randn(bench.cells(CSA), width), FP4_BLOCK)
    return q, keys, scale, step.table, bench.batch.sequence, step.visible


def _choice(bench: BenchmarkInputs) -> Work:
    """Return the top-k of entry numbers, which `torch.topk` computes too."""
    k = min(bench.config.index_topk, bench.visible(CSA))

    def through(choose: Operation) -> Operation:
        return lambda scores, visible: choose(scores, visible, k)

    return Work(
        (bench.randn(bench.tokens, bench.visible(CSA)), bench.batch.entries[CSA].visible),
        through(indexer.top_entries),
        through(indexer_ref.top_entries),
        0,
        compared=_in_order,
        rival=Competitor("torch.topk", lambda scores, visible: (scores, k), torch.topk),
    )


def _choice_as_lists(bench: BenchmarkInputs) -> Work:
    """Return the top-k as lists for attention: the window's rows, then the cells of the best entries."""
    topk, rows = bench.config.index_topk, bench.batch.window_rows
    scores, visible, *listing = _to_choose_from(bench)
    # bytes read from the table: one cell per listed entry
    found = bench.tokens * min(topk, bench.visible(CSA)) * listing[0].element_size()
    read = sum(tensor.nbytes for tensor in (scores, visible, *listing[1:])) + found

    def through(choose: Operation) -> Operation:
        return lambda scores, visible, table, sequence, index, columns: choose(
            scores, topk, IndexEntries(table, sequence, visible), WindowList(index, columns, rows)
        )

    run, reference = through(indexer.choose_entries), through(indexer_ref.choose_entries)
    return Work((scores, visible, *listing), run, reference, 0, read, compared=_in_order)


def _to_choose_from(bench: BenchmarkInputs) -> Tensors:
    """Return random scores and the positions of entries and window rows: the tensor arguments of `choose_entries`."""
    batch, step = bench.batch, bench.batch.entries[CSA]
    scores = bench.randn(bench.tokens, step.table.shape[1])
    return scores, step.visible, step.table, batch.sequence, batch.window_index, batch.window_columns


def _in_order(outputs: Tensors) -> Tensors:
    """Sort each row of indices, because top-k returns them in any order."""
    return tuple(rows.sort(-1).values for rows in outputs)


def _finite(outputs: Tensors) -> Tensors:
    """Replace the -inf scores of entries that are not visible with 0."""
    return tuple(scores.masked_fill(scores == float("-inf"), 0.0) for scores in outputs)


def attentions(bench: BenchmarkInputs) -> Iterator[Case]:
    config, tokens = bench.config, bench.tokens
    for ratio, name in ((WINDOW, "attention_sliding"), (CSA, "attention_csa"), (HCA, "attention_hca")):
        if bench.shapes.layer(ratio=ratio) is None:
            continue
        entries = bench.visible(ratio) if ratio else 0
        entries = min(entries, config.index_topk) if ratio == CSA else entries
        rows = config.sliding_window + entries
        flops = 4 * tokens * config.num_attention_heads * config.head_dim * rows
        needs = 2 * config.head_dim * (2 * tokens * config.num_attention_heads + (bench.cells(ratio) if ratio else 0))
        needs += 2 * tokens * bench.visible(CSA) if ratio == CSA else 0  # the scores that its top-k uses

        def build(bench: BenchmarkInputs, ratio: int = ratio) -> Work:
            return _attend(bench, ratio)

        words = f"{config.num_attention_heads} heads, {config.sliding_window} + {entries} rows"
        yield Case(name, "attention", words, needs, flops, ATTENTION, build)


def _attend(bench: BenchmarkInputs, ratio: int) -> Work:
    config, batch = bench.config, bench.batch
    heads, width, scale = config.num_attention_heads, config.head_dim, config.head_dim**-0.5
    q = bench.randn(bench.tokens, heads, width)
    window = bench.randn(batch.window_rows, width)
    pool = bench.randn(bench.cells(ratio) if ratio else 0, width)
    index = {0: lambda: batch.window_index, 4: lambda: _chosen(bench), 128: lambda: batch.every_entry}[ratio]()
    listed = index[index >= 0]
    read = listed.unique().numel() * width * q.element_size() + q.nbytes + index.nbytes

    def with_scale(operation: Operation) -> Operation:
        return lambda *inputs: operation(*inputs[:-1], scale, inputs[-1])

    return Work(
        (q, window, pool, index, bench.randn(heads, dtype=torch.float32), batch.rotations[ratio]),
        with_scale(attention.sparse_attention),
        with_scale(attention_ref.sparse_attention),
        4 * heads * width * listed.numel(),
        read,
    )


def _chosen(bench: BenchmarkInputs) -> torch.Tensor:
    """Return a CSA layer's attention lists for random indexer scores."""
    scores, visible, table, sequence, index, columns = _to_choose_from(bench)
    topk, rows = bench.config.index_topk, bench.batch.window_rows
    entries, window = IndexEntries(table, sequence, visible), WindowList(index, columns, rows)
    return indexer_ref.choose_entries(scores, topk, entries, window)
