"""Products of one token or two with GGUF blocks on int8 tensor cores, in Gluon.

Codes are int8 as they are stored, or four of a word become int8 at once. An input becomes an integer of 23 bits,
relative to the largest input of its warp's columns, and has three int8 digits, each in a column of the right operand.
Tensor cores sum their products exactly. The integers that scale parts of a block multiply these sums exactly, too: the
largest are 2 ** 27 (Q6_K). The block's scale multiplies them in fp32.

In the left operand, lane [g, t] of a warp holds bytes 4 t to 4 t + 3 and 16 + 4 t to 19 + 4 t of rows g and g + 8: here
the eight codes of octet t. In the right one, it holds the same bytes of column g: digit g % 4 of token g // 4.
"""

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from dsv4cli.kernels.ggml.kernel.fields import block_and_group, blocks, octets_per_block, stored_words
from dsv4cli.kernels.ggml.kernel.int8_codes import signed_codes
from dsv4cli.kernels.ggml.kernel.octets import LOWEST, block_scales, has_halves, has_offset, has_steps, steps
from dsv4cli.kernels.gluon_barriers import wait_for_inputs

# 1.5 * 2 ** 23 in fp32: its sum with an integer of up to 2 ** 22 has that integer in its lowest bits. The largest sum
# of a block without steps is 2 ** 22 (Q3_K: 256 codes of -128 times digits of -128)
_MAGIC, _MAGIC_VALUE = gl.constexpr(0x4B400000), gl.constexpr(12582912.0)
# half of each digit's range: after it is added, an integer's three lowest bytes are its digits plus this
_HALVES = gl.constexpr(0x00808080)
# biased exponents: of the factor that makes a number of exponent 0 less than 2 ** 22, and of the largest factor whose
# inverse is no subnormal number
_EXPONENT, _LARGEST = gl.constexpr(127 + 127 + 21), gl.constexpr(253)
# all bits of fp32 but the sign
_MAGNITUDE = gl.constexpr(0x7FFFFFFF)


@constexpr_function
def _rows_layout(warps):
    """Return how warps hold words of [warp, half of 16 rows, g, t]."""
    return gl.BlockedLayout([1, 2, 1, 1], [1, 1, 8, 4], [warps, 1, 1, 1], [3, 2, 1, 0])


@constexpr_function
def _sums_layout(warps):
    """Return how warps hold sums of [warp, half of 16 rows, g, t, column % 2]."""
    return gl.BlockedLayout([1, 2, 1, 1, 2], [1, 1, 8, 4, 1], [warps, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@constexpr_function
def _products_layout(warps):
    return gl.NVMMADistributedLayout([2, 0], [warps, 1, 1], [1, 16, 8])


@constexpr_function
def _inputs_layout(warps):
    """Return how warps hold inputs of [warp, octet, column of it]."""
    return gl.BlockedLayout([1, 1, 8], [1, 32, 1], [warps, 1, 1], [2, 1, 0])


@constexpr_function
def _digits_layout(warps):
    """Return how warps hold digits as words of [token, group, warp, t, digit, half of an octet]; one group."""
    lanes = [[0, 0, 0, 1, 0, 0], [0, 0, 0, 2, 0, 0], [0, 0, 0, 0, 1, 0], [0, 0, 0, 0, 2, 0], [1, 0, 0, 0, 0, 0]]
    of_warps = [[0, 0, 1 << bit, 0, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 0, 0, 0, 1]], lanes, of_warps, [], [2, 1, warps, 4, 4, 2])


@constexpr_function
def _memory_layout(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, [*range(rank - 1, -1, -1)])


@constexpr_function
def _only(dim, rank, layout):
    """Return how numbers along one dimension of a layout are held."""
    for other in reversed([one for one in range(rank) if one != dim]):
        layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _along(values, DIM: gl.constexpr, RANK: gl.constexpr):
    """Return values along one dimension as a tensor of RANK dimensions."""
    for other in gl.static_range(RANK):
        if other != DIM:
            values = gl.expand_dims(values, other)
    return values


@gluon.jit
def _numbers(COUNT: gl.constexpr, DIM: gl.constexpr, RANK: gl.constexpr, layout: gl.constexpr):
    """Return 0 to COUNT - 1 along one dimension of a layout."""
    return _along(gl.arange(0, COUNT, _only(DIM, RANK, layout)), DIM, RANK)


@gluon.jit
def operand_rows(WARPS: gl.constexpr):
    """Return 0 to 15, the rows of `products`, as words have them: [1, 2, 8, 1]."""
    return operand_half(WARPS) * 8 + _numbers(8, 2, 4, _rows_layout(WARPS))


@gluon.jit
def operand_half(WARPS: gl.constexpr):
    """Return which half of the rows of `products` they are, 0 or 1: [1, 2, 1, 1]."""
    return _numbers(2, 1, 4, _rows_layout(WARPS))


@gluon.jit
def _bytes(words):
    """Return the bytes of words [..] as int8 [.., 2, 2]."""
    two = gl.join(words, words)
    # an instruction for four elements: the word, as it is
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [gl.join(two, two)], dtype=gl.int8, is_pure=True, pack=4
    )  # fmt: skip


@gluon.jit
def _left(low, high, WARPS: gl.constexpr):
    """Return the codes of octets, int8, as a left operand [WARPS, 16, 32]."""
    each = _bytes(gl.join(low, high))  # [warp, half of rows, g, t, half of an octet, 2, 2]
    x = gl.reshape(gl.permute(each, (0, 1, 2, 4, 3, 5, 6)), [WARPS, 16, 32])
    return gl.convert_layout(x, gl.DotOperandLayout(0, _products_layout(WARPS), 4), assert_trivial=True)


@gluon.jit
def _digits(x, places, K: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr, EACH: gl.constexpr):
    """Divide tokens into digits, in shared memory.

    Args:
        x: bf16.
        places: int64, where each of COUNT tokens begins.

    Returns:
        The digits, words of four of [passes * tokens, EACH, warp, t, digit, half of an octet], and for each token the
        factors of the integers, fp32 [WARPS].
    """
    PASSES: gl.constexpr = K // 32 // WARPS // EACH
    held: gl.constexpr = _inputs_layout(WARPS)
    column = _numbers(WARPS, 0, 3, held) * (K // WARPS) + _numbers(EACH * 4, 1, 3, held) * 8 + _numbers(8, 2, 3, held)
    memory = gl.allocate_shared_memory(gl.int8, [PASSES * COUNT, EACH, WARPS, 4, 4, 2, 4], _memory_layout(6))
    factors = ()
    for token in gl.static_range(COUNT):
        own = x + (places[token] + column)
        # as integers: NaN is larger than infinity, and infinity than any number
        most = gl.full([WARPS, EACH * 4], 0, gl.int32, gl.SliceLayout(2, held))
        for number in range(PASSES):
            bits = gl.load(own + number * (EACH * 32)).to(gl.float32).to(gl.int32, bitcast=True) & _MAGNITUDE
            most = gl.maximum(most, gl.max(bits, 2))
        exponent = gl.max(most, 1) >> 23
        power = gl.minimum(_EXPONENT - exponent, _LARGEST)
        factor = (power << 23).to(gl.float32, bitcast=True)
        inverse = ((254 - power) << 23).to(gl.float32, bitcast=True)
        # NaN and infinity make every result NaN
        factors += (gl.where(exponent == 255, float("nan"), inverse),)
        factor = gl.expand_dims(gl.expand_dims(factor, 1), 2)
        for number in range(PASSES):
            values = gl.load(own + number * (EACH * 32)).to(gl.float32)
            integers = (values * factor + _MAGIC_VALUE).to(gl.int32, bitcast=True) - _MAGIC
            each = _bytes((integers + _HALVES) ^ _HALVES)  # [warp, octet, column of it, 2, 2]
            each = gl.permute(gl.reshape(each, [WARPS, EACH, 4, 2, 4, 4]), (1, 0, 2, 5, 3, 4))
            memory.index(number * COUNT + token).store(each)
    return memory._reinterpret(gl.int32, [PASSES * COUNT, EACH, WARPS, 4, 4, 2], _memory_layout(5)), factors


@gluon.jit
def _digits_of(memory, i: gl.constexpr, WARPS: gl.constexpr):
    """Return a token's digits of group `i` of a pass, in the layout of two tokens: [1, 1, warp, t, digit, 2]."""
    held: gl.constexpr = _digits_layout(WARPS)
    return gl.expand_dims(memory.slice(i, 1).load(gl.SliceLayout(0, held)), 0)


@gluon.jit
def _right(memory, number, i: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr):
    """Return the digits of group `i` of pass `number` as a right operand [WARPS, 32, 8]."""
    held: gl.constexpr = _digits_layout(WARPS)
    words, token = _digits_of(memory.index(number * COUNT), i, WARPS), _numbers(2, 0, 6, held)
    if COUNT == 2:
        words = gl.where(token == 0, words, _digits_of(memory.index(number * COUNT + 1), i, WARPS))
    else:
        words, _ = gl.broadcast(words, token)
    each = _bytes(words)  # [token, 1, warp, t, digit, half of an octet, 2, 2]
    x = gl.reshape(gl.permute(each, (2, 5, 3, 6, 7, 0, 1, 4)), [WARPS, 32, 8])
    return gl.convert_layout(x, gl.DotOperandLayout(1, _products_layout(WARPS), 4), assert_trivial=True)


@gluon.jit
def _no_sums(start: gl.constexpr, WARPS: gl.constexpr):
    return gl.full([WARPS, 16, 8], start, gl.int32, _products_layout(WARPS))


@gluon.jit
def _by_lane(sums, WARPS: gl.constexpr):
    """Return sums as int32 [warp, half of rows, g, t, column % 2]."""
    return gl.convert_layout(gl.reshape(sums, [WARPS, 2, 8, 4, 2]), _sums_layout(WARPS), assert_trivial=True)


@gluon.jit
def _of_half(values, half, HALF: gl.constexpr):
    """Return the values of two of four lanes for all four."""
    return gl.expand_dims(gl.max(gl.where(half == HALF, values, -128), 3), 3)


@gluon.jit
def _twice(values):
    """Return values of rows as of their sums."""
    return gl.join(values, values)


@gluon.jit
def _stepped(sums, low, high, step, lane, right, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Add the products of 32 columns, times the steps of rows, to exact sums."""
    if has_halves(KIND):
        for half in gl.static_range(2):
            mask = gl.where(lane // 2 == half, -1, 0)
            own = _product(low & mask, high & mask, right, _no_sums(0, WARPS), WARPS)
            sums += _by_lane(own, WARPS) * _twice(_of_half(step, lane // 2, half))
    else:
        sums += _by_lane(_product(low, high, right, _no_sums(0, WARPS), WARPS), WARPS) * _twice(step)
    return sums


@gluon.jit
def _product(low, high, right, sums, WARPS: gl.constexpr):
    """Add the products of 32 columns to exact sums, int32 [WARPS, 16, 8]."""
    return mma_v2(_left(low, high, WARPS), right, sums)


@gluon.jit
def _groups_product(words, group, table, lane, rights, KIND: gl.constexpr, WARPS: gl.constexpr):
    """Return the products of groups of 32 columns of one block, from group `group` on."""
    stepped = gl.full([WARPS, 2, 8, 4, 2], 0, gl.int32, _sums_layout(WARPS))
    sums, offsets = _no_sums(_MAGIC, WARPS), _no_sums(_MAGIC, WARPS)
    for i in gl.static_range(len(words)):
        low, high = signed_codes(words[i], group + i, lane, table, KIND)
        step, offset = steps(words[i], group + i, lane, KIND)
        if has_steps(KIND):
            stepped = _stepped(stepped, low, high, step, lane, rights[i], KIND, WARPS)
        else:
            sums = _product(low, high, rights[i], sums, WARPS)
        if has_offset(KIND):
            four = low & 0 | offset * LOWEST
            offsets = _product(four, four, rights[i], offsets, WARPS)
    scale, offset_scale = block_scales(words[0], KIND)
    if has_steps(KIND):
        total = stepped.to(gl.float32) * _twice(scale)
    else:
        total = (_by_lane(sums, WARPS).to(gl.float32, bitcast=True) - _MAGIC_VALUE) * _twice(scale)
    if has_offset(KIND):
        total -= (_by_lane(offsets, WARPS).to(gl.float32, bitcast=True) - _MAGIC_VALUE) * _twice(offset_scale)
    return total


@gluon.jit
def _pass_words(
    rows, first, lane, KIND: gl.constexpr, BLOCKS: gl.constexpr, HEIGHT: gl.constexpr, EACH: gl.constexpr
):  # fmt: skip
    """Return what is stored of EACH groups of 32 columns from group `first` on."""
    found = ()
    for i in gl.static_range(EACH):
        b, group = block_and_group(first, i, KIND, EACH)
        found += (stored_words(rows, b, group, lane, KIND, BLOCKS, HEIGHT),)
    return found


@gluon.jit
def _pass_product(
    words, memory, number, table, first, lane, KIND: gl.constexpr, COUNT: gl.constexpr, WARPS: gl.constexpr,
    EACH: gl.constexpr,
):  # fmt: skip
    """Return the products of pass `number`, EACH groups of 32 columns from group `first` on."""
    PER_BLOCK: gl.constexpr = octets_per_block(KIND) // 4
    # groups that are multiplied together: whole blocks, or single groups
    TOGETHER: gl.constexpr = PER_BLOCK if EACH % PER_BLOCK == 0 else 1
    total = gl.full([WARPS, 2, 8, 4, 2], 0.0, gl.float32, _sums_layout(WARPS))
    rights = ()
    for i in gl.static_range(EACH):
        rights += (_right(memory, number, i, COUNT, WARPS),)
    for i in gl.static_range(0, EACH, TOGETHER):
        group = block_and_group(first, i, KIND, EACH)[1]
        own, right = words[i : i + TOGETHER], rights[i : i + TOGETHER]
        total += _groups_product(own, group, table, lane, right, KIND, WARPS)
    return total


@gluon.jit
def _results(sums, factors, WARPS: gl.constexpr):
    """Return the sums of digits and warps: fp32 [16, 2]."""
    held: gl.constexpr = _sums_layout(WARPS)
    t = _numbers(4, 3, 5, held)
    digit = t % 2 * 2 + _numbers(2, 4, 5, held)
    # the fourth digit is 0
    power = gl.where(digit == 0, 1.0, gl.where(digit == 1, 256.0, 65536.0))
    own: gl.constexpr = _only(0, 5, held)
    factor = _along(gl.convert_layout(factors[0], own), 0, 5)
    if len(factors) == 2:
        factor = gl.where(t < 2, factor, _along(gl.convert_layout(factors[1], own), 0, 5))
    each = gl.reshape(sums * power * factor, [WARPS, 16, 2, 4])
    return gl.sum(gl.sum(each, 3), 0)


@gluon.jit
def products(
    x,  # bf16
    places,  # int64, where each token begins in x: one or two
    rows,  # as of `fields.tile_rows`, for each of `operand_rows`
    table,
    K: gl.constexpr,  # a multiple of 32 * WARPS * EACH
    KIND: gl.constexpr,
    HEIGHT: gl.constexpr,  # rows of a tile
    WARPS: gl.constexpr,
    EACH: gl.constexpr,
    OVERLAP: gl.constexpr,  # whether to wait for the kernel that computes x, once the first weights are on their way
):
    """Return the products of 16 rows with one token or two: fp32 [16, 2].

    A token's sums do not depend on the other. EACH: groups of 32 columns in a pass of the loop.
    """
    GROUPS: gl.constexpr = K // 32 // WARPS
    COUNT: gl.constexpr = len(places)
    BLOCKS: gl.constexpr = blocks(KIND, K)
    held: gl.constexpr = _rows_layout(WARPS)
    # int64, so that what is added to it becomes part of the load instructions
    first, lane = _numbers(WARPS, 0, 4, held).to(gl.int64) * GROUPS, _numbers(4, 3, 4, held)
    words = _pass_words(rows, first, lane, KIND, BLOCKS, HEIGHT, EACH)
    wait_for_inputs(OVERLAP)
    memory, factors = _digits(x, places, K, COUNT, WARPS, EACH)
    sums = gl.full([WARPS, 2, 8, 4, 2], 0.0, gl.float32, _sums_layout(WARPS))
    for number in range(1, GROUPS // EACH):
        # the next pass is loaded while this one is multiplied
        later = _pass_words(rows, first + EACH, lane, KIND, BLOCKS, HEIGHT, EACH)
        sums += _pass_product(words, memory, number - 1, table, first, lane, KIND, COUNT, WARPS, EACH)
        words = later
        first += EACH
    sums += _pass_product(words, memory, GROUPS // EACH - 1, table, first, lane, KIND, COUNT, WARPS, EACH)
    return _results(sums, factors, WARPS)
