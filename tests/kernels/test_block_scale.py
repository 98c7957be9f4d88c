"""Block scales against pure Python: the formats' values listed one by one, scales from logarithms."""

import math

import pytest
import torch

import dsv4cli.kernels.block_scale
from dsv4cli.kernels.block_scale import dequantise, fp4_codes, fp4_round, fp8_codes, fp8_round, hadamard, ref
from dsv4cli.kernels.block_scale.ref import block_scale
from tests.support.slow import slow, slow_rows

# magnitudes by code, as the formats define them: 4 exponent and 3 mantissa bits (bias 7), 2 and 1 (bias 1)
E4M3 = [(m / 8 * 2**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7)) for e in range(16) for m in range(8)][:127]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
SHAPES = [(0, 128), (1, 128), (7, 128), (3, 5, 192), (65, 64)]


def nearest(value: float, magnitudes: list[float]) -> float:
    """The nearest value of the format, of two equally near the one with the even code."""
    code = min(range(len(magnitudes)), key=lambda i: (abs(magnitudes[i] - abs(value)), i % 2))
    return math.copysign(magnitudes[code], value)


def slow_round(row: list[float], block: int, magnitudes: list[float], floor: float) -> list[float]:
    result = []
    for start in range(0, len(row), block):
        values = row[start : start + block]
        amax = max(floor, *map(abs, values))
        scale = 2.0 ** math.ceil(math.log2(amax / magnitudes[-1]))
        result += [nearest(value / scale, magnitudes) * scale for value in values]
    return result


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.bfloat16) for shape in SHAPES),
        *slow_rows(*((shape, torch.float32) for shape in SHAPES[:-1])),
        (SHAPES[-1], torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("fast", "block", "magnitudes", "floor"),
    [(fp8_round, 64, E4M3, 1e-4), (fp4_round, 32, E2M1, 6 * 2.0**-126)],
    ids=["fp8", "fp4"],
)
def test_rounding_is_the_definition(fast, block, magnitudes, floor, shape, dtype):
    # blocks of all sizes, from far below the floor of FP8 up
    x = (torch.randn(shape) * torch.logspace(-8, 3, shape[-1])).to(dtype)
    rounded = fast(x, block)
    expected = [slow_round(row, block, magnitudes, floor) for row in x.reshape(-1, shape[-1]).tolist()]
    assert (rounded.shape, rounded.dtype) == (x.shape, dtype)
    assert torch.equal(rounded.double().view(-1, shape[-1]), torch.tensor(expected).double().view(-1, shape[-1]))
    assert torch.equal(rounded, rounded.bfloat16().to(dtype))
    assert torch.equal(fast(rounded, block), rounded)


# a block that begins so, zeros behind; what it becomes (a scale of 1, then of 2)
FP8_EXAMPLES = [
    ([448, 1, 0.3, -17.3], [448, 1, 0.3125, -18]),
    ([449, 1, 0.3, -17.3], [448, 1, 0.3125, -18]),
    ([449, 2**-9, 2**-8, 3 * 2**-9], [448, 0, 2**-8, 2**-7]),  # codes in steps of 2 ** -8
    ([448, 2**-9, 2**-10, 3 * 2**-10], [448, 2**-9, 0, 2**-8]),
    ([1e-6, -1e-6, 3e-8, 0], [2**-20, -(2**-20), 2**-25, 0]),  # the floor: scale 2 ** -22
    ([0, 0, 0, 0], [0, 0, 0, 0]),
]
FP4_EXAMPLES = [
    ([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [6, 0, 1, 1, 2, 2, 4, 4]),  # ties, to the even code
    ([-6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5], [-6, -0.0, -1, -1, -2, -2, -4, -4]),
    ([6.03125, 0.5, 1.5, 2.5], [6, 0, 2, 2]),  # scale 2
    ([2.0**-126, 2.0**-127, 0, 0], [2.0**-126, 2.0**-127, 0, 0]),  # the floor: scale 2 ** -126
    ([0, 0, 0, 0], [0, 0, 0, 0]),
]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize(
    ("fast", "block", "given", "expected"),
    [(fp8_round, 64, *pair) for pair in FP8_EXAMPLES] + [(fp4_round, 32, *pair) for pair in FP4_EXAMPLES],
)
def test_rounding_examples(fast, block, given, expected):
    x, y = (torch.tensor([[*map(float, row), *[0.0] * (block - len(row))]]) for row in (given, expected))
    rounded = fast(x, block)
    assert torch.equal(rounded, y)
    assert torch.equal(rounded.signbit(), y.signbit())


def every_bf16() -> torch.Tensor:
    """All finite bf16 values, in an order in which those of a block have nearly the same size."""
    return torch.cat((torch.arange(0x7F80), torch.arange(-0x8000, -0x80))).short().view(torch.bfloat16).view(-1, 256)


def every_exponent() -> torch.Tensor:
    """fp32 numbers of every size; 40 blocks begin with the largest code times a power of two or just above."""
    bits = torch.randint(2**23, (255, 256)) + (torch.arange(255)[:, None] << 23)
    x = bits.int().view(torch.float32) * torch.tensor([1.0, -1.0, 2**-3, 2**-9]).repeat(64)
    step = torch.arange(40)
    for column, largest in ((0, 448.0), (128, 6.0)):
        above = torch.tensor(largest).view(torch.int32) + step.int()
        x[100:140, column] = above.view(torch.float32) * 2.0 ** (step - 27)  # about as large as the others
    return x


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("values", [every_bf16, every_exponent])
@pytest.mark.parametrize(
    ("name", "block"),
    [("fp8_round", 128), pytest.param("fp8_round", 64, marks=pytest.mark.slow), ("fp4_round", 32)],
)
def test_codes_are_those_of_the_reference(name, block, values):
    x = values()
    rounded, expected = getattr(dsv4cli.kernels.block_scale, name)(x, block), getattr(ref, name)(x, block)
    assert torch.equal(bits_of(rounded), bits_of(expected))


# the widths of Flash and Pro: hidden, query, a key without its rope dims, indexer, outputs of groups
@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize(("name", "block", "shape", "width"), [
    ("fp8_round", 128, (2, 4096), 4096), ("fp8_round", 128, (2, 7168), 7168), ("fp8_round", 128, (3, 1536), 1536),
    ("fp8_round", 64, (7, 512), 448), ("fp8_round", 64, (3, 2, 512), 448), ("fp4_round", 32, (2, 64, 128), 128),
    ("fp8_round", 128, (2, 8, 1024), 1024),
])  # fmt: skip
def test_codes_of_real_shapes(name, block, shape, width):
    x = (torch.randn(shape) * torch.logspace(-6, 6, shape[-1])).bfloat16()[..., :width]
    rounded, expected = getattr(dsv4cli.kernels.block_scale, name)(x, block), getattr(ref, name)(x, block)
    assert torch.equal(bits_of(rounded), bits_of(expected))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((0, 128), 128), ((1, 128), 128), ((3, 5, 192), 64), pytest.param((2**15 + 3, 8), 8, marks=pytest.mark.slow)],
)
def test_fp8_codes_times_scales_are_the_rounded_values(shape, block, dtype):
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * torch.logspace(-8, 3, 2 * shape[-1])).to(dtype)[..., : shape[-1]]
    codes, scale = fp8_codes(x, block)
    assert (codes.shape, codes.dtype) == (x.shape, torch.float8_e4m3fn)
    assert (scale.shape, scale.dtype) == ((*shape[:-1], shape[-1] // block), torch.float8_e8m0fnu)
    values = (codes.float().unflatten(-1, (-1, block)) * scale.float()[..., None]).flatten(-2)
    assert torch.equal(bits_of(values.to(dtype)), bits_of(ref.fp8_round(x, block)))


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("values", [every_bf16, *slow(every_exponent)])
def test_fp8_codes_are_those_of_the_reference(values):
    x = values()
    for codes, wanted in zip(fp8_codes(x, 128), ref.fp8_codes(x, 128), strict=True):
        assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (3, 5, 192), (2, 64, 128)])
def test_fp4_codes_stand_for_the_rounded_values(shape, dtype):
    x = (torch.randn(*shape[:-1], 2 * shape[-1]) * torch.logspace(-8, 3, 2 * shape[-1])).to(dtype)[..., : shape[-1]]
    codes, scale = fp4_codes(x, 32)
    assert (codes.shape, codes.dtype) == ((*shape[:-1], shape[-1] // 2), torch.int8)
    assert (scale.shape, scale.dtype) == ((*shape[:-1], shape[-1] // 32), torch.float8_e8m0fnu)
    assert torch.equal(bits_of(dequantise(codes, scale).to(dtype)), bits_of(ref.fp4_round(x, 32)))


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("values", [every_bf16, *slow(every_exponent)])
def test_fp4_codes_are_those_of_the_reference(values):
    x = values()
    (codes, scale), (wanted, wanted_scale) = fp4_codes(x, 32), ref.fp4_codes(x, 32)
    assert torch.equal(codes, wanted)
    assert torch.equal(scale.view(torch.uint8), wanted_scale.view(torch.uint8))
    assert torch.equal(bits_of(dequantise(codes, scale)), bits_of(ref.fp4_round(x.float(), 32)))


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["fp8_round", "fp4_round"])
def test_what_is_not_finite_stays_so(name):
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6], x[2, 7] = math.nan, math.inf, -math.inf
    rounded = getattr(dsv4cli.kernels.block_scale, name)(x, 32)
    assert not rounded[~x.isfinite()].isfinite().any()
    assert (rounded[:, 32:] == 1).all()
    assert fp8_codes(x, 32)[0].float()[~x.isfinite()].isnan().all()


@pytest.mark.usefixtures("triton_backend")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_hadamard_adds_in_the_order_of_the_reference(dtype):
    x = torch.randn(2, 64, 256).to(dtype)[..., 64:192]
    assert torch.equal(hadamard(x), ref.hadamard(x))


@pytest.mark.parametrize(("largest", "floor"), [(448.0, 1e-4), (6.0, 6 * 2.0**-126)])
def test_scale_is_rounded_up_for_every_bf16(largest, floor):
    amax = torch.arange(1, 0x7F80, dtype=torch.int16).view(torch.bfloat16).float()[:, None]
    quotient = amax.double().clamp_min(torch.tensor(floor, dtype=torch.float32).item()) / largest
    mantissa, exponent = torch.frexp(quotient)
    expected = torch.ldexp(torch.ones_like(quotient), exponent - (mantissa == 0.5).int())
    assert torch.equal(block_scale(amax, floor, largest).double(), expected)


@pytest.mark.parametrize(("byte", "values"), [(0x1F, [-6, 0.5]), (0xA5, [3, -1]), (0x80, [0, -0.0])])
def test_packed_codes(byte, values):
    packed = torch.full((1, 16), byte, dtype=torch.uint8).view(torch.int8)
    weight = dequantise(packed, torch.full((1, 1), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu))
    assert torch.equal(weight, torch.tensor([values * 16]))
    assert torch.equal(weight.signbit(), torch.tensor([values * 16]).signbit())


def test_every_code_and_every_scale():
    e8m0 = torch.arange(255, dtype=torch.uint8)[:, None]
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(255, 1, 1).view(torch.int8)
    scales = e8m0[:, None].expand(-1, 16, -1).contiguous().view(torch.float8_e8m0fnu)
    signed = E2M1 + [-value for value in E2M1]
    values = [
        [signed[code] for byte in range(16 * row, 16 * row + 16) for code in (byte & 15, byte >> 4)]
        for row in range(16)
    ]
    for byte, weight in enumerate(dequantise(packed[:250], scales[:250])):  # 6 * 2 ** 123 is the last that fits
        assert torch.equal(weight.double(), torch.tensor(values).double() * 2.0 ** (byte - 127)), byte
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]
    for byte in (0, 1, 100, 127, 200, 245):
        weight = dequantise(codes, e8m0[byte : byte + 1].view(torch.float8_e8m0fnu))
        assert torch.equal(weight.double(), torch.tensor([E4M3]).double() * 2.0 ** (byte - 127)), byte


@pytest.mark.parametrize("shape", [(0, 128), (1, 1), (128, 129), (130, 257), (2, 3, 131, 64)], ids=str)
def test_fp8_weight(shape):
    *lead, rows, columns = shape
    weight = torch.randint(0, 127, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.randint(110, 140, (*lead, -(-rows // 128), -(-columns // 128)), dtype=torch.uint8)
    values = dequantise(weight, scale.view(torch.float8_e8m0fnu))
    assert values.shape == shape
    assert values.dtype == torch.float32
    for row in range(0, rows, 43):
        for column in range(columns):
            expected = weight[..., row, column].double() * 2 ** (scale[..., row // 128, column // 128].double() - 127)
            assert torch.equal(values[..., row, column].double(), expected), (row, column)
    assert torch.equal(values, values.bfloat16().float())


def test_fp4_weight_takes_a_scale_each_32_columns():
    weight = torch.full((3, 5, 64), 0x22, dtype=torch.uint8).view(torch.int8)  # ones
    scale = torch.randint(100, 150, (3, 5, 4), dtype=torch.uint8)
    values = dequantise(weight, scale.view(torch.float8_e8m0fnu))
    for block in range(4):
        expected = torch.exp2(scale[..., block : block + 1].double() - 127).expand(-1, -1, 32)
        assert torch.equal(values[..., 32 * block : 32 * block + 32].double(), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weight_without_scale(dtype):
    weight = torch.randn(3, 5).to(dtype)
    assert torch.equal(dequantise(weight, None), weight.float())


def sylvester(width: int) -> torch.Tensor:
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix


@pytest.mark.usefixtures("backend")
def test_hadamard_of_four():
    signs = torch.tensor([[1.0, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]])
    assert torch.equal(hadamard(torch.eye(4)), signs / 2)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("shape", [(0, 128), (1, 128), (7, 3, 128), (5, 1), (3, 64)], ids=str)
def test_hadamard_is_sylvesters(shape):
    x = torch.randn(shape)
    exact = x.double() @ sylvester(shape[-1]) * shape[-1] ** -0.5
    # seven additions and a product in fp32, of sums no larger than |x| * sqrt(D)
    torch.testing.assert_close(hadamard(x).double(), exact, rtol=0, atol=2e-6)
    small = torch.randint(-4, 5, shape).bfloat16()  # sums of small integers are exact: only the one rounding is left
    exact = (small.double() @ sylvester(shape[-1])).float() * torch.tensor(shape[-1] ** -0.5)
    assert torch.equal(hadamard(small), exact.bfloat16())


@pytest.mark.usefixtures("backend")
def test_hadamard_on_both_sides_keeps_products():
    q, k = torch.randn(2, 5, 128).unbind()
    torch.testing.assert_close(hadamard(q) @ hadamard(k).T, q @ k.T, rtol=0, atol=2e-5)  # fp32 sums of 128
