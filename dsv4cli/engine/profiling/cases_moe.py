"""Benchmark cases: the routers, the routed experts and the shared expert."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.checkpoint.values import words_of
from dsv4cli.engine.profiling.bounds import EXPERTS, FP32
from dsv4cli.engine.profiling.case import Case, Operation, Work, stored_matrices
from dsv4cli.engine.profiling.inputs import DTYPE, BenchmarkInputs
from dsv4cli.kernels import experts, routing
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.experts import ref as experts_ref
from dsv4cli.kernels.routing import ref as routing_ref

MATRICES = ("w1", "w2", "w3")


def mixture(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield both kinds of router, the routed experts, the shared expert, and all experts in one call."""
    scored, hashed = bench.shapes.layer(hashed=False), bench.shapes.layer(hashed=True)
    if scored:
        yield _router(bench, f"{scored}ffn.gate.")
    if hashed:
        yield _hash_router(bench, f"{hashed}ffn.gate.")
    routed, shared = _routed(bench), _shared(bench)
    yield from (routed, shared, _both(bench, routed, shared))


def _router(bench: BenchmarkInputs, prefix: str) -> Case:
    config, tokens = bench.config, bench.tokens
    count, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor
    flops = 2 * tokens * count * config.hidden_size

    def through(route: Operation) -> Operation:
        return lambda x, weight, bias: route(x, weight, bias, k, scale)

    def build(bench: BenchmarkInputs) -> Work:
        inputs = (
            bench.randn(tokens, config.hidden_size),
            bench.weight(prefix + "weight"),
            bench.weight(prefix + "bias"),
        )
        # experts whose biased scores differ in the last bit may swap places: compare their sorted weights
        return Work(
            inputs,
            through(routing.route),
            through(routing_ref.route),
            flops,
            compared=lambda outputs: (outputs[1].sort(-1).values,),
        )

    needs = bench.shapes.nbytes([prefix + "weight"])
    return Case("router", "routing", f"{k} of {count}, by score", needs, flops, FP32, build)


def _hash_router(bench: BenchmarkInputs, prefix: str) -> Case:
    config, tokens = bench.config, bench.tokens
    count, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor
    flops = 2 * tokens * k * config.hidden_size

    def through(route: Operation) -> Operation:
        return lambda x, weight, table, ids: route(x, weight, table, ids, scale)

    def build(bench: BenchmarkInputs) -> Work:
        weight, table = bench.weight(prefix + "weight"), bench.weight(prefix + "tid2eid")
        ids = torch.arange(tokens, device=bench.device) % table.shape[0]
        x = bench.randn(tokens, config.hidden_size)
        rows = table[ids].unique().numel()
        read = x.nbytes + rows * weight[0].nbytes + ids.nbytes + tokens * table[0].nbytes
        return Work(
            (x, weight, table, ids), through(routing.route_by_id), through(routing_ref.route_by_id), flops, read
        )

    needs = bench.shapes.nbytes([prefix + "weight", prefix + "tid2eid"])
    return Case("router_hash", "routing", f"{k} of {count}, by token id", needs, flops, FP32, build)


def _routed(bench: BenchmarkInputs) -> Case:
    config, tokens = bench.config, bench.tokens
    prefix = "layers.0.ffn.experts.0."
    parts = [bench.shapes.parts(prefix + name) for name in MATRICES]
    one = bench.shapes.nbytes(name for pair in parts for name in pair if name)
    quantised = parts[0][1] is not None
    inner, k = config.moe_intermediate_size, config.num_experts_per_tok
    flops = 6 * tokens * k * inner * config.hidden_size

    def through(mix: Operation) -> Operation:
        def call(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor) -> object:
            return mix(x, _experts(matrices), chosen, weights, config.swiglu_limit, quantised)

        return call

    def build(bench: BenchmarkInputs) -> Work:
        x, (chosen, weights) = bench.randn(tokens, config.hidden_size), bench.routes()
        matrices = [tensor for name in MATRICES for tensor in bench.experts(prefix + name)]
        read = x.nbytes + chosen.nbytes + weights.nbytes + chosen.unique().numel() * one
        run, reference = through(experts.routed_experts), through(experts_ref.routed_experts)
        return Work((x, chosen, weights, *matrices), run, reference, flops, read)

    form = words_of(bench.shapes.spec(parts[0][0]))
    words = f"{k} of {config.n_routed_experts}, {config.hidden_size}-{inner} {form}"
    needs = config.n_routed_experts * one
    return Case("routed_experts", "experts", words, needs, flops, EXPERTS, build, quantised, exact=True)


def _experts(arguments: tuple[torch.Tensor, ...]) -> ExpertWeights:
    """Return the expert weights whose parts are these arguments."""
    w1, w2, w3 = stored_matrices(arguments)
    return ExpertWeights(w1, w2, w3)


def _shared(bench: BenchmarkInputs) -> Case:
    config, tokens, prefix = bench.config, bench.tokens, "layers.0.ffn.shared_experts."
    parts = [bench.shapes.parts(prefix + name) for name in MATRICES]
    spec, quantised, limit = bench.shapes.spec(parts[0][0]), parts[0][1] is not None, config.swiglu_limit
    inner = spec.shape[0]
    flops = 6 * tokens * inner * config.hidden_size

    def through(expert: Operation) -> Operation:
        return lambda x, *matrices: expert(x, _experts(matrices), limit, True)

    def build(bench: BenchmarkInputs) -> Work:
        matrices = [tensor for name in MATRICES for tensor in bench.matrix(prefix + name)]
        inputs = (bench.randn(tokens, config.hidden_size), *matrices)
        return Work(inputs, through(experts.shared_expert), through(experts_ref.shared_expert), flops)

    words = f"{config.hidden_size}-{inner} {words_of(spec)}"
    needs = bench.shapes.nbytes(name for pair in parts for name in pair if name)
    return Case("shared_expert", "experts", words, needs, flops, EXPERTS, build, quantised, exact=True)


def _both(bench: BenchmarkInputs, routed: Case, shared: Case) -> Case:
    """Return the case of routed and shared experts in one call. With tensor parallelism, a rank's sum stays in fp32."""
    limit, dtype = bench.config.swiglu_limit, DTYPE if bench.shapes.tp == 1 else torch.float32

    def through(mixture: Operation) -> Operation:
        def call(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor) -> object:
            half = len(matrices) // 2
            every, own = _experts(matrices[:half]), _experts(matrices[half:])
            return mixture(x, every, own, chosen, weights, limit, True, dtype)

        return call

    def build(bench: BenchmarkInputs) -> Work:
        many, one = routed.build(bench), shared.build(bench)
        own = one.arguments[1:]
        read = (many.read or 0) + sum(tensor.nbytes for tensor in own if tensor is not None)
        run, reference = through(experts.mixture), through(experts_ref.mixture)
        return Work((*many.arguments, *own), run, reference, many.flops + one.flops, read)

    words = f"{routed.shape}, and the shared expert"
    needs, cost = routed.needs + shared.needs, routed.cost + shared.cost
    return Case("mixture", "experts", words, needs, cost, EXPERTS, build, routed.quantised, exact=True)
