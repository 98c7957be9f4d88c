"""Benchmark cases: the linears over stored weights."""

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from dsv4cli.engine.checkpoint.values import words_of
from dsv4cli.engine.config.layer_kind import CSA, HCA
from dsv4cli.engine.profiling.bounds import FP32, ONE_ROUNDING
from dsv4cli.engine.profiling.case import Case, Competitor, Operation, Tensors, Work, stored_matrices
from dsv4cli.engine.profiling.inputs import BenchmarkInputs
from dsv4cli.kernels import gemm
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.gemm import ref as gemm_ref
from dsv4cli.kernels.stored_matrix import StoredMatrix

# the same values in bf16, the dtype that torch.mm supports
MATMUL = Competitor(
    "torch.mm bf16",
    lambda x, weight, scale=None, *_: (x.bfloat16(), block_scale_ref.dequantise(weight, scale).bfloat16().t()),
    torch.mm,
)


def linears(bench: BenchmarkInputs) -> Iterator[Case]:
    block, csa = "layers.0.", bench.shapes.layer(ratio=CSA)
    for name in ("wq_a", "wq_b", "wkv", "wo_b"):
        yield _linear(bench, name, f"{block}attn.{name}")
    yield _grouped(bench, f"{block}attn.wo_a")
    if csa:
        yield _linear(bench, "index_wq_b", f"{csa}attn.indexer.wq_b")
        yield _linear(bench, "weights_proj", f"{csa}attn.indexer.weights_proj")
        yield _fp32_linear(bench, "compressor_wkv", f"{csa}attn.compressor.wkv")
    yield from _joint(bench)
    yield _fp32_linear(bench, "head", "head")


def _joint(bench: BenchmarkInputs) -> Iterator[Case]:
    """Yield the linears that the model fuses into one call: over the attention's input, and over its latent queries."""
    csa, hca = bench.shapes.layer(ratio=CSA), bench.shapes.layer(ratio=HCA)
    if csa:
        stored = [f"{csa}attn.{name}" for name in ("wq_a", "wkv", "indexer.weights_proj")]
        rows = [f"{csa}attn.{part}compressor.{name}" for part in ("", "indexer.") for name in ("wkv", "wgate")]
        yield _together(bench, "inputs_csa", stored, rows)
    if hca:
        stored = [f"{hca}attn.{name}" for name in ("wq_a", "wkv")]
        rows = [f"{hca}attn.compressor.{name}" for name in ("wkv", "wgate")]
        yield _together(bench, "inputs_hca", stored, rows)
    yield _together(bench, "normed_wq_b", ["layers.0.attn.wq_b"], norm="layers.0.attn.q_norm.weight")
    if csa:
        stored = [f"{csa}attn.{name}" for name in ("wq_b", "indexer.wq_b")]
        yield _together(bench, "normed_wq_b_index", stored, norm=f"{csa}attn.q_norm.weight")


def _linear(bench: BenchmarkInputs, name: str, matrix: str) -> Case:
    """Return the case of a linear over a stored matrix. If it is quantized, its input is rounded as well."""
    weight, scale = bench.shapes.parts(matrix)
    spec, tokens = bench.shapes.spec(weight), bench.tokens
    rows, columns = spec.shape[0], spec.columns or spec.shape[1]

    def build(bench: BenchmarkInputs) -> Work:
        inputs, flops = (bench.randn(tokens, columns), *bench.matrix(matrix)), 2 * tokens * rows * columns
        if scale is None:
            return Work(inputs, _over(gemm.linear), _over(gemm_ref.linear), flops, rival=MATMUL)
        return Work(inputs, _over(gemm.rounded_linear), _over(gemm_ref.rounded_linear), flops, rival=MATMUL)

    return Case(
        name,
        "gemm",
        f"{rows}x{columns} {words_of(spec)}",
        bench.shapes.nbytes(filter(None, (weight, scale))),
        2 * tokens * rows * columns,
        ONE_ROUNDING,
        build,
        quantised=scale is not None,
    )


def _over(linear: Operation) -> Operation:
    """Return a linear as an operation on an input and the parts of one matrix."""
    return lambda x, *parts: linear(x, *stored_matrices(parts))


def _fp32_linear(bench: BenchmarkInputs, name: str, matrix: str) -> Case:
    weight, tokens = f"{matrix}.weight", bench.tokens
    spec = bench.shapes.spec(weight)
    rows, columns = spec.shape
    flops = 2 * tokens * rows * columns

    def build(bench: BenchmarkInputs) -> Work:
        inputs = (bench.randn(tokens, columns), bench.weight(weight))
        return Work(inputs, _over(gemm.linear_fp32), _over(gemm_ref.linear_fp32), flops, rival=MATMUL)

    shape = f"{rows}x{columns} {words_of(spec)}, fp32 out"
    return Case(name, "gemm", shape, bench.shapes.nbytes([weight]), flops, FP32, build)


def _grouped(bench: BenchmarkInputs, matrix: str) -> Case:
    weight, scale = bench.shapes.parts(matrix)
    spec, tokens, groups = bench.shapes.spec(weight), bench.tokens, bench.config.o_groups
    rows, columns = spec.shape[0], spec.columns
    flops = 2 * tokens * rows * columns

    def build(bench: BenchmarkInputs) -> Work:
        inputs = (bench.randn(tokens, groups, columns), *bench.matrix(matrix))
        return Work(inputs, _over(gemm.grouped_linear), _over(gemm_ref.grouped_linear), flops)

    shape = f"{groups} groups of {rows // groups}x{columns} {words_of(spec)}"
    needs = bench.shapes.nbytes(filter(None, (weight, scale)))
    return Case("wo_a", "gemm", shape, needs, flops, ONE_ROUNDING, build, quantised=scale is not None)


def _together(
    bench: BenchmarkInputs, name: str, stored: Sequence[str], fp32: Sequence[str] = (), norm: str | None = None
) -> Case:
    """Return the case of several matrices over one input, or over its norm.

    Args:
        stored: matrices in their checkpoint format.
        fp32: matrices whose outputs stay in fp32.
        norm: weight of the RMSNorm to apply to the input first.
    """
    shapes, tokens, eps = bench.shapes, bench.tokens, bench.config.rms_norm_eps
    others = [*(f"{matrix}.weight" for matrix in fp32), *([norm] if norm else [])]
    weights, scales = zip(*(shapes.parts(matrix) for matrix in stored), strict=True)
    rows = sum(shapes.spec(f"{matrix}.weight").shape[0] for matrix in (*stored, *fp32))
    columns = shapes.spec(weights[0]).columns or shapes.spec(weights[0]).shape[1]
    flops = 2 * tokens * rows * columns

    def through(family: ModuleType) -> Operation:
        def call(x: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
            first_other = len(tensors) - len(others)
            matrices, rest = stored_matrices(tensors[:first_other]), tensors[first_other:]
            rounded = [matrix for matrix in matrices if matrix.scale is not None]
            plain = [matrix for matrix in matrices if matrix.scale is None]
            if norm:
                parts = family.normed_linears(x, *rest, eps, rounded, plain)
            else:
                parts = family.linears(x, rounded, plain, [StoredMatrix(weight) for weight in rest])
            return tuple(y for part in parts for y in part)

        return call

    def build(bench: BenchmarkInputs) -> Work:
        parts = [tensor for matrix in stored for tensor in bench.matrix(matrix)]
        inputs = (bench.randn(tokens, columns), *parts, *(bench.weight(other) for other in others))
        return Work(inputs, through(gemm), through(gemm_ref), flops)

    count, needs = len(stored) + len(fp32), shapes.nbytes(filter(None, (*weights, *scales, *others)))
    words = f"{'norm, ' if norm else ''}{rows}x{columns} in {count} {'matrices' if count > 1 else 'matrix'}"
    # an fp32 reference would not round the norm's output to bf16 before it is rounded to FP8
    quantised, exact = bool(scales[0]) and not fp32, norm is not None
    return Case(name, "gemm", words, needs, flops, ONE_ROUNDING, build, quantised, exact)
