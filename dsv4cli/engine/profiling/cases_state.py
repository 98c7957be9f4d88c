"""Benchmark cases: operations that write the KV cache."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import torch

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.profiling.bounds import ENTRIES, FOUR_ROUNDINGS
from dsv4cli.engine.profiling.case import Case, Operation, Tensors, Work
from dsv4cli.engine.profiling.inputs import BenchmarkInputs
from dsv4cli.kernels import compressor
from dsv4cli.kernels import qk_norm_rope as prepared
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.compressor import Compression, EntryPlan, State
from dsv4cli.kernels.compressor import ref as compressor_ref
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.qk_norm_rope import KeyCells, KeyNorm
from dsv4cli.kernels.qk_norm_rope import ref as prepared_ref

# number of a compressor's arguments, and of its state's tensors in the outputs
ARGUMENTS, OUTPUTS = 8, 4


def keys(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield the preparation of queries and keys: in a sliding-window layer (or the first kind), and in a CSA layer."""
    config, tokens = bench.config, bench.tokens
    heads, width = config.num_attention_heads, config.head_dim
    index_heads, index_width = config.index_n_heads, config.index_head_dim
    words, needs = f"{heads} queries and a key of {width}", 2 * tokens * (heads + 1) * width

    def plain(bench: BenchmarkInputs) -> Work:
        return _prepare(bench, min(bench.batch.rotations), (), prepared.queries_and_keys, prepared_ref.queries_and_keys)

    def indexed(bench: BenchmarkInputs) -> Work:
        queries = (bench.randn(tokens, index_heads, index_width),)
        return _prepare(bench, 4, queries, prepared.queries_keys_and_index, prepared_ref.queries_keys_and_index)

    yield Case("queries_and_keys", "keys", words, needs, needs, FOUR_ROUNDINGS, plain, exact=True)
    if bench.shapes.layer(ratio=CSA):
        words, needs = f"{words}, {index_heads} of {index_width}", needs + 2 * tokens * index_heads * index_width
        yield Case("queries_keys_index", "keys", words, needs, needs, ENTRIES, indexed, exact=True)


def _prepare(bench: BenchmarkInputs, ratio: int, more: Tensors, run: Operation, reference: Operation) -> Work:
    """Return the work of preparing queries and keys.

    Args:
        more: queries besides those of attention.
    """
    config, batch = bench.config, bench.batch
    q = bench.randn(bench.tokens, config.num_attention_heads, config.head_dim)
    kv, weight = bench.randn(bench.tokens, config.head_dim), bench.weight("layers.0.attn.kv_norm.weight")
    ring = bench.randn(bench.sequences * (config.sliding_window + ROLLBACK), config.head_dim)
    turns, cells = batch.rotations[ratio], batch.window_cells
    changed = sum(tensor.nbytes for tensor in (q, kv, *more))
    stored = int((cells >= 0).sum()) * ring[0].nbytes

    def through(operation: Operation) -> Operation:
        def call(*inputs: torch.Tensor) -> object:
            *rows, weight, turns, ring, cells = inputs
            return operation(*rows, KeyNorm(weight, config.rms_norm_eps, True), turns, KeyCells(ring, cells))

        return call

    return Work(
        (q, kv, *more, weight, turns, ring, cells),
        through(run),
        through(reference),
        0,
        changed + weight.nbytes + turns.nbytes + cells.nbytes,
        changed + stored,
    )


@dataclass(frozen=True)
class CompressorCase:
    """A compressor of a layer.

    Attributes:
        prefix: prefix of its weights.
        ratio: tokens per entry.
        width: columns of an entry.
        packed: its entries are stored in FP4.
    """

    prefix: str
    ratio: int
    width: int
    packed: bool = False

    @property
    def members(self) -> int:
        """Tokens that an entry is computed from. With ratio 4 these include the previous group."""
        return 2 * self.ratio if self.ratio == CSA else self.ratio

    @property
    def channels(self) -> int:
        """Columns of a raw row."""
        return self.width * self.members // self.ratio


def compressors(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield the compressors of a layer. If the context is a multiple of the ratio, each sequence completes an entry."""
    csa, hca = bench.shapes.layer(ratio=CSA), bench.shapes.layer(ratio=HCA)
    wide, narrow = bench.config.head_dim, bench.config.index_head_dim
    if csa:
        own = CompressorCase(f"{csa}attn.compressor.", 4, wide)
        yield _compress(bench, "compress_both", own, CompressorCase(f"{csa}attn.indexer.compressor.", 4, narrow, True))
    if hca:
        yield _compress(bench, "compress_hca", CompressorCase(f"{hca}attn.compressor.", 128, wide))


def _compress(bench: BenchmarkInputs, name: str, *parts: CompressorCase) -> Case:
    """Return the case of one compressor, or of two with the same groups in one call."""
    ratio, members, channels = parts[0].ratio, parts[0].members, sum(part.channels for part in parts)

    def build(bench: BenchmarkInputs) -> Work:
        plan, eps = bench.opening.entry_plan(ratio), bench.config.rms_norm_eps
        given = [_given(bench, part) for part in parts]
        emitted = int((plan.entries >= 0).sum())
        # raw rows (kv and score): those of completed groups in the ring buffers, and those that stay there
        before = 0 if bench.tokens > bench.sequences else emitted * members
        kept = min(bench.tokens, bench.sequences * (members + ROLLBACK))
        read, written = before * 8 * channels, kept * 8 * channels
        for *inputs, _, _, entries, scale in given:
            read += sum(tensor.nbytes for tensor in inputs if tensor is not None)
            written += emitted * sum(codes[0].nbytes for codes in (entries, scale) if codes is not None)
        run, reference = (_through(module, plan, eps) for module in (compressor, compressor_ref))
        return Work(sum(given, ()), run, reference, 0, read, written, _made(plan))

    # as in the plan: the most groups that the tokens of each sequence can complete
    groups = bench.sequences * -(-bench.tokens // bench.sequences // ratio)
    needs = 8 * bench.tokens * channels
    words = f"{groups} groups of {members}x{'+'.join(str(part.channels) for part in parts)} fp32"
    return Case(name, "compressor", words, needs, needs, ENTRIES, build, exact=True)


def _given(bench: BenchmarkInputs, part: CompressorCase) -> tuple[torch.Tensor | None, ...]:
    """Return a compressor's arguments: raw rows kv and score, ape, norm weight, two ring buffers, entries, scale."""
    rows = (bench.randn(bench.tokens, part.channels, dtype=torch.float32) for _ in range(2))
    ring = bench.sequences, part.members + ROLLBACK, part.channels
    rings = (bench.randn(*ring, dtype=torch.float32) for _ in range(2))
    entries = bench.randn(bench.cells(part.ratio), part.width)
    codes = block_scale_ref.fp4_codes(entries, FP4_BLOCK) if part.packed else (entries, None)
    return *rows, bench.weight(f"{part.prefix}ape"), bench.weight(f"{part.prefix}norm.weight"), *rings, *codes


def _through(family: ModuleType, plan: EntryPlan, eps: float) -> Operation:
    """Return a call of one compressor, or of both compressors of a CSA layer, by a kernel family or its reference.

    Rounding is the model's.
    """

    def call(*tensors: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        given = []
        for first in range(0, len(tensors), ARGUMENTS):
            kv, score, ape, norm, *memory = tensors[first : first + ARGUMENTS]
            given.append(Compression(kv, score, ape, norm, eps, State(*memory)))
        if len(given) == 1:
            states = [family.compress_keys(*given, plan, True)]
        else:
            states = family.compress_both(*given, plan, True)
        return tuple(tensor for state in states for tensor in (state.entries, state.scale, state.kv, state.score))

    return call


def _made(plan: EntryPlan) -> Callable[[Tensors], Tensors]:
    """Return a selector of the entries that the step completed and of the ring buffers."""
    cells = plan.entries[plan.entries >= 0]

    def chosen(outputs: Tensors) -> Tensors:
        found: list[torch.Tensor] = []
        for first in range(0, len(outputs), OUTPUTS):
            entries, scale, *rings = outputs[first : first + OUTPUTS]
            made = entries[cells] if scale is None else block_scale_ref.dequantise(entries[cells], scale[cells])
            found += [made, *rings]
        return tuple(found)

    return chosen
