"""Benchmark cases: rounding, norms, RoPE and hyper-connections."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from dsv4cli.engine.config.layer_kind import CSA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.profiling.bounds import EXACT, FOUR_ROUNDINGS, ONE_ROUNDING, Bound
from dsv4cli.engine.profiling.case import Case, Operation, Tensors, Work
from dsv4cli.engine.profiling.inputs import BenchmarkInputs
from dsv4cli.kernels import block_scale, hyper_connections, norm, rope
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.formats import FP4_BLOCK, FP8_BLOCK
from dsv4cli.kernels.hyper_connections import Connection
from dsv4cli.kernels.hyper_connections import ref as hyper_connections_ref
from dsv4cli.kernels.norm import ref as norm_ref
from dsv4cli.kernels.rope import ref as rope_ref


def roundings(bench: BenchmarkInputs) -> Iterator[Case]:
    config, tokens = bench.config, bench.tokens
    yield _simple(
        bench, "fp8_round", "block_scale", (tokens, config.hidden_size), EXACT,
        lambda x: block_scale.fp8_round(x, FP8_BLOCK), lambda x: block_scale_ref.fp8_round(x, FP8_BLOCK),
    )  # fmt: skip
    if bench.shapes.layer(ratio=CSA):
        queries = (tokens, config.index_n_heads, config.index_head_dim)
        yield _simple(
            bench, "fp4_round", "block_scale", queries, EXACT,
            lambda x: block_scale.fp4_round(x, FP4_BLOCK), lambda x: block_scale_ref.fp4_round(x, FP4_BLOCK),
        )  # fmt: skip
        yield _simple(
            bench, "hadamard", "block_scale", queries, ONE_ROUNDING, block_scale.hadamard, block_scale_ref.hadamard
        )


def norms(bench: BenchmarkInputs) -> Iterator[Case]:
    config, tokens = bench.config, bench.tokens
    eps, heads = config.rms_norm_eps, (tokens, config.num_attention_heads, config.head_dim)
    yield _simple(
        bench, "rms_norm", "norm", (tokens, config.hidden_size), ONE_ROUNDING,
        lambda x, w: norm.rms_norm(x, w, eps), lambda x, w: norm_ref.rms_norm(x, w, eps),
        more=lambda bench: (bench.weight("norm.weight"),),
    )  # fmt: skip
    yield _simple(
        bench, "head_norm", "norm", heads, FOUR_ROUNDINGS,
        lambda q: norm.head_norm(q, eps), lambda q: norm_ref.head_norm(q, eps),
    )  # fmt: skip
    yield _simple(
        bench, "rotate", "rope", heads, ONE_ROUNDING, rope.rotate, rope_ref.rotate,
        more=lambda bench: (next(iter(bench.batch.rotations.values())),),
    )  # fmt: skip


def _connection(config: ModelConfig, iterations: int, weights: Sequence[torch.Tensor]) -> Connection:
    fn, scale, base = weights
    return Connection(fn, scale, base, iterations, config.hc_eps, config.rms_norm_eps)


def connections(bench: BenchmarkInputs) -> Iterator[Case]:
    config, tokens = bench.config, bench.tokens
    streams, family = (tokens, config.hc_mult, config.hidden_size), "hyper_connections"
    width, mixes = config.hc_mult * config.hidden_size, (2 + config.hc_mult) * config.hc_mult
    connection, head = (partial(_connection, config, count) for count in (config.hc_sinkhorn_iters, 0))

    def build(prefix: str, run: Operation, reference: Operation, rows: int) -> Callable[[BenchmarkInputs], Work]:
        def built(bench: BenchmarkInputs) -> Work:
            weights = (bench.weight(f"{prefix}_{name}") for name in ("fn", "scale", "base"))
            return Work((bench.randn(*streams), *weights), run, reference, 2 * tokens * rows * width)

        return built

    words = f"{config.hc_mult} streams of {config.hidden_size}"
    cost, needs = 2 * tokens * mixes * width, 2 * tokens * width + 4 * mixes * width
    pre = build(
        "layers.0.hc_attn",
        lambda s, *weights: hyper_connections.connect_pre(s, connection(weights)),
        lambda s, *weights: hyper_connections_ref.connect_pre(s, connection(weights)),
        mixes,
    )
    yield Case("connect_pre", family, words, needs, cost, ONE_ROUNDING, pre)

    def post(bench: BenchmarkInputs) -> Work:
        post, comb = (bench.randn(tokens, *([config.hc_mult] * n), dtype=torch.float32) for n in (1, 2))
        inputs = (bench.randn(tokens, config.hidden_size), bench.randn(*streams), post, comb)
        return Work(inputs, hyper_connections.connect_post, hyper_connections_ref.connect_post, 0)

    yield Case("connect_post", family, words, needs, cost, ONE_ROUNDING, post)

    def step(bench: BenchmarkInputs) -> Work:
        outputs = post(bench).arguments
        names = ("hc_ffn_fn", "hc_ffn_scale", "hc_ffn_base", "ffn_norm.weight")
        weights = (bench.weight(f"layers.0.{name}") for name in names)

        def through(operation: Operation) -> Operation:
            return lambda *given: operation(*given[:4], connection(given[4:7]), given[7])

        run, reference = through(hyper_connections.connect_post_pre), through(hyper_connections_ref.connect_post_pre)
        return Work((*outputs, *weights), run, reference, cost)

    # the streams, their mix and its norm are rounded in sequence
    yield Case("connect_post_pre", family, words, needs, cost, FOUR_ROUNDINGS, step)
    collapse = build(
        "hc_head",
        lambda s, *weights: hyper_connections.connect_head(s, head(weights)),
        lambda s, *weights: hyper_connections_ref.connect_head(s, head(weights)),
        config.hc_mult,
    )
    yield Case("connect_head", family, words, needs, cost, ONE_ROUNDING, collapse)


def _simple(
    bench: BenchmarkInputs,
    name: str,
    family: str,
    shape: tuple[int, ...],
    bound: Bound,
    run: Operation,
    reference: Operation,
    more: Callable[[BenchmarkInputs], Tensors] = lambda bench: (),
) -> Case:
    """Return the case of an operation on activations of one shape.

    Args:
        more: makes additional small arguments.
    """
    count = torch.Size(shape).numel()

    def build(bench: BenchmarkInputs) -> Work:
        return Work((bench.randn(*shape), *more(bench)), run, reference, 0)

    words = "x".join(map(str, shape))
    return Case(name, family, words, 2 * count, count, bound, build, exact=bound is EXACT)
