"""What writes the cache, and what chooses the next token, as cases to measure."""

from collections.abc import Callable, Iterator
from types import ModuleType

import torch

from dsv4cli.engine.capacity import ROLLBACK
from dsv4cli.engine.profiling.bounds import ENTRIES, EXACT, FOUR_ROUNDINGS
from dsv4cli.engine.profiling.case import Case, Operation, Rival, Tensors, Work
from dsv4cli.engine.profiling.scene import Scene
from dsv4cli.kernels import compressor, sampling
from dsv4cli.kernels import keys as prepared
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.compressor import Plan, State
from dsv4cli.kernels.compressor import ref as compressor_ref
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.keys import ref as prepared_ref
from dsv4cli.kernels.sampling import ref as sampling_ref

TEMPERATURE, TOP_P = 1.0, 0.95


def keys(scene: Scene) -> Iterator[Case]:
    """Queries and keys of a sliding layer, or of the first kind that the model has."""
    config, tokens = scene.config, scene.tokens
    heads, width = config.num_attention_heads, config.head_dim
    capacity = config.sliding_window + ROLLBACK

    def through(operation: Operation) -> Operation:
        def call(*inputs: torch.Tensor) -> Tensors:
            q, kv, _ = operation(*inputs, config.rms_norm_eps, True)
            return q, kv

        return call

    def build(scene: Scene) -> Work:
        batch = scene.batch
        q, kv = scene.randn(tokens, heads, width), scene.randn(tokens, width)
        ring, weight = scene.randn(scene.sequences * capacity, width), scene.weight("layers.0.attn.kv_norm.weight")
        places = (batch.rotations[min(batch.rotations)], ring, batch.window_cells)
        run, reference = through(prepared.queries_and_keys), through(prepared_ref.queries_and_keys)
        read = q.nbytes + kv.nbytes + weight.nbytes + places[0].nbytes
        stored = int((batch.window_cells >= 0).sum()) * width * ring.element_size()
        return Work((q, kv, weight, *places), run, reference, 0, read, q.nbytes + kv.nbytes + stored)

    words = f"{heads} queries and a key of {width}"
    needs = 2 * tokens * (heads + 1) * width
    yield Case("queries_and_keys", "keys", words, needs, needs, FOUR_ROUNDINGS, build, exact=True)


def compressors(scene: Scene) -> Iterator[Case]:
    """Every compressor of the model. At a context that is a multiple of the ratio each sequence completes an entry."""
    wide, narrow = scene.config.head_dim, scene.config.index_head_dim
    kinds = ((4, wide, "compress_csa", "compressor.", False), (128, wide, "compress_hca", "compressor.", False),
             (4, narrow, "compress_index", "indexer.compressor.", True))  # fmt: skip
    for ratio, width, name, part, packed in kinds:
        layer = scene.shapes.layer(ratio=ratio)
        if layer is not None:
            yield _compressor(scene, name, f"{layer}attn.{part}", ratio, width, packed)


def _compressor(scene: Scene, name: str, prefix: str, ratio: int, width: int, packed: bool) -> Case:
    """packed: entries are stored in FP4, as the indexer's are."""
    channels, members = (2 * width, 8) if ratio == 4 else (width, ratio)

    def build(scene: Scene) -> Work:
        plan, eps = scene.opening.compress[ratio].plan, scene.config.rms_norm_eps
        kv, score = (scene.randn(scene.tokens, channels, dtype=torch.float32) for _ in range(2))
        rings = [scene.randn(scene.sequences, members + ROLLBACK, channels, dtype=torch.float32) for _ in range(2)]
        entries = scene.randn(scene.cells(ratio), width)
        codes = block_scale_ref.fp4_codes(entries, FP4_BLOCK) if packed else (entries, None)
        weights = scene.weight(f"{prefix}ape"), scene.weight(f"{prefix}norm.weight")
        emitted = int((plan.entries >= 0).sum())
        before = 0 if scene.tokens > scene.sequences else emitted * members * channels * 8
        kept = min(scene.tokens, scene.sequences * (members + ROLLBACK)) * channels * 8
        made = emitted * sum(part[0].nbytes for part in codes if part is not None)
        run, reference = (_through(module, plan, eps, packed) for module in (compressor, compressor_ref))
        read = kv.nbytes + score.nbytes + before + sum(weight.nbytes for weight in weights)
        inputs = (kv, score, *weights, *rings, *codes)
        return Work(inputs, run, reference, 0, read, made + kept, _made(plan))

    # as many as the plan has: what the tokens of each sequence can complete
    groups = scene.sequences * -(-scene.tokens // scene.sequences // ratio)
    needs = 8 * scene.tokens * channels
    words = f"{groups} groups of {members}x{channels} fp32"
    return Case(name, "compressor", words, needs, needs, ENTRIES, build, exact=True)


def _through(module: ModuleType, plan: Plan, eps: float, packed: bool) -> Operation:
    """Compression by a family or its reference."""

    def call(
        kv: torch.Tensor, score: torch.Tensor, ape: torch.Tensor, weight: torch.Tensor, *memory: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        inputs = (kv, score, ape, State(*memory), plan, weight, eps)
        state = module.compress_index_keys(*inputs) if packed else module.compress_keys(*inputs, True)
        return state.entries, state.scale, state.kv

    return call


def _made(plan: Plan) -> Callable[[Tensors], Tensors]:
    """The entries that a step has completed, and the rows that it has kept."""
    cells = plan.entries[plan.entries >= 0]

    def chosen(outputs: Tensors) -> Tensors:
        entries, scale, kept = outputs
        made = entries[cells] if scale is None else block_scale_ref.dequantise(entries[cells], scale[cells])
        return made, kept

    return chosen


def samplers(scene: Scene) -> Iterator[Case]:
    """The likeliest token of each sequence, and one drawn from a nucleus."""
    rows, width = scene.sequences, scene.config.vocab_size
    needs, words = 4 * rows * width, f"{rows} rows of {width}"

    def greedy(scene: Scene) -> Work:
        logits = scene.randn(rows, width, dtype=torch.float32)
        rival = Rival("torch.argmax", lambda logits: (logits, -1), torch.argmax)
        return Work((logits,), sampling.greedy, sampling_ref.greedy, 0, rival=rival)

    def draw(scene: Scene) -> Work:
        def through(operation: Operation) -> Operation:
            return lambda logits, noise: operation(logits, noise, TEMPERATURE, TOP_P)

        logits, noise = (scene.randn(rows, width, dtype=torch.float32) for _ in range(2))
        return Work((logits, noise.exp()), through(sampling.draw), through(sampling_ref.draw), 0)

    yield Case("greedy", "sampling", words, needs, rows * width, EXACT, greedy)
    yield Case("draw", "sampling", f"{words}, top-p {TOP_P}", 2 * needs, 50 * rows * width, EXACT, draw)
