"""Indexer and attention over the cache, as cases to measure."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.profiling.bounds import ATTENTION, EXACT, SCORES
from dsv4cli.engine.profiling.case import Case, Operation, Rival, Tensors, Work
from dsv4cli.engine.profiling.scene import Scene
from dsv4cli.kernels import attention, indexer
from dsv4cli.kernels.attention import ref as attention_ref
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.indexer import ref as indexer_ref


def index(scene: Scene) -> Iterator[Case]:
    if scene.shapes.layer(ratio=4) is None or not scene.visible(4):
        return
    config, tokens, entries = scene.config, scene.tokens, scene.visible(4)
    heads, width = config.index_n_heads, config.index_head_dim
    flops = 2 * tokens * heads * width * entries

    def scores(scene: Scene) -> Work:
        step = scene.batch.compress[4]
        # queries and keys as the model has them, both rounded to FP4
        q = block_scale_ref.fp4_round(scene.randn(tokens, heads, width), FP4_BLOCK)
        keys, scale = block_scale_ref.fp4_codes(scene.randn(scene.cells(4), width), FP4_BLOCK)
        inputs = (q, scene.randn(tokens, heads), keys, scale, step.table, step.sequence, step.visible)
        factor = (width * heads) ** -0.5

        def scaled(operation: Operation) -> Operation:
            return lambda q, weights, *rest: operation(q, weights, factor, *rest)

        return Work(inputs, scaled(indexer.index_scores), scaled(indexer_ref.index_scores), flops, compared=_finite)

    def choice(scene: Scene) -> Work:
        inputs = (scene.randn(tokens, entries), scene.batch.compress[4].visible)
        k = min(config.index_topk, entries)

        def through(choose: Operation) -> Operation:
            # any order will do
            return lambda scores, visible: choose(scores, visible, k)

        return Work(
            inputs,
            through(indexer.top_entries),
            through(indexer_ref.top_entries),
            0,
            compared=lambda outputs: (outputs[0].sort(-1).values,),
            rival=Rival("torch.topk", lambda scores, visible: (scores, k), torch.topk),
        )

    words, family = f"{heads} heads x {entries} entries", "indexer"
    needs = scene.cells(4) * (width // 2 + width // FP4_BLOCK)
    yield Case("index_scores", family, words, needs, flops, SCORES, scores)
    words = f"{min(config.index_topk, entries)} of {entries}"
    yield Case("top_entries", family, words, 2 * tokens * entries, tokens * entries, EXACT, choice, exact=True)


def _finite(outputs: Tensors) -> Tensors:
    """Scores with 0 for entries that are not seen, which have none."""
    return tuple(scores.masked_fill(scores == float("-inf"), 0.0) for scores in outputs)


def attentions(scene: Scene) -> Iterator[Case]:
    config, tokens = scene.config, scene.tokens
    for ratio, name in ((0, "attention_sliding"), (4, "attention_csa"), (128, "attention_hca")):
        if scene.shapes.layer(ratio=ratio) is None:
            continue
        entries = scene.visible(ratio) if ratio else 0
        entries = min(entries, config.index_topk) if ratio == 4 else entries
        rows = config.sliding_window + entries
        flops = 4 * tokens * config.num_attention_heads * config.head_dim * rows
        needs = 2 * config.head_dim * (2 * tokens * config.num_attention_heads + (scene.cells(ratio) if ratio else 0))

        def build(scene: Scene, ratio: int = ratio) -> Work:
            return _attend(scene, ratio)

        words = f"{config.num_attention_heads} heads, {config.sliding_window} + {entries} rows"
        yield Case(name, "attention", words, needs, flops, ATTENTION, build)


def _attend(scene: Scene, ratio: int) -> Work:
    config, batch = scene.config, scene.batch
    heads, width, scale = config.num_attention_heads, config.head_dim, config.head_dim**-0.5
    q = scene.randn(scene.tokens, heads, width)
    window = scene.randn(batch.window_rows, width)
    pool = scene.randn(scene.cells(ratio) if ratio else 0, width)
    index = {0: lambda: batch.window_index, 4: lambda: _chosen(scene), 128: lambda: batch.every_entry}[ratio]()
    listed = index[index >= 0]
    read = listed.unique().numel() * width * q.element_size() + q.nbytes + index.nbytes

    def with_scale(operation: Operation) -> Operation:
        return lambda *inputs: operation(*inputs[:-1], scale, inputs[-1])

    return Work(
        (q, window, pool, index, scene.randn(heads, dtype=torch.float32), batch.rotations[ratio]),
        with_scale(attention.sparse_attention),
        with_scale(attention_ref.sparse_attention),
        4 * heads * width * listed.numel(),
        read,
    )


def _chosen(scene: Scene) -> torch.Tensor:
    """The lists of a CSA layer whose indexer has chosen entries at even distances."""
    step, most = scene.batch.compress[4], scene.config.index_topk
    count = min(most, scene.visible(4))
    order = torch.arange(count, device=scene.device)
    visible = step.visible[:, None]
    numbers = torch.where(visible >= count, order * visible // max(count, 1), order)
    return scene.batch.listed(step.chosen_entries(numbers.masked_fill(order >= visible, -1)))
