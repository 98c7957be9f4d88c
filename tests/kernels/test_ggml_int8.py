"""Products of one token or two with GGUF blocks on int8 tensor cores: in an interpreter of Gluon, and on a GPU."""

import operator

import numpy as np
import pytest
import torch

from dsv4cli.kernels import experts, gemm
from dsv4cli.kernels.card import BLACKWELL, HOPPER
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.experts.kernel import ggml as routed
from dsv4cli.kernels.ggml import int8
from dsv4cli.kernels.ggml.kernel import octets
from dsv4cli.kernels.ggml.kernel.int8_codes import table_of
from dsv4cli.kernels.ggml.types import TYPES
from dsv4cli.kernels.rows import exact_rows
from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix
from tests.kernels.test_experts import assert_close, routes, slow_experts
from tests.kernels.test_ggml_products import HOT, LIMIT, OTHERS, blocks, stacks, values_of
from tests.support.ggml_blocks import block_matrix
from tests.support.slow import slow, slow_rows

KINDS = [*HOT, "Q4_K", "Q6_K", *slow(*(kind for kind in OTHERS if kind not in ("F16", "Q4_K", "Q6_K")))]
# tiles of a program, warps of each, and groups of 32 columns of a pass, for 1,024 columns: whole blocks and parts of
# them, one pass and several
SHAPES = [(2, 2, 8), (1, 2, 4), *slow((2, 1, 8), (1, 4, 8), (2, 4, 2), (1, 8, 2), (1, 1, 8), (4, 1, 4))]


@pytest.fixture
def interpreted(triton_backend, monkeypatch):
    """Run the kernels in an interpreter, with all that is computed on the host.

    Return what each has loaded before it waits for the previous launch: the argument, and the load's cache modifier.
    """
    if triton_backend != "interpreter":
        pytest.skip("this interpreter runs on a CPU")
    from dsv4cli.kernels.experts.kernel import ggml_int8 as of_experts
    from dsv4cli.kernels.gemm.kernel import ggml_int8 as of_linears
    from tests.support.gluon_interpreter import Loads, run

    early = dict[str, set[tuple[str, str]]]()

    class Interpreted:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *given, num_warps, OVERLAP: self.launch(grid, given)

        def launch(self, grid, given):
            loads, name = Loads(), self.kernel.__name__
            run(self.kernel, grid, *given, True, early=loads)
            # rows of several matrices are loaded from a copy
            arguments = zip(self.kernel.arg_names, (*given, True), strict=True)
            names = {value.data_ptr(): one for one, value in arguments if isinstance(value, torch.Tensor)}
            found = {(names.get(address, "weights"), modifier) for address, modifier in loads}
            early.setdefault(name, set()).update(found)

    for module, name in ((of_linears, "_linears"), (of_experts, "_up"), (of_experts, "_down")):
        monkeypatch.setattr(module, name, Interpreted(getattr(module, name)))
    monkeypatch.setattr(int8, "takes_gluon", lambda device: True)
    return early


def uneven(tokens, width):
    """Return inputs with a few outliers."""
    return (torch.randn(tokens, width) * torch.exp(2 * torch.randn(tokens, width))).bfloat16()


def assert_exact(y, x, values, error=2.0**-22):
    """Inputs have an error of 2 ** -22 of the largest one, or of 2 ** -127; their products' sums are in fp32."""
    x, values = x.double(), values.double()
    rounding = (error * x.abs().amax(1, keepdim=True)).clamp(min=2.0**-127) * values.abs().sum(1)
    sums = 2.0**-21 * (x.abs() @ values.abs().T)
    assert ((y.double() - x @ values.T).abs() <= rounding + sums).all()


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_type(shape, kind, tokens, interpreted, monkeypatch):
    monkeypatch.setattr(int8, "shape", lambda *given: shape)
    matrix, x = blocks(kind, 20, 1024), uneven(tokens, 1024)
    assert_exact(gemm.linear_fp32(x, matrix), x, matrix.values())


def test_inputs_of_many_passes(interpreted, monkeypatch):
    # each warp divides 16 passes of two tokens, eight at once; of three programs, the last one lacks 26 of 32 rows
    monkeypatch.setattr(int8, "shape", lambda *given: (2, 1, 1))
    matrix, x = blocks("Q8_0", 70, 1024), uneven(2, 1024)
    assert_exact(gemm.linear_fp32(x, matrix), x, matrix.values())


def extreme_blocks(kind, columns):
    """Return blocks whose fields have one byte each, so that codes and their factors are the largest or smallest."""
    of, rng = TYPES[kind], np.random.default_rng(1)
    extremes = np.array([0, 0x7F, 0x80, 0xFF], np.uint8)
    fields = np.concatenate([np.stack([extremes] * len(of.fields), 1), rng.choice(extremes, (60, len(of.fields)))])
    raw = np.repeat(fields, np.diff(of.ends), 1)
    for offset in of.halves:
        raw[:, offset : offset + 2] = 0, 0x3C  # 1.0 in fp16
    if of.e8m0:
        raw[:, 0] = 128
    return block_matrix(torch.from_numpy(np.tile(raw, columns // of.values)), kind)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("kind", [*HOT, *(kind for kind in OTHERS if kind != "F16")])
def test_the_largest_sums(kind, sign, interpreted, monkeypatch):
    # in the first 256 columns, the lowest digit is always -128: these sums are the largest of each type
    monkeypatch.setattr(int8, "shape", lambda *given: (1, 1, 8))
    matrix, x = extreme_blocks(kind, 512), torch.full((2, 512), sign * 2.0**-14).bfloat16()
    x[:, 256] = 1
    assert_exact(gemm.linear_fp32(x, matrix), x, matrix.values())


@pytest.mark.parametrize("tokens", [1, 2])
def test_matrices_and_groups(tokens, interpreted):
    matrices, x = [blocks("Q8_0", 19, 96), blocks("Q4_0", 7, 96), blocks("Q8_0", 40, 96, seed=2)], uneven(tokens, 96)
    _, _, found = gemm.linears(x, (), (), matrices)
    for y, matrix in zip(found, matrices, strict=True):
        assert_exact(y, x, matrix.values())
    matrix, x = blocks("Q2_K", 3 * 12, 256), uneven(tokens * 3, 256).view(tokens, 3, 256)
    y = gemm.grouped_linear(x, matrix)
    for group in range(3):
        own = gemm.linear(x[:, group].contiguous(), BlockMatrix.of(matrix.weight[12 * group :][:12], "Q2_K"))
        torch.testing.assert_close(y[:, group], own, rtol=2**-7, atol=2**-7)


def test_the_warps_of_groups_do_not_depend_on_the_number_of_tokens(interpreted, monkeypatch):
    shapes, shape = list[tuple[int, ...]](), int8.shape
    monkeypatch.setattr(int8, "shape", lambda *given: (shapes.append(given), shape(*given))[1])
    for tokens in (1, 2):
        gemm.grouped_linear(torch.randn(tokens, 3, 64).bfloat16(), blocks("Q8_0", 3 * 20, 64))
    assert shapes == [(64, 3 * 2)] * 2


def test_inputs_have_22_bits(interpreted):
    matrix, x = blocks("Q8_0", 16, 64), torch.full((2, 64), 2.0**-21).bfloat16()
    x[0, 7], x[1, 63] = 1, -1.9921875  # the largest number below 2
    x[1, :63] *= 3
    assert_exact(gemm.linear_fp32(x, matrix), x, matrix.values(), error=0.0)


@pytest.mark.parametrize("largest", [0.0, 2.0**-120, 2.0**120, float("inf"), float("nan")])
def test_inputs_of_any_size(largest, interpreted):
    matrix, x = blocks("Q8_0", 16, 64), torch.randn(2, 64).clamp(-1, 1)
    x[0] *= min(abs(largest), 2.0**120) if largest == largest else 1.0
    x[0, 5] = largest
    x = x.bfloat16()
    first, second = gemm.linear_fp32(x, matrix)
    assert_exact(second[None], x[1:], matrix.values())  # whatever the other token has
    if abs(largest) < float("inf"):
        assert_exact(first[None], x[:1], matrix.values())
    else:
        assert first.isnan().all()


@pytest.mark.parametrize(("up", "down", "hidden", "inner"), [
    ("IQ2_XXS", "Q2_K", 512, 256), ("Q8_0", "Q4_0", 64, 40 * 32), *slow_rows(("Q4_K", "Q6_K", 256, 512)),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 2])
def test_experts(tokens, up, down, hidden, inner, interpreted):
    weights, chosen = stacks(up, down, 3, inner, hidden), routes(tokens, 3, 2)
    shared = ExpertWeights(*(matrix.row(0) for matrix in stacks("Q8_0", "Q8_0", 1, inner, hidden).matrices))
    x = torch.randn(tokens, hidden).bfloat16()
    y = experts.routed_experts(x, weights, *chosen, LIMIT, False)
    assert_close(y, slow_experts(x, values_of(weights), *chosen, LIMIT, False), False)
    both = experts.mixture(x, weights, shared, *chosen, LIMIT, False, torch.float32)
    assert_close(both - y, experts.ref.shared_expert(x, values_of(shared), LIMIT, False).double(), False)
    # experts in other rows, and each token alone
    order = torch.tensor([2, 0, 1])
    moved = [BlockMatrix.of(matrix.weight[order], matrix.block_type) for matrix in weights.matrices]
    elsewhere = ExpertWeights(*moved, order.argsort())
    for row in range(tokens):
        own = [one[row : row + 1] for one in (x, *chosen)]
        assert torch.equal(
            experts.mixture(own[0], elsewhere, shared, *own[1:], LIMIT, False, torch.float32)[0], both[row]
        )


def test_an_expert_that_is_chosen_several_times(interpreted):
    weights, x = stacks("Q8_0", "Q4_0", 3, 64, 64), torch.randn(2, 64).bfloat16()
    chosen = torch.tensor([[2, 2, 0], [2, 2, 2]]), torch.rand(2, 3) + 0.1
    y = experts.routed_experts(x, weights, *chosen, 0.0, False)
    assert_close(y, slow_experts(x, values_of(weights), *chosen, 0.0, False), False)


@pytest.mark.parametrize("tokens", [1, 2])
def test_experts_of_programs_with_two_tiles(tokens, interpreted, monkeypatch):
    # four programs of w1 and w3, and of w2
    monkeypatch.setattr(int8, "shape", lambda *given: (2, 1, 1))
    weights, x, chosen = stacks("Q8_0", "Q4_0", 3, 64, 128), torch.randn(tokens, 128).bfloat16(), routes(tokens, 3, 2)
    shared = ExpertWeights(*(matrix.row(0) for matrix in stacks("Q8_0", "Q8_0", 1, 64, 128).matrices))
    both = experts.mixture(x, weights, shared, *chosen, LIMIT, False, torch.float32)
    expected = slow_experts(x, values_of(weights), *chosen, LIMIT, False)
    assert_close(both, expected + experts.ref.shared_expert(x, values_of(shared), LIMIT, False).double(), False)


def test_loads_before_the_wait_bypass_the_cache_unless_they_are_of_weights(interpreted):
    # the previous launch is the router's last one, which x precedes; the one before w2's is that of w1 and w3
    weights, x = stacks("Q8_0", "Q4_0", 3, 32, 32), torch.randn(2, 32).bfloat16()
    shared = ExpertWeights(*(matrix.row(0) for matrix in stacks("Q8_0", "Q4_0", 1, 32, 32).matrices))
    experts.mixture(x, weights, shared, *routes(2, 3, 2), LIMIT, False, torch.float32)
    gemm.linear(x, weights.w1.row(0))
    tiles = {(name, ".cg") for name in ("tile_row", "order", "tile_start", "tile_size")}
    assert interpreted == {
        "_up": {("x", ".cg"), ("weights", "")},
        "_down": {*tiles, ("w2", ""), ("own_w2", "")},
        "_linears": {("weights", "")},
    }


def test_rounded_inputs(interpreted):
    weights, chosen = stacks("Q8_0", "Q8_0", 1, 128, 128), routes(1, 1, 1)
    x = torch.randn(1, 128).bfloat16()
    y = experts.routed_experts(x, weights, *chosen, LIMIT, True)
    assert_close(y, slow_experts(x, values_of(weights), *chosen, LIMIT, True), True)


def test_a_mixture_has_these_launches_where_they_are_supported(interpreted, monkeypatch):
    from dsv4cli.kernels.experts.kernel import ggml_int8

    launched, shapes, outputs, shape = list[int](), list[tuple[int, ...]](), ggml_int8.outputs, int8.shape
    monkeypatch.setattr(ggml_int8, "outputs", lambda *given: (launched.append(len(given[0])), outputs(*given))[1])
    monkeypatch.setattr(int8, "shape", lambda *given: (shapes.append(given), shape(*given))[1])
    weights = stacks("Q8_0", "Q4_0", 2, 32, 32)
    shared = ExpertWeights(*(matrix.row(0) for matrix in weights.matrices))
    for tokens in (1, 2, 3):
        given = weights, shared, *routes(tokens, 2, 2), LIMIT, False, torch.bfloat16
        experts.mixture(torch.randn(tokens, 32).bfloat16(), *given)
    assert launched == [1, 2]
    # two tokens have more tiles, but the order of a token's sums does not depend on the other
    assert shapes[:2] == shapes[2:]
    monkeypatch.setattr(int8, "takes_gluon", lambda device: False)
    experts.mixture(torch.randn(1, 32).bfloat16(), weights, shared, *routes(1, 2, 2), LIMIT, False, torch.bfloat16)
    assert launched == [1, 2]


@pytest.mark.parametrize("kind", ["IQ3_S", "IQ4_NL"])
def test_tables_are_dropped_together(kind):
    def tables():
        blocks_of_kind = octets.blocks_of(blocks(kind, 8, 256))
        return blocks_of_kind.table, table_of(blocks_of_kind)

    before = tables()
    assert all(map(operator.is_, before, tables()))
    octets.forget_tables()
    assert not any(map(operator.is_, before, tables()))


def test_codebooks_are_aligned_to_their_size(triton_backend):
    # the kernel replaces an addition to their address by a bitwise or; the interpreter's memory begins at 0
    for kind in ("IQ2_XXS", "IQ2_XS", "IQ2_S"):
        octets.forget_tables()
        table = octets.packed_codebook(kind, "cpu")
        assert table.data_ptr() % table.nbytes == 0


def test_what_the_kernel_supports(monkeypatch, triton_backend):
    monkeypatch.setattr(int8, "takes_gluon", lambda device: True)
    x, alike = torch.zeros(2, 256).bfloat16(), stacks("Q8_0", "Q4_0", 2, 256, 256)
    assert routed.takes_int8(x, alike)
    assert routed.takes_int8(x, alike, stacks("Q4_K", "Q4_K", 2, 256, 256))
    others = [
        ExpertWeights(alike.w1, alike.w2, blocks("Q4_0", 2, 256, 256)),
        ExpertWeights(*(StoredMatrix(matrix.values()) for matrix in alike.matrices)),
        stacks("F16", "F16", 2, 256, 256),
    ]
    assert not any(routed.takes_int8(x, one) for one in others)
    assert not routed.takes_int8(x, alike, stacks("Q8_0", "Q8_0", 1, 128, 256))
    # parts of other matrices, whose tiles may have fewer rows
    low = [BlockMatrix.of(matrix.weight, matrix.block_type, 4) for matrix in alike.matrices]
    assert routed.takes_int8(x, ExpertWeights(low[0], alike.w2, low[2]))
    assert not routed.takes_int8(x, ExpertWeights(low[0], *alike.matrices[1:]))
    assert not any(int8.takes(one, 256) for one in (x.float(), torch.zeros(3, 256).bfloat16(), x[:0]))
    assert int8.takes(x, 16_384)
    assert not any(int8.takes(x, width) for width in (40, 16_384 + 32))
    for inner, hidden in ((32, 16_384 + 32), (16_384 + 32, 32)):
        assert not routed.takes_int8(torch.zeros(1, hidden).bfloat16(), stacks("Q8_0", "Q8_0", 1, inner, hidden))
    with exact_rows(True):
        assert not int8.takes(x, 256)


def test_warps_divide_the_groups():
    for width, tiles in ((64, 1), (96, 1), (1536, 3000), (7168, 100), (4096, 1792), (3072, 448 * 7), (768, 2049)):
        of_program, parts, each = int8.shape(width, tiles)
        assert width % (32 * of_program * parts * each) == 0
    # all warps run at once
    assert int8.shape(4096, 128) == (1, 16, 8)
    assert int8.shape(4096, 129) == (2, 8, 8)
    assert int8.shape(8192, 128) == (1, 16, 8)
    assert int8.shape(256, 2049) == (1, 1, 8)
    assert int8.shape(4096, 1792) == (2, 1, 8)
    # the programs of experts have all their rows
    assert int8.GROUP % (int8.TILES * int8.ROWS) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2])
def test_on_a_gpu(tokens, triton_backend, monkeypatch):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        for kind in (*HOT, *OTHERS):
            matrix, x = blocks(kind, 40, 1024), uneven(tokens, 1024)
            assert_exact(gemm.linear_fp32(x, matrix), x, matrix.values())
        for up, down in (("IQ2_XXS", "Q2_K"), ("Q4_K", "Q6_K"), ("IQ3_S", "IQ4_XS")):
            weights, chosen = stacks(up, down, 8, 2048, 4096), routes(tokens, 8, 6)
            shared = ExpertWeights(*(one.row(0) for one in stacks("Q8_0", "Q8_0", 1, 2048, 4096).matrices))
            x = torch.randn(tokens, 4096).bfloat16()
            assert routed.takes_int8(x, weights, shared)
            y = experts.routed_experts(x, weights, *chosen, LIMIT, False)
            expected = experts.ref.routed_experts(x, values_of(weights), *chosen, LIMIT, False)
            assert_close(y, expected.double(), False)
            both = experts.mixture(x, weights, shared, *chosen, LIMIT, False, torch.float32)
            own = experts.ref.shared_expert(x, values_of(shared), LIMIT, False).double()
            assert_close(both, expected.double() + own, False)
