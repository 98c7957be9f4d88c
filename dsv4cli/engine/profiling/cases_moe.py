"""The router, the routed experts and the shared expert, as cases to measure."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.profiling.bounds import EXPERTS, FP32
from dsv4cli.engine.profiling.case import FORMATS, Case, Operation, Work
from dsv4cli.engine.profiling.inputs import DTYPE, Scene
from dsv4cli.kernels import experts, routing
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.experts import ref as experts_ref
from dsv4cli.kernels.routing import ref as routing_ref

MATRICES = ("w1", "w2", "w3")


def mixture(scene: Scene) -> Iterator[Case]:
    """Both kinds of router, the routed experts and the shared one."""
    scored, hashed = scene.shapes.layer(hashed=False), scene.shapes.layer(hashed=True)
    if scored:
        yield _router(scene, f"{scored}ffn.gate.")
    if hashed:
        yield _hash_router(scene, f"{hashed}ffn.gate.")
    routed, shared = _routed(scene), _shared(scene)
    yield from (routed, shared, _both(scene, routed, shared))


def _router(scene: Scene, prefix: str) -> Case:
    config, tokens = scene.config, scene.tokens
    count, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor
    flops = 2 * tokens * count * config.hidden_size

    def through(route: Operation) -> Operation:
        return lambda x, weight, bias: route(x, weight, bias, k, scale)

    def build(scene: Scene) -> Work:
        inputs = (
            scene.randn(tokens, config.hidden_size),
            scene.weight(prefix + "weight"),
            scene.weight(prefix + "bias"),
        )
        # experts whose biased scores differ in the last bit may change places: their weights then agree all the same
        return Work(
            inputs,
            through(routing.route),
            through(routing_ref.route),
            flops,
            compared=lambda outputs: (outputs[1].sort(-1).values,),
        )

    needs = scene.shapes.nbytes([prefix + "weight"])
    return Case("router", "routing", f"{k} of {count}, by score", needs, flops, FP32, build)


def _hash_router(scene: Scene, prefix: str) -> Case:
    config, tokens = scene.config, scene.tokens
    count, k, scale = config.n_routed_experts, config.num_experts_per_tok, config.routed_scaling_factor
    flops = 2 * tokens * k * config.hidden_size

    def through(route: Operation) -> Operation:
        return lambda x, weight, table, ids: route(x, weight, table, ids, scale)

    def build(scene: Scene) -> Work:
        weight, table = scene.weight(prefix + "weight"), scene.weight(prefix + "tid2eid")
        ids = torch.arange(tokens, device=scene.device) % table.shape[0]
        x = scene.randn(tokens, config.hidden_size)
        rows = table[ids].unique().numel()
        read = x.nbytes + rows * weight[0].nbytes + ids.nbytes + tokens * table[0].nbytes
        return Work(
            (x, weight, table, ids), through(routing.route_by_id), through(routing_ref.route_by_id), flops, read
        )

    needs = scene.shapes.nbytes([prefix + "weight", prefix + "tid2eid"])
    return Case("router_hash", "routing", f"{k} of {count}, by token id", needs, flops, FP32, build)


def _routed(scene: Scene) -> Case:
    config, tokens = scene.config, scene.tokens
    prefix = "layers.0.ffn.experts.0."
    parts = [scene.shapes.parts(prefix + name) for name in MATRICES]
    one = scene.shapes.nbytes(name for pair in parts for name in pair if name)
    quantised = parts[0][1] is not None
    inner, k = config.moe_intermediate_size, config.num_experts_per_tok
    flops = 6 * tokens * k * inner * config.hidden_size

    def through(mix: Operation) -> Operation:
        def call(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor) -> object:
            return mix(x, ExpertWeights(*matrices), chosen, weights, config.swiglu_limit, quantised)

        return call

    def build(scene: Scene) -> Work:
        x, (chosen, weights) = scene.randn(tokens, config.hidden_size), scene.routes()
        matrices = [tensor for name in MATRICES for tensor in scene.experts(prefix + name)]
        read = x.nbytes + chosen.nbytes + weights.nbytes + chosen.unique().numel() * one
        run, reference = through(experts.routed_experts), through(experts_ref.routed_experts)
        return Work((x, chosen, weights, *matrices), run, reference, flops, read)

    form = FORMATS[scene.shapes.spec(parts[0][0]).dtype]
    words = f"{k} of {config.n_routed_experts}, {config.hidden_size}-{inner} {form}"
    needs = config.n_routed_experts * one
    return Case("routed_experts", "experts", words, needs, flops, EXPERTS, build, quantised, exact=True)


def _shared(scene: Scene) -> Case:
    config, tokens, prefix = scene.config, scene.tokens, "layers.0.ffn.shared_experts."
    parts = [scene.shapes.parts(prefix + name) for name in MATRICES]
    spec, quantised, limit = scene.shapes.spec(parts[0][0]), parts[0][1] is not None, config.swiglu_limit
    inner = spec.shape[0]
    flops = 6 * tokens * inner * config.hidden_size

    def through(expert: Operation) -> Operation:
        return lambda x, *matrices: expert(x, ExpertWeights(*matrices), limit, True)

    def build(scene: Scene) -> Work:
        matrices = [tensor for name in MATRICES for tensor in scene.matrix(prefix + name)]
        inputs = (scene.randn(tokens, config.hidden_size), *matrices)
        return Work(inputs, through(experts.shared_expert), through(experts_ref.shared_expert), flops)

    words = f"{config.hidden_size}-{inner} {FORMATS[spec.dtype]}"
    needs = scene.shapes.nbytes(name for pair in parts for name in pair if name)
    return Case("shared_expert", "experts", words, needs, flops, EXPERTS, build, quantised, exact=True)


def _both(scene: Scene, routed: Case, shared: Case) -> Case:
    """The routed experts and the shared one; one rank of several does not round what these add up."""
    limit, dtype = scene.config.swiglu_limit, DTYPE if scene.shapes.tp == 1 else torch.float32

    def through(mixture: Operation) -> Operation:
        def call(x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, *matrices: torch.Tensor) -> object:
            every, own = ExpertWeights(*matrices[:6]), ExpertWeights(*matrices[6:])
            return mixture(x, every, own, chosen, weights, limit, True, dtype)

        return call

    def build(scene: Scene) -> Work:
        many, one = routed.build(scene), shared.build(scene)
        own = one.arguments[1:]
        read = (many.read or 0) + sum(tensor.nbytes for tensor in own if tensor is not None)
        run, reference = through(experts.mixture), through(experts_ref.mixture)
        return Work((*many.arguments, *own), run, reference, many.flops + one.flops, read)

    words = f"{routed.shape}, and the shared expert"
    needs, cost = routed.needs + shared.needs, routed.cost + shared.cost
    return Case("mixture", "experts", words, needs, cost, EXPERTS, build, routed.quantised, exact=True)
