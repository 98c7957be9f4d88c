"""Operands of the experts' products for tiles of tokens: weights in rows, tokens in columns, 128 of K at a time.

FP4 weights are converted to bf16 in registers, which is exact, and are the left operand from there. Two permutations
avoid any data movement. A thread loads other rows than its warp multiplies; `natural` restores the order in the result.
And in an operand a thread holds columns 2t, 2t + 1 of every 8 (t = 0..3); to make these 32 adjacent columns in memory,
one 16-byte load with one scale, the columns of every 128 are permuted, in the inputs, too (`ordered`): place
[i, q, t, h] holds column [t, i, h, q], with sizes 4 x 4 x 4 x 2 and the last index fastest.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import through_fp8
from dsv4cli.kernels.experts.kernel.dequant_mma import by_scale_2
from dsv4cli.kernels.launch import launched


@triton.jit
def ordered(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Permute every 128 rows of [ROWS, COLUMNS] into the column order of the next product."""
    values = tl.reshape(values, [max(ROWS // 128, 1), min(ROWS // 32, 4), 4, 2, 4, COLUMNS])  # t, i, h, q
    return tl.reshape(tl.permute(values, [0, 2, 4, 1, 3, 5]), [ROWS, COLUMNS])


@triton.jit
def natural(values, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Return products of FP4 weights [ROWS, COLUMNS] with the rows in the matrix's order."""
    values = tl.reshape(values, [ROWS // 16 // WARPS, WARPS, 2, 8, COLUMNS])
    return tl.reshape(tl.permute(values, [0, 2, 1, 3, 4]), [ROWS, COLUMNS])


# a weight's factor is its e8m0 or e4m3 scale divided by this, because one product in bf16 cannot scale further
FP4_FACTOR = tl.constexpr(2.0**40)
NVFP4_FACTOR = tl.constexpr(2.0**7)


@triton.jit
def fp4_pairs(words, factor, SHIFT: tl.constexpr):
    """Return codes in bits SHIFT to SHIFT + 3 of halves of int32 [...], times factor * 2 ** -126: bf16 [..., 2].

    SHIFT is 0 or 4.
    """
    # sign to bit 15, the rest to bits 8..6: e2m1 * 2 ** -126
    bits = (words & (0x000F000F << SHIFT)) * (0x1040 >> SHIFT)
    # separate masks for the halves, the upper one first: ptxas then multiplies both in one register
    high = ((bits >> 16) & 0x81C0).to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    low = (bits & 0x81C0).to(tl.int16).to(tl.bfloat16, bitcast=True) * factor
    return tl.join(low, high)


@triton.jit
def _power_of_two(code):
    """Return 2 ** (code - 127) in bf16. code: int32; 255 becomes NaN, and 2 ** -127 is subnormal."""
    return tl.where(code == 255, 0x7FC0, tl.maximum(code << 7, 0x40)).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def fp4_factor(code):
    """Return 2 ** (code - 127 + 126) / FP4_FACTOR in bf16.

    code: int32. Above 168, which is too large for bf16, it becomes NaN.
    """
    return tl.where(code > 168, 0x7FC0, (code + 86) << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _nvfp4_factors(scale):
    """Return the factors of words, times 2 ** 126 / NVFP4_FACTOR: bf16 [.., 4, 4].

    scale: int32 [repeat, 2, warp, 8, 4], two e4m3 scales of 16 columns in each.
    """
    code = tl.join(scale, scale >> 8)
    # exponent and mantissa to bits 10..4: e4m3 * 2 ** -120
    two = ((code & 0x7F) << 4).to(tl.int16).to(tl.bfloat16, bitcast=True)
    two *= tl.full([1, 1, 1, 1, 1, 1], 2.0**120, tl.float32).to(tl.bfloat16)
    two *= tl.full([1, 1, 1, 1, 1, 1], 2.0**119, tl.float32).to(tl.bfloat16)
    return tl.reshape(tl.join(two, two), [scale.shape[0], 2, scale.shape[2], 8, 4, 4])


@triton.jit
def fp4_values(words, factor, ROWS: tl.constexpr):
    """Decode words to bf16 [ROWS, 128].

    words: int32 [repeat, 2, warp, 8, 4, 4]; factor: bf16 [repeat, 2, warp, 8, 4, 1 or 4].
    """
    upper = words >> 8  # [.., t, i]
    even = tl.join(fp4_pairs(words, factor, 0), fp4_pairs(upper, factor, 0))
    odd = tl.join(fp4_pairs(words, factor, 4), fp4_pairs(upper, factor, 4))
    values = tl.join(even, odd)  # [repeat, half, warp, 8, t, i, h, q1, q0]
    return tl.reshape(tl.permute(values, [0, 2, 1, 3, 5, 7, 8, 4, 6]), [ROWS, 128])


@triton.jit
def _fp4_scale(scale, row, step, K: tl.constexpr):
    """Load e8m0 codes as int32 [rows, 4]. scale: bytes, or int32 words of four bytes if K is a multiple of 128.

    There are fewer than 2 ** 31 words: that many would be 438 GB of experts.
    """
    group = tl.arange(0, 4)[None]
    if K % 128 == 0:
        codes = (tl.load(scale + row * (K // 128) + step)[:, None] >> (8 * group)) & 255
    else:
        group += step * 4
        codes = tl.load(scale + row.to(tl.int64)[:, None] * (K // 32) + group, group < K // 32, other=0).to(tl.int32)
    return codes


@triton.jit
def _nvfp4_scale(scale, row, step, K: tl.constexpr):
    """Load e4m3 codes, two in each int32 [rows, 4].

    scale: pairs of bytes as int16, or int64 words of eight bytes if K is a multiple of 128. There are fewer than 2 **
    31 words.
    """
    group = tl.arange(0, 4)[None]
    if K % 128 == 0:
        codes = (tl.load(scale + row * (K // 128) + step)[:, None] >> (16 * group)).to(tl.int32)
    else:
        group += step * 4
        codes = tl.load(scale + row.to(tl.int64)[:, None] * (K // 32) + group, group < K // 32, other=0).to(tl.int32)
    return codes


@triton.jit
def _values(weight, scale, expert, row, step, N: tl.constexpr, K: tl.constexpr, FORMAT: tl.constexpr):
    """Load a tile of FP8, bf16 or fp32 weights, 0 beyond K: bf16 or fp32 [rows, 128]; for fp8_f32 the codes."""
    row, column = tl.minimum(row, N - 1), step * 128 + tl.arange(0, 128)[None]
    values = tl.load(weight + (expert.to(tl.int64) * N + row)[:, None] * K + column, column < K, other=0.0)
    if FORMAT == "fp8":
        code = tl.load(scale + (expert * ((N + 127) // 128) + row // 128) * ((K + 127) // 128) + step)
        values = values.to(tl.bfloat16) * _power_of_two(code.to(tl.int32))[:, None]
    elif FORMAT == "fp8_f32":
        values = values.to(tl.bfloat16)
    return values


@triton.jit
def undivided(sums, scale_2, expert, FORMAT: tl.constexpr):
    """Undo the division of `tile` in the sums of its products. scale_2: fp32 [E] of NVFP4, or None."""
    if FORMAT == "fp4":
        sums = sums * FP4_FACTOR if scale_2 is None else by_scale_2(sums * NVFP4_FACTOR, scale_2, expert)
    return sums


@triton.jit
def _words(weight, expert, begin, row, step, N: tl.constexpr, K: tl.constexpr, DESCRIBED: tl.constexpr):
    """Load int32 words [rows, 16] of FP4 codes, 0 beyond K."""
    if DESCRIBED:
        words = weight.load([expert * N + begin, step * 16])
    else:
        word = step * 16 + tl.arange(0, 16)[None]
        place = (expert.to(tl.int64) * N + tl.minimum(row, N - 1))[:, None] * (K // 8) + word
        words = tl.load(weight + place) if K % 128 == 0 else tl.load(weight + place, word < K // 8, other=0)
    return words


@triton.jit
def tile(
    weight,  # [E, N, K]: e2m1 as int32 words [E * N, K / 8], if DESCRIBED a descriptor of them; or e4m3, bf16, fp32
    scale,  # e8m0 codes, for FP4 as in `_fp4_scale`; for NVFP4 e4m3 codes as in `_nvfp4_scale`; fp32 for fp8_f32
    expert,
    begin,
    step,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,  # "fp4" (e2m1, of NVFP4 too), "fp8", "fp8_f32", "plain"
    DESCRIBED: tl.constexpr,
    ROWS: tl.constexpr,
    WARPS: tl.constexpr,
):
    """Load rows begin to begin + ROWS - 1, columns step * 128 to step * 128 + 127 of an expert's matrix.

    The order of rows is that of `natural`. FP4 values are divided by the constants above; `undivided` multiplies the
    sums by them.
    """
    row = begin + tl.arange(0, ROWS)
    if FORMAT == "fp4":
        words = _words(weight, expert, begin, row, step, N, K, DESCRIBED)
        words = tl.reshape(words, [ROWS // 16 // WARPS, 2, WARPS, 8, 4, 4])
        row = expert * N + tl.minimum(row, N - 1)
        if scale.dtype.element_ty == tl.int64 or scale.dtype.element_ty == tl.int16:
            codes = _nvfp4_scale(scale, row, step, K)
            factor = _nvfp4_factors(tl.reshape(codes, [ROWS // 16 // WARPS, 2, WARPS, 8, 4]))
        else:
            codes = _fp4_scale(scale, row, step, K)
            factor = tl.expand_dims(fp4_factor(tl.reshape(codes, [ROWS // 16 // WARPS, 2, WARPS, 8, 4])), -1)
        values = fp4_values(words, factor, ROWS)
    else:
        values = _values(weight, scale, expert, row, step, N, K, FORMAT)
    return values


@launched(do_not_specialize=["count"])
def prepare(
    x,  # [count, K]
    y,  # [count, WIDTH], WIDTH the next multiple of 128
    count,
    stride,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUND: tl.constexpr,
    FORMAT: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Prepare the inputs of the products: rounded, reordered for FP4, 0 beyond K."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    column = tl.program_id(1) * 128 + tl.arange(0, 128)[None]
    values = tl.load(x + token * stride + column, (token < count) & (column < K), other=0.0)
    if ROUND:
        values = through_fp8(values.to(tl.float32)).to(values.dtype)
    if FORMAT == "fp4":
        values = tl.reshape(tl.permute(tl.reshape(values, [TOKENS, 4, 4, 2, 4]), [0, 2, 4, 1, 3]), [TOKENS, 128])
    tl.store(y + token * WIDTH + column, values, token < count)
