"""The linears over stored weights, as cases to measure."""

from collections.abc import Iterator, Sequence
from types import ModuleType

import torch

from dsv4cli.engine.profiling.bounds import FP32, ONE_ROUNDING
from dsv4cli.engine.profiling.case import FORMATS, Case, Operation, Rival, Tensors, Work
from dsv4cli.engine.profiling.inputs import Scene
from dsv4cli.kernels import gemm
from dsv4cli.kernels.block_scale import ref as block_scale_ref
from dsv4cli.kernels.gemm import ref as gemm_ref

# the same values in bf16, as torch's own matrix product takes them
MATMUL = Rival(
    "torch.mm bf16",
    lambda x, weight, scale=None: (x.bfloat16(), block_scale_ref.dequantise(weight, scale).bfloat16().t()),
    torch.mm,
)


def linears(scene: Scene) -> Iterator[Case]:
    block, csa = "layers.0.", scene.shapes.layer(ratio=4)
    for name in ("wq_a", "wq_b", "wkv", "wo_b"):
        yield _linear(scene, name, f"{block}attn.{name}")
    yield _grouped(scene, f"{block}attn.wo_a")
    if csa:
        yield _linear(scene, "index_wq_b", f"{csa}attn.indexer.wq_b")
        yield _linear(scene, "weights_proj", f"{csa}attn.indexer.weights_proj")
        yield _fp32_linear(scene, "compressor_wkv", f"{csa}attn.compressor.wkv")
    yield from _joint(scene)
    yield _fp32_linear(scene, "head", "head")


def _joint(scene: Scene) -> Iterator[Case]:
    """What the model computes in one call: all linears over an attention's input, and over its latent queries."""
    csa, hca = scene.shapes.layer(ratio=4), scene.shapes.layer(ratio=128)
    if csa:
        stored = [f"{csa}attn.{name}" for name in ("wq_a", "wkv", "indexer.weights_proj")]
        rows = [f"{csa}attn.{part}compressor.{name}" for part in ("", "indexer.") for name in ("wkv", "wgate")]
        yield _together(scene, "inputs_csa", stored, rows)
    if hca:
        stored = [f"{hca}attn.{name}" for name in ("wq_a", "wkv")]
        rows = [f"{hca}attn.compressor.{name}" for name in ("wkv", "wgate")]
        yield _together(scene, "inputs_hca", stored, rows)
    yield _together(scene, "normed_wq_b", ["layers.0.attn.wq_b"], norm="layers.0.attn.q_norm.weight")
    if csa:
        stored = [f"{csa}attn.{name}" for name in ("wq_b", "indexer.wq_b")]
        yield _together(scene, "normed_wq_b_index", stored, norm=f"{csa}attn.q_norm.weight")


def _linear(scene: Scene, name: str, matrix: str) -> Case:
    """A linear over a stored matrix; of a quantised one with the rounding of its input."""
    weight, scale = scene.shapes.parts(matrix)
    spec, tokens = scene.shapes.spec(weight), scene.tokens
    rows, columns = spec.shape[0], spec.columns or spec.shape[1]

    def build(scene: Scene) -> Work:
        inputs, flops = (scene.randn(tokens, columns), *scene.matrix(matrix)), 2 * tokens * rows * columns
        if scale is None:
            return Work(inputs, gemm.linear, gemm_ref.linear, flops, rival=MATMUL)
        return Work(inputs, gemm.rounded_linear, gemm_ref.rounded_linear, flops, rival=MATMUL)

    return Case(
        name,
        "gemm",
        f"{rows}x{columns} {FORMATS[spec.dtype]}",
        scene.shapes.nbytes(filter(None, (weight, scale))),
        2 * tokens * rows * columns,
        ONE_ROUNDING,
        build,
        quantised=scale is not None,
    )


def _fp32_linear(scene: Scene, name: str, matrix: str) -> Case:
    weight, tokens = f"{matrix}.weight", scene.tokens
    spec = scene.shapes.spec(weight)
    rows, columns = spec.shape
    flops = 2 * tokens * rows * columns

    def build(scene: Scene) -> Work:
        inputs = (scene.randn(tokens, columns), scene.weight(weight))
        return Work(inputs, gemm.linear_fp32, gemm_ref.linear_fp32, flops, rival=MATMUL)

    shape = f"{rows}x{columns} {FORMATS[spec.dtype]}, fp32 out"
    return Case(name, "gemm", shape, scene.shapes.nbytes([weight]), flops, FP32, build)


def _grouped(scene: Scene, matrix: str) -> Case:
    weight, scale = scene.shapes.parts(matrix)
    spec, tokens, groups = scene.shapes.spec(weight), scene.tokens, scene.config.o_groups
    rows, columns = spec.shape[0], spec.columns
    flops = 2 * tokens * rows * columns

    def build(scene: Scene) -> Work:
        inputs = (scene.randn(tokens, groups, columns), *scene.matrix(matrix))
        return Work(inputs, gemm.grouped_linear, gemm_ref.grouped_linear, flops)

    shape = f"{groups} groups of {rows // groups}x{columns} {FORMATS[spec.dtype]}"
    needs = scene.shapes.nbytes(filter(None, (weight, scale)))
    return Case("wo_a", "gemm", shape, needs, flops, ONE_ROUNDING, build, quantised=scale is not None)


def _together(
    scene: Scene, name: str, stored: Sequence[str], fp32: Sequence[str] = (), norm: str | None = None
) -> Case:
    """Several matrices over one input, or over its norm; fp32: those whose sums are not rounded."""
    shapes, tokens, eps = scene.shapes, scene.tokens, scene.config.rms_norm_eps
    others = [*(f"{matrix}.weight" for matrix in fp32), *([norm] if norm else [])]
    weights, scales = zip(*(shapes.parts(matrix) for matrix in stored), strict=True)
    rows = sum(shapes.spec(f"{matrix}.weight").shape[0] for matrix in (*stored, *fp32))
    columns = shapes.spec(weights[0]).columns or shapes.spec(weights[0]).shape[1]
    flops = 2 * tokens * rows * columns

    def through(family: ModuleType) -> Operation:
        def call(x: torch.Tensor, *tensors: torch.Tensor) -> Tensors:
            matrices, rest = tensors[: 2 * len(stored)], tensors[2 * len(stored) :]
            pairs = list(zip(matrices[::2], matrices[1::2], strict=True))
            rounded = [pair for pair in pairs if pair[1] is not None]
            plain = [pair for pair in pairs if pair[1] is None]
            if norm:
                parts = family.normed_linears(x, *rest, eps, rounded, plain)
            else:
                parts = family.linears(x, rounded, plain, rest)
            return tuple(y for part in parts for y in part)

        return call

    def build(scene: Scene) -> Work:
        pairs = [tensor for matrix in stored for tensor in scene.matrix(matrix)]
        inputs = (scene.randn(tokens, columns), *pairs, *(scene.weight(other) for other in others))
        return Work(inputs, through(gemm), through(gemm_ref), flops)

    count, needs = len(stored) + len(fp32), shapes.nbytes(filter(None, (*weights, *scales, *others)))
    words = f"{'norm, ' if norm else ''}{rows}x{columns} in {count} {'matrices' if count > 1 else 'matrix'}"
    # in fp32 a norm would not be rounded before the linears round it to FP8
    quantised, exact = bool(scales[0]) and not fp32, norm is not None
    return Case(name, "gemm", words, needs, flops, ONE_ROUNDING, build, quantised, exact)
