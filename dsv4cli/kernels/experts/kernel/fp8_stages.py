"""Products of a unit of `fp8_wgmma`: 128 rows of weights in shared memory times a chunk's inputs.

In the tensor core's left operand, lane [g, t] of a warp holds bytes 4 t to 4 t + 3 and 16 + 4 t to 19 + 4 t of rows g
and g + 8. With FP4 it takes them from word t of the block: first the four low codes, then the four high ones.
`fp8_inputs.place` orders the inputs likewise. Row g + 8 of a warp is a row of w3 if g is one of w1, so that a gate and
its value are in the same thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from dsv4cli.kernels.experts.kernel.fp8_layouts import CODES, SCALES, group, held, lag, operand
from dsv4cli.kernels.gluon_barriers import await_filled, tell

# rows of a unit, and bytes of a row in a stage
ROWS, STAGE = gl.constexpr(128), gl.constexpr(256)
# e2m1 as e5m2 is too small by this factor
FACTOR = gl.constexpr(2.0**14)
# eight codes of a word to four e5m2 of the low codes and four of the high ones
DECODE = gl.constexpr("""{ .reg .b32 t, u;
shl.b32 t, $2, 4;
shl.b32 u, $2, 1;
and.b32 t, t, 0x80808080;
and.b32 u, u, 0x0E0E0E0E;
or.b32 $0, t, u;
shr.u32 u, $2, 3;
and.b32 t, $2, 0x80808080;
and.b32 u, u, 0x0E0E0E0E;
or.b32 $1, t, u; }""")


@gluon.jit
def _eighths(codes):
    """Split codes [64, 128] into eight parts of 16 bytes per row, each [warp, g, t, byte].

    With FP4, a part is a block of 32 columns.
    """
    x = gl.permute(gl.reshape(codes, [8, 8, 2, 2, 2, 4, 4]), (0, 1, 5, 6, 2, 3, 4))
    even, odd = gl.split(x)
    zero, two = gl.split(even)
    one, three = gl.split(odd)
    zero, four = gl.split(zero)
    one, five = gl.split(one)
    two, six = gl.split(two)
    three, seven = gl.split(three)
    return zero, one, two, three, four, five, six, seven


@gluon.jit
def _left(low, high, other_low, other_high, dtype: gl.constexpr, TOKENS: gl.constexpr):
    """Return a left operand [128, 32] from its lower and upper 16 columns, separately for rows g and rows g + 8."""
    both = gl.join(gl.join(low, other_low), gl.join(high, other_high))
    x = gl.reshape(gl.permute(both, (0, 4, 1, 5, 2, 3)), [ROWS, 32])
    return gl.convert_layout(x, operand(TOKENS)).to(dtype, bitcast=True)


@gluon.jit
def _product(left, given, number, TOKENS: gl.constexpr):
    """Start the product of a left operand and block `number` of the inputs, [TOKENS, 32]."""
    zero = gl.full([ROWS, TOKENS], 0.0, gl.float32, held(TOKENS))
    right = given.index(number).permute((1, 0))
    return warpgroup_mma(left, right, zero, use_acc=False, max_num_imprecise_acc=32, is_async=True)


@gluon.jit
def _words_of_rows(scales, at, TOKENS: gl.constexpr):
    """Return the scales of the four parts of a stage, each a word of four bytes per row."""
    words = gl.join(scales.index(at * 2).load(SCALES), scales.index(at * 2 + 1).load(SCALES))
    words = gl.permute(gl.reshape(words, [8, 8, 2, 2, 2]), (0, 4, 1, 2, 3))
    even, odd = gl.split(gl.reshape(words, [ROWS, 2, 2]))
    zero, two = gl.split(even)
    one, three = gl.split(odd)
    row: gl.constexpr = gl.SliceLayout(1, held(TOKENS))
    return (
        gl.convert_layout(zero, row), gl.convert_layout(one, row), gl.convert_layout(two, row),
        gl.convert_layout(three, row),
    )  # fmt: skip


@gluon.jit
def _scaled(products, words, J: gl.constexpr):
    bits = words << (23 - 8 * J) if J < 3 else words >> 1
    return products * gl.expand_dims((bits & 0x7F800000).to(gl.float32, bitcast=True), 1)


@gluon.jit
def _added(sums, total, done, words, factors, NUMBER: gl.constexpr, GROUP: gl.constexpr, LAG: gl.constexpr):
    """Add the products of group NUMBER, GROUP blocks, once they have ended. The LAG groups after it may still run.

    Returns the sums, and the total of the blocks of the last part so far, to which the inputs' scale is yet to be
    applied.
    """
    FIRST: gl.constexpr = NUMBER * GROUP
    products = warpgroup_mma_wait(LAG * GROUP, deps=done[FIRST : FIRST + GROUP])
    for block in gl.static_range(FIRST, FIRST + GROUP):
        scaled = _scaled(products[block - FIRST], words[block // 4], block % 4)
        total = scaled if block % 4 == 0 else total + scaled
        if block % 4 == 3:
            sums += total * gl.expand_dims(factors[block // 4], 0)
    return sums, total


@gluon.jit
def _decoded(codes, number):
    """Read a tile and decode it to the low and the high codes of its eight blocks."""
    words = codes.index(number).load(CODES)
    low, high = gl.inline_asm_elementwise(DECODE, "=r,=r,r", [words], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)
    return _eighths(low), _eighths(high)


@gluon.jit
def _routed_stage(sums, codes, scales, freed, given, begin, factors, number):
    """Return the sums plus the products of an FP4 stage.

    begin: the stage's first block in `given`; factors: the inputs' scales, by part.
    """
    TOKENS: gl.constexpr = sums.shape[1]
    GROUP: gl.constexpr = group(TOKENS)
    LAG: gl.constexpr = lag(TOKENS)
    at = number % freed.shape[0]
    words = _words_of_rows(scales, at, TOKENS)
    done, total = (), sums  # the first block replaces the total
    for half in gl.static_range(2):
        low, high = _decoded(codes, at * 4 + half * 2)
        other_low, other_high = _decoded(codes, at * 4 + half * 2 + 1)
        for block in gl.static_range(8):
            left = _left(low[block], high[block], other_low[block], other_high[block], gl.float8e5, TOKENS)
            done += (_product(left, given, begin + half * 8 + block, TOKENS),)
            if half * 8 + block == 15:
                # a barrier of the eight warps: all have read the stage
                tell(freed, number)
            if block % GROUP == GROUP - 1 and (half * 8 + block) // GROUP >= LAG:
                sums, total = _added(
                    sums, total, done, words, factors, (half * 8 + block) // GROUP - LAG, GROUP, LAG
                )  # fmt: skip
    for rest in gl.static_range(LAG):
        sums, total = _added(sums, total, done, words, factors, 16 // GROUP - LAG + rest, GROUP, LAG - 1 - rest)
    return sums


@gluon.jit
def _shared_stage(sums, codes, freed, given, begin, factors, weight_factors, number):
    """Return the sums plus the products of an FP8 stage. weight_factors: scales of each row, for both parts."""
    TOKENS: gl.constexpr = sums.shape[1]
    at = number % freed.shape[0]
    done = ()
    for part in gl.static_range(2):
        some = _eighths(codes.index(at * 4 + part * 2).load(CODES))
        other = _eighths(codes.index(at * 4 + part * 2 + 1).load(CODES))
        for block in gl.static_range(4):
            left = _left(
                some[block * 2], some[block * 2 + 1], other[block * 2], other[block * 2 + 1], gl.float8e4nv, TOKENS
            )
            done += (_product(left, given, begin + part * 4 + block, TOKENS),)
    tell(freed, number)
    for part in gl.static_range(2):
        zero, one, two, three = warpgroup_mma_wait(4 - part * 4, deps=done[part * 4 : part * 4 + 4])
        total = ((zero + one) + (two + three)) * gl.expand_dims(weight_factors[part], 1)
        sums += total * gl.expand_dims(factors[part], 0)
    return sums


@gluon.jit
def _scale_of(first, second, place, line):
    """Return each row's scale of 128 columns of the shared expert: fp32 [ROWS]."""
    one, two = gl.load(first + place).to(gl.int32), gl.load(second + place).to(gl.int32)
    return (gl.where(line % 16 < 8, one, two) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _factors(scales, number, TOKENS: gl.constexpr):
    """Return the inputs' scales of 128 columns."""
    return scales.index(number).load(gl.SliceLayout(0, held(TOKENS)))


@gluon.jit
def steps(is_own, K: gl.constexpr, SHARED: gl.constexpr):
    """Return the number of stages of a unit."""
    return gl.where(is_own, K // STAGE, K // 2 // STAGE) if SHARED else K // 2 // STAGE


@gluon.jit
def unit_sums(
    is_own, row, number, begin, stages, given, scales, own_scales,
    K: gl.constexpr, TIMES: gl.constexpr, SHARED: gl.constexpr,
):  # fmt: skip
    """Return a unit's sums [ROWS, TOKENS].

    Args:
        row: the unit's first row of weights.
        number: the number of its first stage, which is filled. On return, the stage after its last one is, too.
        given: inputs in blocks of 32 columns. The unit's inputs start at block `begin`.
        scales: the inputs' scales, those of 128 columns at every `TIMES`-th index from `begin // 4` on.
    """
    codes, weight_scales, _units, filled, freed = stages
    TOKENS: gl.constexpr = given.shape[1]
    sums = gl.full([ROWS, TOKENS], 0.0, gl.float32, held(TOKENS))
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, held(TOKENS)))
    if SHARED and is_own:
        place = row // 128 * (K // 128)
        for step in range(K // STAGE):
            one = _scale_of(own_scales[0], own_scales[1], place + step * 2, line)
            two = _scale_of(own_scales[0], own_scales[1], place + step * 2 + 1, line)
            near = begin // 4 + step * 2 * TIMES
            factors = _factors(scales, near, TOKENS), _factors(scales, near + TIMES, TOKENS)
            sums = _shared_stage(sums, codes, freed, given, begin + step * 8, factors, (one, two), number + step)
            await_filled(filled, number + step + 1)
    else:
        for step in range(K // 2 // STAGE):
            near = begin // 4 + step * 4 * TIMES
            factors = (
                _factors(scales, near, TOKENS), _factors(scales, near + TIMES, TOKENS),
                _factors(scales, near + 2 * TIMES, TOKENS), _factors(scales, near + 3 * TIMES, TOKENS),
            )  # fmt: skip
            sums = _routed_stage(sums, codes, weight_scales, freed, given, begin + step * 16, factors, number + step)
            await_filled(filled, number + step + 1)
        sums *= FACTOR
    return sums
