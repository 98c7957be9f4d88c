"""Products with GGUF blocks that are decoded in registers, on tensor cores.

For few tokens, a thread decodes the columns that the tensor core's operand expects of it, in another order: of 32
columns, thread t of four has those of octet t. The inputs are loaded in the same order. The bits of a code are those of
a bf16 number, code * 2 ** -133; inputs are scaled up to compensate. Scales multiply the fp32 sums of 32 columns. For
many tokens, values are split into two bf16 numbers, which together have 16 to 17 significant bits.
"""

import triton
import triton.language as tl

from dsv4cli.kernels.ggml.kernel.fields import block_and_group, blocks, stored_words, tile_rows
from dsv4cli.kernels.ggml.kernel.octet_values import octet_values
from dsv4cli.kernels.ggml.kernel.octets import bias, decoded, has_halves, has_offset, minus_bias
from dsv4cli.kernels.pdl import wait_for_inputs

# columns whose sums have one scale, and rows of the operand
GROUP, ROWS = 32, 16
# inputs are multiplied by the first, sums by the second
_INPUT_FACTOR, _SUM_FACTOR = tl.constexpr(2.0**64), tl.constexpr(2.0**69)


@triton.jit
def _operand(a, b, c, d, WARPS: tl.constexpr):
    """Return the codes of eight columns, [64 * WARPS], as a left operand [WARPS, 16, 32].

    Of 16 columns of the operand, a thread has four.
    """
    words = tl.join(tl.join(a, c), tl.join(b, d))
    low = words.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (words >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    each = tl.reshape(tl.join(low, high), (2, WARPS, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(each, (1, 0, 2, 4, 3, 5, 6)), (WARPS, 16, 32))


@triton.jit
def _by_row(values, WARPS: tl.constexpr):
    """Return values [64 * WARPS], the same for four threads, for products [WARPS, 16, N]: [WARPS, 16, 1, 4, 2]."""
    mine = tl.reshape(tl.permute(tl.reshape(values, (2, WARPS, 8, 4)), (1, 0, 2, 3)), (WARPS, 16, 4))
    return tl.join(mine, mine)[:, :, None]


@triton.jit
def _of_half(values, thread, HALF: tl.constexpr):
    """Return the values of two of four threads for all four, exactly."""
    kept = tl.reshape(tl.where(thread // 2 == HALF, values, 0.0), (values.shape[0] // 4, 4))
    own = (tl.sum(kept, 1) * 0.5)[:, None]
    return tl.reshape(tl.broadcast_to(own, kept.shape), values.shape)


@triton.jit
def _scaled(products, scale, WARPS: tl.constexpr):
    """Return products [WARPS, 16, N] times the scale of their row, [64 * WARPS]."""
    N: tl.constexpr = products.shape[2]
    by_pair = tl.reshape(products, (WARPS, 16, N // 8, 4, 2)) * _by_row(scale, WARPS)
    return tl.reshape(by_pair, (WARPS, 16, N))


@triton.jit
def _of_codes(codes, mask, right, KIND: tl.constexpr, WARPS: tl.constexpr):
    """Return the products of codes without their bias. mask: -1 for threads whose codes count, 0 for the others."""
    a, b, c, d = codes
    if bias(KIND):
        # exact, too: one sum of the tensor core begins with the other
        minus = mask & minus_bias(KIND)
        start = tl.dot(_operand(minus, minus, minus, minus, WARPS), right)
    else:
        start = tl.zeros((WARPS, 16, right.shape[2]), tl.float32)
    return tl.dot(_operand(a & mask, b & mask, c & mask, d & mask, WARPS), right, start)


@triton.jit
def _product(words, table, group, right, KIND: tl.constexpr, WARPS: tl.constexpr):
    """Return the products of 32 columns per warp with a right operand [WARPS, 32, N]: fp32 [WARPS, 16, N].

    group: which 32 columns of their block they are.
    """
    thread = tl.arange(0, 64 * WARPS) % 4
    codes, scale, offset, offset_scale = decoded(words, group, thread, table, KIND)
    if has_halves(KIND):
        total = tl.zeros((WARPS, 16, right.shape[2]), tl.float32)
        for half in tl.static_range(2):
            part = _of_codes(codes, tl.where(thread // 2 == half, -1, 0), right, KIND, WARPS)
            total += _scaled(part, _of_half(scale, thread, half), WARPS)
    else:
        part = _of_codes(codes, tl.full((64 * WARPS,), -1, tl.int32), right, KIND, WARPS)
        total = _scaled(part, scale, WARPS)
        if has_offset(KIND):
            two = offset | offset << 16
            total -= _scaled(tl.dot(_operand(two, two, two, two, WARPS), right), offset_scale, WARPS)
    return total


@triton.jit
def _inputs(x, offset, octet, WARPS: tl.constexpr):
    """Return tokens as a right operand [WARPS, 32, N].

    offset: int64 [4 * WARPS * N, 1], where tokens begin in x; octet: int32, the octets, of the same shape.
    """
    N: tl.constexpr = offset.shape[0] // (4 * WARPS)
    values = tl.load(x + offset + octet * 8 + tl.arange(0, 8)[None])
    values = (values.to(tl.float32) * _INPUT_FACTOR).to(tl.bfloat16)
    each = tl.reshape(values, (N // 8, WARPS, 8, 4, 2, 2, 2))
    # as `_pairs` has them: the first with the third column
    return tl.reshape(tl.permute(each, (1, 4, 3, 6, 5, 0, 2)), (WARPS, 32, N))


@triton.jit
def operand_rows(WARPS: tl.constexpr):
    """Return 0 to 15, the rows of `few_products`, as it takes them: [64 * WARPS]."""
    number = tl.arange(0, 64 * WARPS)
    return number // (32 * WARPS) * 8 + number // 4 % 8


@triton.jit
def operand_tokens(N: tl.constexpr, WARPS: tl.constexpr):
    """Return 0 to N - 1, the tokens of `few_products`, as it takes them: [4 * WARPS * N, 1]."""
    number = tl.arange(0, 4 * WARPS * N)[:, None]
    return number // (32 * WARPS) * 8 + number // 4 % 8


@triton.jit
def _pass_words(
    weights, row, first, K: tl.constexpr, KINDS: tl.constexpr, HEIGHTS: tl.constexpr, EACH: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Return what is stored of EACH groups of 32 columns from group `first` on, of each matrix, for N tokens."""
    lane, found = tl.arange(0, row.shape[0]) % 4, ()
    for i in tl.static_range(EACH):
        for m in tl.static_range(len(weights)):
            b, group = block_and_group(first, i, KINDS[m], EACH)
            rows = tile_rows(weights[m], row, K, KINDS[m], HEIGHTS[m])
            found += (stored_words(rows, b, group, lane, KINDS[m], blocks(KINDS[m], K), HEIGHTS[m]),)
    if N == 8:
        # otherwise ptxas delays some of the loads until registers are free, so that a pass waits for memory three times
        tl.debug_barrier()
    return found


@triton.jit
def _added(
    sums, words, x, offset, octet, tables, first, KINDS: tl.constexpr, WARPS: tl.constexpr, EACH: tl.constexpr
):  # fmt: skip
    """Add the products of EACH groups of 32 columns to the sums. first: the first group; octet: of the inputs."""
    for i in tl.static_range(EACH):
        right, done = _inputs(x, offset, octet + i * 4, WARPS), ()
        for m in tl.static_range(len(sums)):
            group = block_and_group(first, i, KINDS[m], EACH)[1]
            done += (sums[m] + _product(words[i * len(sums) + m], tables[m], group, right, KINDS[m], WARPS),)
        sums = done
    return sums


@triton.jit
def few_products(
    x,  # bf16
    offset,  # int64, where each of `operand_tokens` begins in x
    weights,  # tuple of matrices [.., K]: first bytes, tables and, as constants, types
    tables,
    row,  # the row of all matrices for each of `operand_rows`
    K: tl.constexpr,  # a multiple of 32 * WARPS * EACH
    KINDS: tl.constexpr,
    HEIGHTS: tl.constexpr,  # rows of a tile of each
    WARPS: tl.constexpr,
    EACH: tl.constexpr,
    OVERLAP: tl.constexpr,  # whether to wait for the kernel that computes x, once the first weights are on their way
):
    """Return the products of 16 rows of each matrix with N tokens: a tuple of fp32 [16, N].

    A token's sums do not depend on the others. EACH: groups of 32 columns in a pass of the loop.
    """
    N: tl.constexpr = offset.shape[0] // (4 * WARPS)
    GROUPS: tl.constexpr = K // 32 // WARPS
    # each warp has columns of its own
    number, given = tl.arange(0, 64 * WARPS), tl.arange(0, 4 * WARPS * N)[:, None]
    first, octet = number // 32 % WARPS * GROUPS, given // 32 % WARPS * (4 * GROUPS) + given % 4
    sums = ()
    for _ in tl.static_range(len(weights)):
        sums += (tl.zeros((WARPS, 16, N), tl.float32),)
    words = _pass_words(weights, row, first, K, KINDS, HEIGHTS, EACH, N)
    wait_for_inputs(OVERLAP)
    sums = _added(sums, words, x, offset, octet, tables, first, KINDS, WARPS, EACH)
    for start in tl.range(EACH, GROUPS, EACH, num_stages=1):
        words = _pass_words(weights, row, first + start, K, KINDS, HEIGHTS, EACH, N)
        sums = _added(sums, words, x, offset, octet + start * 4, tables, first + start, KINDS, WARPS, EACH)
    results = ()
    for m in tl.static_range(len(weights)):
        results += (tl.sum(sums[m], 0) * _SUM_FACTOR,)
    return results


@triton.jit
def many_products(
    x,
    place,  # int64 [COLUMNS] where each token's row begins in x
    weight,
    table,
    row,  # int [R]
    K: tl.constexpr,
    KIND: tl.constexpr,
    HEIGHT: tl.constexpr,  # rows of a tile
    OCTETS: tl.constexpr,  # a divisor of K // 8
):
    """Return the products of rows of a matrix with tokens, fp32 [R, COLUMNS]."""
    WIDTH: tl.constexpr = OCTETS * 8
    total = tl.zeros((row.shape[0], place.shape[0]), tl.float32)
    for start in tl.range(0, K // 8, OCTETS):
        columns = tl.load(x + place[None] + (start * 8 + tl.arange(0, WIDTH)[:, None]))
        octet = start + tl.arange(0, OCTETS)[None]
        rows = tile_rows(weight, row[:, None], K, KIND, HEIGHT)
        found = octet_values(rows, octet, table, KIND, blocks(KIND, K), HEIGHT)
        values = tl.reshape(found, (row.shape[0], WIDTH))
        if columns.dtype == tl.bfloat16:
            high = values.to(tl.bfloat16)
            low = (values - high.to(tl.float32)).to(tl.bfloat16)
            total = tl.dot(low, columns, tl.dot(high, columns, total))
        else:
            total = tl.dot(values, columns, total, input_precision="ieee")
    return total
