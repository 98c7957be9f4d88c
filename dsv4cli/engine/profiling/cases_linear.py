"""The linears over stored weights, as cases to measure."""

from collections.abc import Iterator

import torch

from dsv4cli.engine.profiling.bounds import FP32, ONE_ROUNDING
from dsv4cli.engine.profiling.case import FORMATS, Case, Operation, Rival, Tensors, Work
from dsv4cli.engine.profiling.scene import Scene
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
    shapes = scene.shapes
    block, sparse = "layers.0.", shapes.layer(ratio=4)
    names = [("wq_a", block), ("wq_b", block), ("wkv", block), ("wo_b", block)]
    for name, prefix in names:
        yield _linear(scene, name, f"{prefix}attn.{name}")
    yield _grouped(scene, f"{block}attn.wo_a")
    if sparse:
        yield _linear(scene, "index_wq_b", f"{sparse}attn.indexer.wq_b")
        yield _linear(scene, "weights_proj", f"{sparse}attn.indexer.weights_proj")
        yield _fp32_linear(scene, "compressor_wkv", f"{sparse}attn.compressor.wkv")
        yield _together(scene, f"{sparse}attn.")
    yield _fp32_linear(scene, "head", "head")


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


def _together(scene: Scene, prefix: str) -> Case:
    """All linears over the input of a CSA layer's attention."""
    shapes, tokens = scene.shapes, scene.tokens
    rounded, plain = (f"{prefix}wq_a", f"{prefix}wkv"), f"{prefix}indexer.weights_proj"
    fp32 = [f"{prefix}{part}compressor.{name}.weight" for part in ("", "indexer.") for name in ("wkv", "wgate")]
    names = [*(name for matrix in (*rounded, plain) for name in shapes.parts(matrix) if name), *fp32]
    rows = sum(shapes.spec(name).shape[0] for name in names if name.endswith("weight"))
    columns = scene.config.hidden_size
    flops = 2 * tokens * rows * columns

    def through(linears: Operation) -> Operation:
        def call(x: torch.Tensor, *matrices: torch.Tensor) -> Tensors:
            pairs = list(zip(matrices[0:6:2], matrices[1:6:2], strict=True))
            own = [pair for pair in pairs[:2] if pair[1] is not None]
            other = [pair for pair in pairs if not any(pair is one for one in own)]
            return tuple(y for part in linears(x, own, other, matrices[6:]) for y in part)

        return call

    def build(scene: Scene) -> Work:
        pairs = [tensor for matrix in (*rounded, plain) for tensor in scene.matrix(matrix)]
        inputs = (scene.randn(tokens, columns), *pairs, *(scene.weight(name) for name in fp32))
        return Work(inputs, through(gemm.linears), through(gemm_ref.linears), flops)

    needs = shapes.nbytes(names)
    return Case("attention_inputs", "gemm", f"{rows}x{columns}, seven matrices", needs, flops, ONE_ROUNDING, build)
