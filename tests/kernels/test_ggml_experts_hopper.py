"""Experts of many tokens over GGUF blocks on Hopper: in an interpreter of Gluon, and on a GPU for every type."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4cli.kernels import experts
from dsv4cli.kernels.card import BLACKWELL, HOPPER
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.experts.kernel import ggml_hopper, many_tokens
from dsv4cli.kernels.experts.kernel.ggml_stages import LINES, STEP, _decoded, _lines, _stored
from dsv4cli.kernels.ggml.kernel.fp16 import row_shifts
from dsv4cli.kernels.ggml.kernel.octets import blocks_of, has_offset
from dsv4cli.kernels.stored_matrix import BlockMatrix, StoredMatrix
from tests.kernels.test_experts import routes
from tests.kernels.test_ggml_products import HOT, LIMIT, OTHERS, blocks, stacks, values_of
from tests.support.slow import slow_rows

# pairs of four experts: more than a tile, and one more than each width of products
COUNTS = (270, 193, 129, 66)
SMALLEST, SMALL, LARGE = (256, 256), (512, 256), (1024, 1024)
# whole rows in one kernel, single octets in the other
CASES = [("IQ2_XXS", "Q2_K", *LARGE), ("IQ3_XXS", "MXFP4", *SMALL)]
MORE = [("IQ2_XXS", "Q2_K", *SMALL), ("IQ3_XXS", "MXFP4", *LARGE), ("IQ2_XXS", "Q6_K", *SMALLEST)] + [
    (up, down, *widths)
    for up, down in [("Q8_0", "Q6_K"), ("Q4_K", "Q3_K"), ("Q5_K", "IQ4_XS"), ("Q4_0", "Q5_0"), ("IQ4_NL", "IQ2_XS"),
                     ("IQ2_S", "IQ3_S")]
    for widths in (SMALL, LARGE)
]  # fmt: skip
KINDS = [kind for kind in (*HOT, *OTHERS) if kind != "F16"]


def rounded_once(matrix):
    """Return the values of a matrix as fp16 numbers times a power of two for each row."""
    factor = 2.0 ** row_shifts(blocks_of(matrix), matrix.columns).double()[..., None]
    return StoredMatrix(((matrix.values().double() * factor).half() / factor).float())


def uneven():
    """Return the experts and routing weights of tokens, so that expert e has COUNTS[e] pairs."""
    chosen = torch.repeat_interleave(torch.arange(len(COUNTS)), torch.tensor(COUNTS))
    chosen = chosen[torch.randperm(len(chosen))].view(2, -1).T.contiguous()
    return chosen, torch.rand(chosen.shape)


def assert_close(y, weights, x, chosen, routing, *, rounded=False):
    def error(values):
        expected = experts.ref.routed_experts(x, values, chosen, routing, LIMIT, rounded).double()
        difference = y.double() - expected
        return difference.norm() / expected.norm(), (difference.norm(dim=1) / expected.norm(dim=1)).max()

    # inner values and outputs are rounded to bf16, and products to within 2 ** -10; rounded to FP8, inner values may
    # become the next code, 2 ** -4 away
    whole, row = error(values_of(weights))
    assert whole <= (2**-7 if rounded else 2**-8)
    assert row <= (2**-5 if rounded else 2**-7)
    if not any(has_offset(matrix.block_type) for matrix in weights.matrices):
        # with the kernel's own values, only sums differ, by their order
        assert error(ExpertWeights(*map(rounded_once, weights.matrices)))[0] <= 2**-10


@gluon.jit
def decoded_step(weight, shifts, table, out, K: gl.constexpr, KIND: gl.constexpr, NUMBER: gl.constexpr):
    lane = gl.expand_dims(gl.arange(0, 4), 0)
    rows, factor = _lines(weight, weight, (shifts, shifts), gl.program_id(0), 0, LINES, K, False, KIND)
    found = _decoded(_stored(rows, 0, lane, K, KIND, NUMBER), lane, table, factor, KIND, NUMBER)
    place = gl.expand_dims(gl.arange(0, LINES) * (STEP // 2), 1) + gl.expand_dims(gl.arange(0, STEP // 2), 0)
    gl.store(out + place, found)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_rounded_once_or_twice(kind, triton_backend):
    if triton_backend != "interpreter":
        pytest.skip("this interpreter runs on a CPU")
    from tests.support.gluon_interpreter import run

    matrix = blocks(kind, 128, 256)
    stored, line = blocks_of(matrix), torch.arange(128)
    shifts = row_shifts(stored, 256)
    row = line // 16 * 16 + line % 8 * 2 + line // 8 % 2
    exact = (matrix.values().double() * 2.0 ** shifts.double()[:, None])[row].view(128, 4, 64)
    for step in range(4):
        words = torch.zeros(128, 32, dtype=torch.int32)
        run(decoded_step, 1, stored.rows, shifts, stored.table, words, 256, kind, step)
        found = words.view(torch.float16).view(128, 16, 4)[:, :, [0, 2, 1, 3]].reshape(128, 64).double()
        error, size = (found - exact[:, step]).abs(), exact[:, step].abs()
        # subnormal numbers have a fixed error
        assert (error <= size * 2.0 ** (-10 if has_offset(kind) else -11) + 2.0**-24).all()


@pytest.mark.parametrize(("up", "down", "hidden", "inner"), [*CASES, *slow_rows(*MORE)])
def test_in_an_interpreter(up, down, hidden, inner, triton_backend, monkeypatch):
    """The kernel's arithmetic and its barriers; layouts are the compiler's."""
    if triton_backend != "interpreter":
        pytest.skip("this interpreter runs on a CPU")
    from dsv4cli.kernels.experts.kernel import ggml_wgmma
    from tests.support.gluon_interpreter import Descriptor, run

    class Products:
        def __getitem__(self, grid):
            return lambda *arguments, num_warps: run(products, 2, *arguments)

    products = ggml_wgmma._products
    monkeypatch.setattr(ggml_wgmma, "_products", Products())
    monkeypatch.setattr(ggml_wgmma, "gluon_described", Descriptor)
    weights, (chosen, routing) = stacks(up, down, 4, inner, hidden), uneven()
    x = torch.randn(len(chosen), hidden).bfloat16()
    # as in a release, the inputs of MXFP4 experts are rounded
    rounded = down == "MXFP4"
    outputs = ggml_hopper.routed_outputs(x, weights, chosen, routing, LIMIT, rounded)
    assert_close(many_tokens.ordered_sum(outputs, chosen), weights, x, chosen, routing, rounded=rounded)


def test_which_experts_the_kernel_supports(monkeypatch):
    monkeypatch.setattr(ggml_hopper, "takes_gluon", lambda device: True)
    x, alike = torch.zeros(1, 256).bfloat16(), stacks("Q8_0", "Q4_0", 2, 256, 256)
    assert ggml_hopper.suits(x, alike, 2 * ggml_hopper.FEW + 1)
    mixed = ExpertWeights(alike.w1, alike.w2, blocks("Q4_0", 2, 256, 256))
    others = [
        mixed,
        stacks("Q8_0", "Q8_0", 2, 128, 256),
        stacks("Q8_0", "Q8_0", 2, 256, 128),
        stacks("F16", "F16", 2, 256, 256),
    ]
    assert not any(ggml_hopper.suits(x, one, 1000) for one in others)
    assert not ggml_hopper.suits(x, alike, 2 * ggml_hopper.FEW)
    assert not ggml_hopper.suits(x.float(), alike, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("up", "down"), [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q6_K"), ("Q5_K", "Q8_0"), ("IQ3_XXS", "IQ4_XS")]
)
@pytest.mark.parametrize("tokens", [16, 300])
def test_experts_of_flash(tokens, up, down, triton_backend):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        weights, (chosen, routing) = stacks(up, down, 8, 2048, 4096), routes(tokens, 8, 6)
        x = torch.randn(tokens, 4096).bfloat16()
        assert ggml_hopper.suits(x, weights, chosen.numel())
        assert_close(experts.routed_experts(x, weights, chosen, routing, LIMIT, False), weights, x, chosen, routing)


@pytest.mark.gpu
@pytest.mark.parametrize(("up", "down"), [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q6_K"), ("IQ2_XXS", "Q6_K")])
@pytest.mark.parametrize("tokens", [8, 30, 80, 400])
def test_experts_of_the_smallest_width(tokens, up, down, triton_backend):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        weights, (chosen, routing) = stacks(up, down, 3, *SMALLEST), routes(tokens, 3, 2)
        x = torch.randn(tokens, SMALLEST[0]).bfloat16()
        assert ggml_hopper.suits(x, weights, chosen.numel())
        assert_close(experts.routed_experts(x, weights, chosen, routing, LIMIT, False), weights, x, chosen, routing)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("hidden", "inner"), [(1024, 1024), (512, 768)])
def test_every_type(kind, hidden, inner, triton_backend):
    if triton_backend == "interpreter" or not HOPPER <= torch.cuda.get_device_capability() < BLACKWELL:
        pytest.skip("for Hopper")
    with torch.device("cuda"):
        weights, (chosen, routing) = stacks(kind, kind, 4, inner, hidden), uneven()
        x = torch.randn(len(chosen), hidden).bfloat16() * torch.logspace(-2, 1, len(chosen))[:, None].bfloat16()
        order = torch.tensor([2, 0, 3, 1])
        moved = [BlockMatrix.of(one.weight[order], kind) for one in weights.matrices]
        elsewhere = ExpertWeights(*moved, order.argsort())
        assert ggml_hopper.suits(x, elsewhere, chosen.numel())
        y = experts.routed_experts(x, elsewhere, chosen, routing, LIMIT, False)
        assert_close(y, weights, x, chosen, routing)
        assert torch.equal(experts.routed_experts(x, elsewhere, chosen, routing, LIMIT, False), y)
