"""Products of a few tokens with rows of FP4 or FP8 weights, decoded in registers.

A thread of the tensor core's operand holds columns of one row; so that these are the 16 bytes it loads at once, the
columns are taken in another order. Of each word of 2H codes (8 of FP4, 4 of FP8) codes j and j + H become one pair of
bf16. `prepare.arranged` puts the inputs in the same order: of the 8H columns of 4 words, place [j, v, u, h] holds
column [u, v, h, j] (H x 2 x 2 x 2, the last counted fastest; word 2u + v, code j or j + H).

Each warp of a program takes a part of the columns; their sums are added at the end.
Four threads that share a row hold four blocks of 32 columns, each with its own scale. Their sums are kept apart: every
token stands in four columns of the other operand, in each with only one of the blocks.
"""

import triton
import triton.language as tl

# codes become bf16 numbers with the exponent's bits as they are, far too small; inputs are as much larger
INPUT_FACTOR = 2.0**64
_FP4_FACTOR = tl.constexpr(2.0 ** (126 - 64))  # e2m1 has an exponent bias of 1, bf16 of 127
_FP8_FACTOR = tl.constexpr(2.0 ** (120 - 64))  # e4m3 one of 7


@triton.jit
def row_in_load_order(ROWS: tl.constexpr):
    """[ROWS] the row that is loaded at each place, such that a thread loads what it multiplies: 8 and 8 of 16."""
    place = tl.arange(0, ROWS)
    return place % 8 + place // 8 % 2 * 8 + place // 16 * 16


@triton.jit
def _fp4_pairs(words, J: tl.constexpr):
    """Codes J and J + 4 of each word as bf16 * 2 ** -126 in its halves: sign to bit 15, the rest to bits 8..6."""
    if J == 3:
        bits = ((words >> 6) & 0x01C001C0) | (words & -0x7FFF8000)
    elif J == 2:
        bits = ((words >> 8) & 0x000F000F) * 0x1040 & -0x7E3F7E40
    elif J == 1:
        bits = (words & 0x00F000F0) * 0x0104 & -0x7E3F7E40
    else:
        bits = (words & 0x000F000F) * 0x1040 & -0x7E3F7E40
    return bits


@triton.jit
def _fp8_pairs(words, J: tl.constexpr):
    """Codes J and J + 2 of each word as bf16 * 2 ** -120 in its halves: sign to bit 15, the rest to bits 10..4."""
    rest = words >> 4 if J == 1 else words << 4
    sign = words if J == 1 else words << 8
    return (rest & 0x07F007F0) | (sign & -0x7FFF8000)


@triton.jit
def _operand(words, J: tl.constexpr, H: tl.constexpr):
    """Pairs J of words [S, ROWS, 16] -> bf16 [S, ROWS, 32] in the order of columns above."""
    S: tl.constexpr = words.shape[0]
    ROWS: tl.constexpr = words.shape[1]
    pairs = _fp4_pairs(words, J) if H == 4 else _fp8_pairs(words, J)
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    # [S, ROWS, thread, half of its words, 2 words of 2]
    four = tl.reshape(tl.join(low, high), (S, ROWS, 4, 2, 4))
    return tl.reshape(tl.permute(four, (0, 1, 3, 2, 4)), (S, ROWS, 32))


@triton.jit
def _inputs(place, inside, J: tl.constexpr, H: tl.constexpr):
    """place: pointers [4 * N, S, 8] to the inputs of a step, four threads a column -> bf16 [S, 32, N]."""
    N: tl.constexpr = place.shape[0] // 4
    S: tl.constexpr = place.shape[1]
    if H == 4:
        # three of four threads load nothing: cheap from the L1 cache, not so through shared memory, to which the
        # compiler would copy ahead what a loop loads for a product; from within a branch it does not
        loaded = tl.zeros(place.shape, tl.bfloat16)
        if tl.num_programs(0) > 0:
            loaded = tl.load(place + 8 * J, inside, other=0.0)
    else:
        loaded = tl.load(place + 8 * J, inside, other=0.0)
    # [N, thread, S, word of 2, half of the words, 2]
    return tl.reshape(tl.permute(tl.reshape(loaded, (N, 4, S, 2, 2, 2)), (2, 4, 1, 3, 5, 0)), (S, 32, N))


@triton.jit
def _steps(tile):
    """The columns of a tile [S, ROWS, 1, 2 or 4]."""
    S: tl.constexpr = tile.shape[0]
    ROWS: tl.constexpr = tile.shape[1]
    if tile.shape[2] == 4:
        even, odd = tl.split(tl.reshape(tile, (S, ROWS, 2, 2)))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        steps = (first, second, third, fourth)
    elif tile.shape[2] == 2:
        first, second = tl.split(tile)
        steps = (first, second)
    else:
        steps = (tl.reshape(tile, (S, ROWS)),)
    return steps


@triton.jit
def _add_step(sums, words, scales, place, inside, step, H: tl.constexpr):
    """sums fp32 [S, ROWS, N] of each matrix and one more step of 32 * H columns, of each of S parts of a row."""
    loaded, products, done = (), (), ()
    for m in tl.static_range(len(words)):
        loaded += (tl.load(words[m] + 16 * step),)
        products += (tl.zeros(sums[m].shape, tl.float32),)
    for j in tl.static_range(H):
        given = _inputs(place + 32 * H * step, inside, j, H)
        further = ()
        for m in tl.static_range(len(words)):
            further += (tl.dot(_operand(loaded[m], j, H), given, products[m]),)
        products = further
    for m in tl.static_range(len(words)):
        if H == 4:
            done += (sums[m] + _scaled(products[m], scales[m]),)
        else:
            scale = tl.load(scales[m] + step // 2).to(tl.int32)
            done += (sums[m] + products[m] * (scale << 23).to(tl.float32, bitcast=True),)
    return done


@triton.jit
def _products(
    words,  # tuple of pointers [S, ROWS, 16] to the words of step 0
    scales,  # tuple of pointers to their scales: of FP4 [S, ROWS, EACH], of the first steps; of FP8 [S, 1, 1]
    place,  # as _inputs takes it
    inside,
    STEPS: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
    H: tl.constexpr,
):
    """Sums [S, ROWS, N] of each matrix over all steps, EACH of them at a time."""
    sums = ()
    for m in tl.static_range(len(words)):
        sums += (tl.zeros((place.shape[1], words[m].shape[1], place.shape[0] // 4), tl.float32),)
    for start in tl.range(0, STEPS, EACH, num_stages=STAGES):
        loaded = ()
        if H == 4:
            for m in tl.static_range(len(words)):
                loaded += (_steps(tl.load(scales[m] + start)),)
        for step in tl.static_range(EACH):
            of_step = scales
            if H == 4:
                of_step = ()
                for m in tl.static_range(len(words)):
                    of_step += (loaded[m][step],)
            sums = _add_step(sums, words, of_step, place, inside, start + step, H)
    return sums


@triton.jit
def _scaled(products, scales):
    """products fp32 [S, ROWS, 4 * TOKENS] times the four scales of each row, the bytes of an int32 [S, ROWS]."""
    S: tl.constexpr = products.shape[0]
    ROWS: tl.constexpr = products.shape[1]
    bits = scales[:, :, None] >> (tl.arange(0, 4) % 2 * 16)[None, None]
    low, high = (bits << 23) & 0x7F800000, (bits << 15) & 0x7F800000
    factor = tl.join(low, high).to(tl.float32, bitcast=True)  # [S, ROWS, 4, 2]: scales 0 to 3, and again
    by_pair = tl.reshape(products, (S, ROWS, products.shape[2] // 8, 4, 2))
    return tl.reshape(by_pair * factor[:, :, None], products.shape)


@triton.jit
def fp4_products(
    words,  # tuple of pointers [ROWS, 16] to the int32 words of some rows of a matrix, in load order
    scales,  # tuple of pointers [ROWS] to the int32 words of four scales of these rows, in order
    inputs,  # arranged, * INPUT_FACTOR
    offset,  # int64 [16 * TOKENS] where each token's row of inputs begins, for four threads of four columns
    real,  # bool [16 * TOKENS] whether there is such a token
    K: tl.constexpr,
    TOKENS: tl.constexpr,  # even
    SPLITS: tl.constexpr,  # warps of the program: each takes a part of the columns
    EACH: tl.constexpr,  # steps of 128 columns that are loaded together: 1, 2 or 4
    STAGES: tl.constexpr,
):
    """Tuple of fp32 [ROWS, TOKENS]: the product of each matrix's rows with each token."""
    split = tl.arange(0, SPLITS)[:, None, None]
    number = tl.arange(0, 16 * TOKENS)
    part = tl.arange(0, SPLITS)[None, :, None] * (K // SPLITS)
    place = inputs + (offset + number % 4 * 32)[:, None, None] + part + tl.arange(0, 8)[None, None]
    # of the four columns, each thread's inputs stand in its own
    inside = tl.broadcast_to((real & (number // 4 % 4 == number % 4))[:, None, None], (16 * TOKENS, SPLITS, 8))
    split_words, split_scales, results = (), (), ()
    for m in tl.static_range(len(words)):
        split_words += (words[m][None] + split * (K // 8 // SPLITS),)
        split_scales += (scales[m][None, :, None] + split * (K // 128 // SPLITS) + tl.arange(0, EACH)[None, None],)
    sums = _products(split_words, split_scales, place, inside, K // 128 // SPLITS, EACH, STAGES, 4)
    for m in tl.static_range(len(words)):
        by_block = tl.reshape(tl.sum(sums[m], 0), (sums[m].shape[1], TOKENS, 4))
        results += (tl.sum(by_block, 2) * _FP4_FACTOR,)
    return results


@triton.jit
def fp8_products(
    words,  # as above, of rows within one block of 128
    scales,  # tuple of pointers to the first scale (uint8) of that block
    inputs,  # arranged, * INPUT_FACTOR
    offset,  # int64 [4 * TOKENS] for four threads of one column
    real,  # bool [4 * TOKENS]
    K: tl.constexpr,
    TOKENS: tl.constexpr,  # a multiple of 8
    SPLITS: tl.constexpr,
    EACH: tl.constexpr,
    STAGES: tl.constexpr,
):
    """As fp4_products, of FP8 rows."""
    split = tl.arange(0, SPLITS)[:, None, None]
    thread = tl.arange(0, 4 * TOKENS) % 4
    part = tl.arange(0, SPLITS)[None, :, None] * (K // SPLITS)
    place = inputs + (offset + 16 * thread)[:, None, None] + part + tl.arange(0, 8)[None, None]
    inside = tl.broadcast_to(real[:, None, None], (4 * TOKENS, SPLITS, 8))
    split_words, split_scales, results = (), (), ()
    for m in tl.static_range(len(words)):
        split_words += (words[m][None] + split * (K // 4 // SPLITS),)
        split_scales += (scales[m] + split * (K // 128 // SPLITS),)
    sums = _products(split_words, split_scales, place, inside, K // 64 // SPLITS, EACH, STAGES, 2)
    for m in tl.static_range(len(words)):
        results += (tl.sum(sums[m], 0) * _FP8_FACTOR,)
    return results
