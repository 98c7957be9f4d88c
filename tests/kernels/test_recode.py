"""Changes of storage format against fp64: the values of the formats listed one by one, scales found by search."""

import numpy as np
import pytest
import torch

from dsv4cli.kernels.block_scale import dequantise
from dsv4cli.kernels.recode import (
    NotRepresentable,
    fp4_to_fp8,
    fp4_to_nvfp4,
    nvfp4_exponent,
    nvfp4_scale_2,
    nvfp4_to_fp4,
    nvfp4_values,
    to_fp4,
    to_fp8,
    to_nvfp4,
    widen,
)
from tests.support.slow import slow

E2M1 = np.array([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
# 4 exponent and 3 mantissa bits, bias 7; code 127 is NaN
E4M3 = np.array([m / 8 * 2**-6 if e == 0 else (1 + m / 8) * 2.0 ** (e - 7) for e in range(16) for m in range(8)][:127])
E4M3_SET, E2M1_SIGNED = set(E4M3), np.concatenate([E2M1, -E2M1])
E4M3_SIGNED = np.concatenate([E4M3, [np.nan], -E4M3, [np.nan]])
SHAPES = [(0, 128), *slow((1, 32)), (7, 64), *slow((127, 160), (128, 128)), (129, 416), *slow((261, 1056))]


def e8m0(byte) -> torch.Tensor:
    return torch.as_tensor(byte).to(torch.uint8).view(torch.float8_e8m0fnu)


def packed(low, high) -> torch.Tensor:
    return (torch.as_tensor(low) | torch.as_tensor(high) << 4).to(torch.uint8).view(torch.int8)


def random_fp4(rows: int, columns: int, lowest: int, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8).view(torch.int8)
    return weight, e8m0(torch.randint(lowest, highest + 1, (rows, columns // 32)))


def random_fp8(rows: int, columns: int, lowest: int, highest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """All codes but NaN, some blocks only of small codes."""
    shape = -(-rows // 128), -(-columns // 128)
    largest = torch.tensor([127, 127, 40, 8, 2, 1])[torch.randint(0, 6, shape)]
    largest = largest.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    code = (torch.rand(rows, columns) * largest).to(torch.uint8) + 128 * torch.randint(0, 2, (rows, columns))
    return code.to(torch.uint8).view(torch.float8_e4m3fn), e8m0(torch.randint(lowest, highest + 1, shape))


def powers(scale: torch.Tensor) -> np.ndarray:
    return np.ldexp(1.0, scale.view(torch.uint8).numpy().astype(int) - 127)


def codes_of(weight: torch.Tensor) -> np.ndarray:
    byte = weight.view(torch.uint8).numpy()
    return np.stack([byte & 15, byte >> 4], -1).reshape(len(byte), 2 * byte.shape[1])


def fp4_values(weight: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    return E2M1_SIGNED[codes_of(weight)] * np.repeat(powers(scale), 32, 1)


def fp8_values(weight: torch.Tensor, scale: torch.Tensor) -> np.ndarray:
    rows, columns = weight.shape
    return E4M3_SIGNED[weight.view(torch.uint8)] * powers(scale).repeat(128, 0)[:rows].repeat(128, 1)[:, :columns]


def same(actual, expected) -> bool:
    """Equal shape, values and signs of zeros."""
    actual = actual.double().numpy() if isinstance(actual, torch.Tensor) else actual
    return np.array_equal(actual, expected) and np.array_equal(np.signbit(actual), np.signbit(expected))


def is_bf16(x: np.ndarray) -> np.ndarray:
    """8 significant bits, none below 2 ** -133, and less than 2 ** 128."""
    spacing = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 8, -133))
    return (np.abs(x) < 2.0**128) & (x / spacing == np.round(x / spacing))


def place_of(call, *arguments) -> tuple[int, int]:
    with pytest.raises(NotRepresentable) as caught:
        call(*arguments)
    return caught.value.row, caught.value.column


@pytest.mark.parametrize(("byte", "values"), [(0x1F, [-6, 0.5]), (0xA5, [3, -1]), (0x80, [0, -0.0])])
def test_nibble_order(byte, values):
    weight, scale = torch.full((1, 16), byte, dtype=torch.uint8), e8m0([[127]])
    expected = np.array([values * 16])
    assert same(widen(weight, scale), expected)
    assert same(fp8_values(*fp4_to_fp8(weight, scale)), expected)
    assert same(nvfp4_values(*fp4_to_nvfp4(weight, scale, 0)), expected)


def test_widen_every_byte_and_scale():
    weight = torch.arange(256, dtype=torch.uint8).expand(255, 256).contiguous()
    scale = e8m0(torch.arange(255)[:, None].expand(-1, 16).contiguous())
    assert same(widen(weight[:253], scale[:253]), fp4_values(weight[:253], scale[:253]))
    for code in range(16):
        one = torch.full((1, 16), 17 * code, dtype=torch.uint8)
        for byte in (0, 252, 253, 254):
            values = fp4_values(one, e8m0([[byte]]))
            if is_bf16(values).all():
                assert same(widen(one, e8m0([[byte]])), values)
            else:
                assert place_of(widen, one, e8m0([[byte]])) == (0, 0)


def test_widen_every_code_and_scale_of_fp8():
    code = torch.tensor([*range(127), 0, *range(128, 255), 128], dtype=torch.uint8).view(2, 128)
    for byte in range(255):
        weight, scale = code.clone().view(torch.float8_e4m3fn), e8m0([[byte]])
        exact = is_bf16(fp8_values(weight, scale))
        assert exact.all() == (3 <= byte <= 246)
        if not exact.all():
            assert place_of(widen, weight, scale) == tuple(np.argwhere(~exact)[0])
            weight.view(torch.uint8)[torch.from_numpy(~exact)] = 0x80
        assert same(widen(weight, scale), fp8_values(weight, scale)), byte


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bytes_", [(0, 20), (90, 126), (90, 252)], ids=str)
def test_widen(shape, bytes_):
    for make, values, lowest, highest in ((random_fp4, fp4_values, 0, 252), (random_fp8, fp8_values, 3, 246)):
        weight, scale = make(*shape, max(bytes_[0], lowest), min(bytes_[1], highest))
        out = torch.empty(shape, dtype=torch.bfloat16)
        assert widen(weight, scale, out).data_ptr() == out.data_ptr()
        assert same(out, values(weight, scale))
        assert torch.equal(out.float(), dequantise(weight, scale))
        assert torch.equal(widen(weight, scale.view(torch.uint8)), out)


def test_nan_is_refused():
    weight, scale = random_fp4(3, 96, 100, 140)
    scale.view(torch.uint8)[1, 2] = 255
    for call in (widen, fp4_to_fp8, lambda *pair: nvfp4_exponent([pair]), lambda *pair: fp4_to_nvfp4(*pair, 0)):
        assert place_of(call, weight, scale) == (1, 64)
    for code in (0x7F, 0xFF):
        weight, scale = random_fp8(130, 160, 100, 120)
        weight.view(torch.uint8)[129, 140] = code
        assert place_of(widen, weight, scale) == (129, 140)
    scale.view(torch.uint8)[1, 1] = 255
    assert place_of(widen, weight, scale) == (128, 128)
    for bad in (torch.nan, torch.inf, -torch.inf):
        for dtype in (torch.bfloat16, torch.float32):
            values = torch.randn(300, 1056, dtype=dtype)
            values[299, 1050] = bad
            for call in (to_fp8, to_fp4, lambda values: to_nvfp4(values, torch.tensor(0.01))):
                assert place_of(call, values) == (299, 1050)
    codes, scale, scale_2 = fp4_to_nvfp4(*random_fp4(3, 96, 120, 124), -3)
    scale.view(torch.uint8)[2, 3] = 0x7F
    assert place_of(nvfp4_values, codes, scale, scale_2) == (2, 48)
    assert nvfp4_to_fp4(codes, scale, scale_2) is None


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bytes_", [(0, 9), (110, 124), (240, 254)], ids=str)
def test_fp4_to_fp8_is_exact_and_official(shape, bytes_):
    weight, scale = random_fp4(*shape, *bytes_)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn)
    codes, block = fp4_to_fp8(weight, scale, out)
    assert codes.data_ptr() == out.data_ptr()
    assert same(fp8_values(codes, block), fp4_values(weight, scale))
    for i, row in enumerate(block.view(torch.uint8)):
        for j, byte in enumerate(row):
            groups = scale.view(torch.uint8)[128 * i : 128 * i + 128, 4 * j : 4 * j + 4]
            assert byte == max(int(groups.max()) - 6, 0)


def test_fp4_to_fp8_is_refused_exactly_where_it_would_lose():
    refused, smaller = 0, 0
    for apart in range(20):
        for high, low in np.ndindex(8, 8):
            weight = packed([[high] * 16 + [low] * 16], [[8] * 32])
            scale = e8m0([[100, 100 - apart]])
            large, small = E2M1[high], E2M1[low] * 2.0**-apart  # in units of 2 ** -27
            # the scales that keep both
            fitting = [s for s in range(-60, 60) if {large * 2.0**-s, small * 2.0**-s} <= E4M3_SET]
            if not fitting:
                assert place_of(fp4_to_fp8, weight, scale) == (0, 0)
                refused += 1
                continue
            codes, block = fp4_to_fp8(weight, scale)
            assert same(fp8_values(codes, block), fp4_values(weight, scale))
            official = -6 in fitting
            assert official or apart > 14
            assert int(block.view(torch.uint8)) - 100 == (-6 if official else min(fitting))
            smaller += not official
    assert min(refused, smaller) > 0


def test_fp4_to_fp8_names_the_block():
    weight, scale = random_fp4(300, 288, 110, 124)
    scale.view(torch.uint8)[131, 5] = 100
    weight[131, 80:96] = 0x11
    assert place_of(fp4_to_fp8, weight, scale) == (128, 128)


def test_scales_of_zeros_do_not_matter():
    weight, scale = random_fp4(300, 288, 110, 124)
    weight[::7, 16:32], weight[5, 32:48] = -0x80, 0x08  # zeros of both signs
    byte = scale.view(torch.uint8)
    byte[::7, 1], byte[5, 2], byte[140, 1] = 0, 254, 1
    weight[140, 16:32] = 0
    codes, block = fp4_to_fp8(weight, scale)
    assert same(fp8_values(codes, block), fp4_values(weight, scale))
    assert same(widen(codes, block), fp4_values(weight, scale))
    used = byte[:128, :4].clone()
    used[::7, 1], used[5, 2] = 0, 0
    # 6 * 2 ** k in the block: the smallest scale that holds it
    assert block.view(torch.uint8)[0, 0] == used.max() - 6
    assert block.view(torch.uint8)[1, 0] == byte[128:256, :4].max() - 6


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_fp8_come_back(shape):
    for bytes_ in ((3, 20), (100, 130), (225, 246)):
        weight, scale = random_fp8(*shape, *bytes_)
        wide = widen(weight, scale)
        for values in (wide, wide.float()):
            codes, again = to_fp8(values)
            assert (codes.dtype, again.dtype, again.shape) == (weight.dtype, scale.dtype, scale.shape)
            assert same(fp8_values(codes, again), fp8_values(weight, scale))
        for i, j in np.ndindex(*scale.shape):
            largest = weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].float().abs().max()
            if largest > 224:
                assert again.view(torch.uint8)[i, j] == scale.view(torch.uint8)[i, j]
            elif largest == 0:
                assert again.view(torch.uint8)[i, j] == 127


def test_one_code_of_fp8_comes_back_from_any_scale():
    code = torch.tensor([*range(127), *range(128, 255)], dtype=torch.uint8)
    weight = torch.zeros(254, 128, 128, dtype=torch.uint8)
    weight[:, 77, 66] = code
    weight = weight.view(254 * 128, 128).view(torch.float8_e4m3fn)
    for byte in (0, 1, 2, 7, 127, 240, 246):
        scale = e8m0(torch.full((254, 1), byte))
        values = dequantise(weight, scale)  # fp32 has those that bf16 has not
        codes, again = to_fp8(values)
        assert torch.equal(dequantise(codes, again).view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_of_fp4_come_back(shape):
    for bytes_ in ((0, 20), (110, 124), (230, 252)):
        weight, scale = random_fp4(*shape, *bytes_)
        weight[::3] &= torch.tensor(0x9B - 256, dtype=torch.int8)  # small codes
        expected = fp4_values(weight, scale)
        wide = widen(weight, scale)
        sources = [wide, wide.float()] + ([widen(*fp4_to_fp8(weight, scale))] if bytes_[0] == 110 else [])
        for values in sources:
            packed_again, again = to_fp4(values)
            assert (packed_again.dtype, again.dtype) == (torch.int8, scale.dtype)
            assert same(fp4_values(packed_again, again), expected)
        largest = np.abs(E2M1_SIGNED[codes_of(weight)]).reshape(*scale.shape, 32).max(-1)
        byte, byte_again = scale.view(torch.uint8).numpy(), again.view(torch.uint8).numpy()
        assert np.array_equal(byte_again[largest > 3], byte[largest > 3])
        assert (byte_again[largest == 0] == 127).all()


@pytest.mark.parametrize(("recode", "block", "largest"), [(to_fp8, 128, 448.0), (to_fp4, 32, 6.0)])
def test_scale_is_the_smallest(recode, block, largest):
    # a block of FP8 has 128 rows, here all but one of them padding
    amax = torch.arange(1, 0x7F80, 53 if block == 128 else 1, dtype=torch.int16).view(torch.bfloat16)
    values = torch.zeros(1, len(amax) * block, dtype=torch.bfloat16)
    values[0, 5::block] = -amax
    byte = recode(values)[1].view(torch.uint8)[0].numpy().astype(int)
    held = np.ldexp(largest, byte - 127)
    assert (amax.double().numpy() <= held).all()
    assert ((amax.double().numpy() > held / 2) | (byte == 0)).all()


def nearest(values: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """The codes of the nearest magnitudes, ties to the even code, and the sign in front."""
    x = np.minimum(np.abs(values), magnitudes[-1])
    above = np.searchsorted(magnitudes, x).clip(1)
    up, down = magnitudes[above] - x, x - magnitudes[above - 1]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    sign = 8 if len(magnitudes) == 8 else 128
    return (code + sign * np.signbit(values)).astype(np.uint8)


def hard_values(middles: np.ndarray, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Ties, their neighbours, and random values."""
    ties = torch.from_numpy(middles).to(dtype)
    ties = torch.cat([ties, torch.nextafter(ties, 2 * ties), torch.nextafter(ties, 0 * ties)])
    values = torch.randn(shape).to(dtype).flatten()
    count = len(ties) * (values.numel() // len(ties) // 2)
    values[:count] = ties.repeat(count // len(ties)) * torch.randint(0, 2, (count,)).mul(2).sub(1)
    return values.view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("power", [-120, *slow(-7, 0, 9), 110])
def test_rounding_is_to_the_nearest(dtype, power):
    for recode, block, magnitudes in ((to_fp8, 128, E4M3), (to_fp4, 32, E2M1)):
        values = hard_values((magnitudes[1:] + magnitudes[:-1]) / 2, (261, 1056), dtype)
        values[::128, ::block] = magnitudes[-1]
        if block == 32:
            values[:, ::block] = magnitudes[-1]
        values *= 2.0**power
        codes, scale = recode(values)
        assert (scale.view(torch.uint8) == 127 + power).all()
        actual = codes.view(torch.uint8).numpy() if block == 128 else codes_of(codes)
        assert np.array_equal(actual, nearest(values.double().numpy() * 2.0**-power, magnitudes))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("bytes_", [(0, 17), (110, 127), (237, 254)], ids=str)
def test_nvfp4_is_exact_both_ways(shape, bytes_):
    weight, scale = random_fp4(*shape, *bytes_)
    k_max = nvfp4_exponent([(weight, scale)])
    codes, block, scale_2 = fp4_to_nvfp4(weight, scale, k_max)
    assert (codes.dtype, block.dtype, block.shape) == (torch.uint8, torch.float8_e4m3fn, (shape[0], shape[1] // 16))
    assert (scale_2.dtype, scale_2.shape, scale_2.item()) == (torch.float32, (), 2.0 ** (k_max - 8))
    assert torch.equal(codes.view(torch.int8), weight)
    product = E4M3_SIGNED[block.view(torch.uint8)] * scale_2.item()
    assert same(E2M1_SIGNED[codes_of(codes)] * product.repeat(16, 1), fp4_values(weight, scale))
    if bytes_[1] < 250:  # 6 * 2 ** 126 is beyond fp32
        assert same(nvfp4_values(codes, block, scale_2), fp4_values(weight, scale))
    back = nvfp4_to_fp4(codes, block, scale_2)
    assert torch.equal(back[0], weight)
    assert torch.equal(back[1].view(torch.uint8), scale.view(torch.uint8))


def test_nvfp4_spread():
    weight, scale = random_fp4(5, 128, 110, 110)
    byte = scale.view(torch.uint8)
    byte[2, 1] = 127
    assert nvfp4_exponent([(weight, scale)]) == 0
    assert same(nvfp4_values(*fp4_to_nvfp4(weight, scale, 0)), fp4_values(weight, scale))
    byte[2, 1] = 128
    assert nvfp4_exponent([(weight, scale)]) == 1
    assert place_of(fp4_to_nvfp4, weight, scale, 1) == (0, 0)
    assert place_of(fp4_to_nvfp4, weight, scale, 0) == (2, 32)
    weight[2, 16:32] = -0x78  # zeros of both signs: the group of 2 ** 1 does not count
    k_max = nvfp4_exponent([(weight, scale)])
    assert k_max == -17
    assert same(nvfp4_values(*fp4_to_nvfp4(weight, scale, k_max)), fp4_values(weight, scale))
    byte[2, 1] = 0  # nor does it count below
    assert nvfp4_exponent([(weight, scale)]) == -17
    assert same(nvfp4_values(*fp4_to_nvfp4(weight, scale, -17)), fp4_values(weight, scale))
    assert nvfp4_exponent([(weight, scale), random_fp4(2, 64, 115, 115)]) == -12
    assert nvfp4_exponent([(weight[:0], scale[:0])]) == 0
    byte[2, 1], byte[3, 0], weight[3, :16] = 127, 0, 0  # 17 apart but for zeros far below: the largest stays
    assert nvfp4_exponent([(weight, scale)]) == 0


def test_nvfp4_that_is_no_fp4():
    codes, block, scale_2 = fp4_to_nvfp4(*random_fp4(3, 64, 120, 124), -3)
    assert nvfp4_to_fp4(codes, block, scale_2) is not None
    assert nvfp4_to_fp4(codes, block, scale_2 * 1.5) is None
    assert nvfp4_to_fp4(codes, block, torch.tensor(2.0**-140)) is None
    for byte in (0, 0x03, 0x39, 0xB8):  # 0, 1.5 * 2 ** -8, 1.125, -1
        changed = block.clone()
        changed.view(torch.uint8)[1, :2] = byte
        assert nvfp4_to_fp4(codes, changed, scale_2) is None
    block.view(torch.uint8)[1, 2] -= 8  # half its neighbour
    assert nvfp4_to_fp4(codes, block, scale_2) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 32), (7, 64), (261, 1056)], ids=str)
def test_to_nvfp4_rounds_as_modelopt(shape, dtype):
    values = hard_values((E2M1[1:] + E2M1[:-1]) / 2, shape, dtype) * torch.logspace(-7, 1, shape[1], dtype=dtype)
    values[0, :16], values[0, 16:32] = 0, 6
    scale_2 = nvfp4_scale_2(values.abs().amax())
    assert scale_2.item() == np.float32(values.abs().amax().item()) / np.float32(2688)
    codes, block = to_nvfp4(values, scale_2)
    # fp32 throughout
    x = values.float().numpy()
    amax = np.abs(x).reshape(shape[0], -1, 16).max(-1)
    ideal = np.where(amax == 0, 1, amax / (np.float32(6) * scale_2.numpy())).clip(2**-9, 448)
    assert np.array_equal(block.view(torch.uint8).numpy(), nearest(ideal.astype(np.float64), E4M3))
    assert block.view(torch.uint8)[0, 0] == 0x38
    divisor = E4M3_SIGNED[block.view(torch.uint8)].astype(np.float32) * scale_2.numpy()
    quotient = x / divisor.repeat(16, 1)
    assert np.array_equal(codes_of(codes), nearest(quotient.astype(np.float64), E2M1))
    expected = E2M1_SIGNED[codes_of(codes)].astype(np.float32) * divisor.repeat(16, 1)
    assert same(nvfp4_values(codes, block, scale_2), expected.astype(np.float64))


def test_nvfp4_of_zeros():
    scale_2 = nvfp4_scale_2(torch.tensor(0.0))
    codes, block = to_nvfp4(torch.tensor([[0.0, -0.0] * 16]), scale_2)
    assert same(nvfp4_values(codes, block, scale_2), np.array([[0.0, -0.0] * 16]))


@pytest.mark.gpu
def test_cuda_gives_the_same_bytes():
    fp4, fp8 = random_fp4(300, 1056, 110, 124), random_fp8(300, 1056, 3, 130)
    fp4[0][::7, 16:32], fp4[1].view(torch.uint8)[::7, 1] = 0, 0
    far = random_fp4(300, 1056, 0, 252)
    values = widen(*fp8).float() * 1.01
    nvfp4 = fp4_to_nvfp4(*fp4, nvfp4_exponent([fp4]))
    for call, *arguments in (
        (widen, *fp4),
        (widen, *fp8),
        (widen, *far),
        (fp4_to_fp8, *fp4),
        (to_fp8, values),
        (to_fp8, values.bfloat16()),
        (to_fp4, values),
        (to_nvfp4, values, nvfp4_scale_2(values.abs().amax())),
        (fp4_to_nvfp4, *fp4, nvfp4_exponent([fp4])),
        (nvfp4_to_fp4, *nvfp4),
        (nvfp4_values, *nvfp4),
    ):
        there = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments]
        expected, actual = call(*arguments), call(*there)
        pairs = zip(expected, actual, strict=True) if isinstance(expected, tuple) else [(expected, actual)]
        for a, b in pairs:
            assert b.is_cuda
            assert torch.equal(a.view(torch.uint8) if a.ndim else a, b.cpu().view(torch.uint8) if b.ndim else b.cpu())
