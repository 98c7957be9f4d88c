"""Products of a few tokens with rows of FP4, NVFP4 or FP8 weights, dequantized in registers.

In the tensor core's operand a thread holds columns of one row. To make these the 16 bytes of a single load, the columns
are permuted. From each word of 2H codes (8 of FP4, 4 of FP8), codes j and j + H become one pair of bf16.
`prepare.arranged` permutes the inputs in the same way: of the 8H columns of 4 words, place [j, v, u, h] holds column
[u, v, h, j] (H x 2 x 2 x 2, the last index fastest; word 2u + v, code j or j + H).

Each warp of a program computes rows of its own or, if there are few rows, a part of the columns; then the sums are
added at the end. Weights go from memory to the registers in which they are decoded, and those of later steps are loaded
while earlier ones are multiplied; `first_steps` starts this even before the inputs are ready. (The compiler prefetches
within a loop iteration, hardly across iterations.) The order of a tensor's dimensions determines which thread loads
what: the last dimension first, then from the left, lanes before warps. Four threads that share a row hold four blocks
of 32 columns, each with its own scale. Their sums are kept separate: every token has four columns of the other operand,
each with only one of the blocks. NVFP4 differs in one respect: its scales, of 16 columns, multiply the codes instead of
the sums, which is exact in bf16. They are stored eight to an int64, those of FP4 four to an int32; the functions below
tell the formats apart by that type. If the scales are powers of two and equal for both halves of 32 columns, every sum
is that of FP4 times a power of two.
"""

import triton
import triton.language as tl

# tokens of the smallest product: the tensor core has eight columns, and with FP4 a token needs four
FP4_TOKENS, FP8_TOKENS = 2, 8
# fewest rows of a warp: those of the tensor core's operand
FEWEST_ROWS = tl.constexpr(16)
# codes become bf16 numbers with unchanged exponent bits, far too small; inputs are scaled up to compensate
INPUT_FACTOR = 2.0**64
_FP4_FACTOR = tl.constexpr(2.0 ** (126 - 64))  # e2m1 has an exponent bias of 1, bf16 of 127
_FP8_FACTOR = tl.constexpr(2.0 ** (120 - 64))  # e4m3 one of 7
_NVFP4_FACTOR = tl.constexpr(2.0 ** (126 - 7 - 64))  # see _e4m3_factors


@triton.jit
def _fp4_pairs(words, J: tl.constexpr):
    """Return codes J and J + 4 of each word as bf16 * 2 ** -126 in its halves: sign in bit 15, rest in bits 8..6."""
    given = words >> 8 if J >= 2 else words  # one shift for two pairs
    bits = (given & 0x00F000F0) * 0x0104 if J % 2 else (given & 0x000F000F) * 0x1040
    return bits & -0x7E3F7E40


@triton.jit
def _fp8_pairs(words, J: tl.constexpr):
    """Return codes J and J + 2 of each word as bf16 * 2 ** -120 in its halves: sign in bit 15, rest in bits 10..4."""
    rest = words >> 4 if J == 1 else words << 4
    sign = words if J == 1 else words << 8
    return (rest & 0x07F007F0) | (sign & -0x7FFF8000)


@triton.jit
def _e4m3_factors(scales):
    """Return each word's factor * 2 ** 7, bf16 [S, ROWS, 16]; one multiplication cannot scale further.

    scales: int64 [S, ROWS, 4], the eight e4m3 scales of 128 columns, repeated 4 times.
    """
    mine = (scales >> (tl.arange(0, 4) * 16)[None, None]).to(tl.int32)
    # exponent and mantissa to bits 10..4: e4m3 * 2 ** -120
    bits = tl.join((mine & 0x7F) << 4, (mine >> 4) & 0x7F0)
    two = bits.to(tl.int16).to(tl.bfloat16, bitcast=True) * tl.full([1, 1, 1, 1], 2.0**127, tl.float32).to(tl.bfloat16)
    return tl.reshape(tl.join(two, two), (scales.shape[0], scales.shape[1], 16))


@triton.jit
def _operand(words, factors, J: tl.constexpr, H: tl.constexpr):
    """Decode pairs J of words [S, ROWS, 16] to bf16 [S, ROWS, 32] in the column order above, times NVFP4's factors."""
    S: tl.constexpr = words.shape[0]
    ROWS: tl.constexpr = words.shape[1]
    pairs = _fp4_pairs(words, J) if H == 4 else _fp8_pairs(words, J)
    low = pairs.to(tl.int16).to(tl.bfloat16, bitcast=True)
    high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    if factors is not None:
        # the upper half first: ptxas then multiplies both in one register
        high = high * factors
        low = low * factors
    # [S, ROWS, thread, half of its words, 2 words of 2]
    four = tl.reshape(tl.join(low, high), (S, ROWS, 4, 2, 4))
    return tl.reshape(tl.permute(four, (0, 1, 3, 2, 4)), (S, ROWS, 32))


@triton.jit
def row_numbers(ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return 0 .. ROWS - 1 in the order of pointers to rows.

    The shape is [8, 1, ROWS / 8], or [8, WARPS, ..] if warps have rows of their own.
    """
    OWN: tl.constexpr = ROWS // WARPS if ROWS // WARPS >= FEWEST_ROWS else ROWS
    rows = tl.arange(0, 8)[:, None, None] + tl.arange(0, OWN // 8)[None, None] * 8
    if OWN < ROWS:
        rows += tl.arange(0, WARPS)[None, :, None] * OWN
    return rows


@triton.jit
def parts_of(K: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return the first column of each warp's part of K columns, [1, WARPS, 1]: 0 if warps have rows of their own."""
    return tl.arange(0, WARPS)[None, :, None] * (0 if WARPS > 1 and ROWS // WARPS >= FEWEST_ROWS else K // WARPS)


@triton.jit
def columns_of(K: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return how many of K columns a warp multiplies."""
    return K if ROWS // WARPS >= FEWEST_ROWS else K // WARPS


@triton.jit
def of_program(sums, ROWS: tl.constexpr):
    """Combine the warps' sums [WARPS, rows, TOKENS], of their rows or of their columns, to [ROWS, TOKENS]."""
    return tl.sum(sums, 0) if sums.shape[1] == ROWS else tl.reshape(sums, (ROWS, sums.shape[2]))


@triton.jit
def fp4_rows(w, scale, row, part, K: tl.constexpr, EACH: tl.constexpr):
    """Return pointers to rows of all matrices [N, K], from the column where a split's part starts.

    row: int64 [8, 1 or S, R]; part: [1, S, 1]. Returns pointers to the words of codes of the first step of 128 columns,
    [8, S, R, 16], and to the words of scales of the first EACH steps, each 4 times, [4, 8, S, R, EACH].
    """
    words = (w + row * (K // 8) + part // 8)[:, :, :, None] + tl.arange(0, 16)[None, None, None]
    scales = (scale + row * (K // 128) + part // 128)[None, :, :, :, None] + tl.arange(0, EACH)[None, None, None, None]
    return words, tl.broadcast_to(scales, (4, words.shape[0], words.shape[1], words.shape[2], EACH))


@triton.jit
def fp8_rows(w, scale, first, part, K: tl.constexpr, ROWS: tl.constexpr, WARPS: tl.constexpr):
    """Return the pointers of `fp4_rows` for FP8 rows first .. first + ROWS - 1 of one matrix, in steps of 64 columns.

    The rows are in one block of 128.
    """
    words = w + (first + row_numbers(ROWS, WARPS)).to(tl.int64) * (K // 4) + part // 4
    scales = scale + first // 128 * (K // 128) + tl.reshape(part, (WARPS,)) // 128
    return words[:, :, :, None] + tl.arange(0, 16)[None, None, None], scales


@triton.jit
def _load(place, more):
    """Load from pointers. more: whether to load, 0 otherwise.

    With more None, always load: a kernel does this before it has waited for its inputs. The launch before the previous
    one may have copied experts from host memory, so the load bypasses L1, which may be stale.
    """
    return tl.load(place, cache_modifier=".cg") if more is None else tl.load(place, more, other=0)


@triton.jit
def _load_step(words, step, more):
    """Load the words of a step: a tuple with one tensor per matrix."""
    loaded = ()
    for m in tl.static_range(len(words)):
        loaded += (_load(words[m] + 16 * step, more),)
    return loaded


@triton.jit
def _load_scales(scales, step, more, EACH: tl.constexpr, H: tl.constexpr):
    """Load the scales of EACH steps: for FP4 one tensor per matrix, for FP8 one per step and matrix."""
    loaded = ()
    if H == 4:
        for m in tl.static_range(len(scales)):
            loaded += (_load(scales[m] + step, more),)
    else:
        for j in tl.static_range(EACH):
            for m in tl.static_range(len(scales)):
                loaded += (_load(scales[m] + (step + j) // 2, more),)
    return loaded


@triton.jit
def first_steps(words, scales, AHEAD: tl.constexpr, EACH: tl.constexpr):
    """Load each matrix's codes of AHEAD steps and scales of EACH steps, for the products below.

    words, scales: tuples of pointers as above.
    """
    H: tl.constexpr = 4 if len(scales[0].shape) == 5 else 2
    loaded = ()
    for j in tl.static_range(AHEAD):
        loaded += _load_step(words, j, None)
    return loaded, _load_scales(scales, 0, None, EACH, H)


@triton.jit
def _inputs(place, inside, J: tl.constexpr):
    """Load the inputs of a step: bf16 [S, 32, N]. place: pointers [32, S, N / 8, 8] in the order of `input_threads`."""
    S: tl.constexpr = place.shape[1]
    EIGHTS: tl.constexpr = place.shape[2]
    loaded = tl.load(place + 8 * J, inside, other=0.0)
    # [column of eight, thread, S, eight, word of 2, half of the words, 2]
    by_word = tl.reshape(loaded, (8, 4, S, EIGHTS, 2, 2, 2))
    return tl.reshape(tl.permute(by_word, (2, 5, 1, 4, 6, 3, 0)), (S, 32, EIGHTS * 8))


@triton.jit
def input_threads(N: tl.constexpr):
    """Return the numbers of four threads for each of N columns of inputs: [32, 1, N / 8, 1].

    A lane has some of every eight.
    """
    return tl.arange(0, 32)[:, None, None, None] + tl.arange(0, N // 8)[None, None, :, None] * 32


@triton.jit
def _inputs_of(inputs, offset, part):
    """Return pointers for `_inputs`. offset: [32, 1, N / 8, 1]; part: [1, S, 1]."""
    return inputs + offset + part[:, :, :, None] + tl.arange(0, 8)[None, None, None]


@triton.jit
def _scale_of(scales, J: tl.constexpr):
    """Select the scales of one step from scales [4, 8, S, R, up to 8]: [S, 8 * R, 4]."""
    S: tl.constexpr = scales.shape[2]
    R: tl.constexpr = scales.shape[3]
    for _ in tl.static_range(3):
        if scales.shape[4] > 1:
            halves = tl.reshape(scales, (4, 8, S, R, 2, scales.shape[4] // 2))
            first, second = tl.split(tl.permute(halves, (0, 1, 2, 3, 5, 4)))
            scales = second if J // first.shape[4] % 2 else first
    return tl.reshape(tl.permute(tl.reshape(scales, (4, 8, S, R)), (2, 3, 1, 0)), (S, 8 * R, 4))


@triton.jit
def _scaled(products, scales):
    """Multiply products fp32 [S, ROWS, 4 * TOKENS] by the four scales of each row.

    scales: the four are the bytes of an int32, which is repeated 4 times.
    """
    S: tl.constexpr = products.shape[0]
    ROWS: tl.constexpr = products.shape[1]
    bits = scales >> (tl.arange(0, 4) % 2 * 16)[None, None]
    low, high = (bits << 23) & 0x7F800000, (bits << 15) & 0x7F800000
    factor = tl.join(low, high).to(tl.float32, bitcast=True)  # [S, ROWS, 4, 2]: scales 0 to 3, and again
    by_pair = tl.reshape(products, (S, ROWS, products.shape[2] // 8, 4, 2))
    return tl.reshape(by_pair * factor[:, :, None], products.shape)


@triton.jit
def _step(tile, given, scale, shape: tl.constexpr, H: tl.constexpr):
    """Return the product of one matrix in a step of 32 * H columns: fp32 [S, ROWS, N], for each of S parts of a row."""
    words = tl.reshape(tl.permute(tile, (1, 2, 0, 3)), (shape[0], shape[1], 16))
    factors = _e4m3_factors(scale) if scale.dtype == tl.int64 else None
    product = tl.zeros(shape, tl.float32)
    for j in tl.static_range(H):
        product = tl.dot(_operand(words, factors, j, H), given[j], product)
    if scale.dtype == tl.int64:
        pass
    elif H == 4:
        product = _scaled(product, scale)
    else:
        product *= (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None, None]
    return product


@triton.jit
def _products(
    words,  # tuple of pointers, as fp4_rows or fp8_rows has them
    scales,
    tiles,  # what first_steps has loaded
    factors,
    place,  # as _inputs takes it, of the first step
    inside,
    STEPS: tl.constexpr,
    EACH: tl.constexpr,  # steps in a pass of the loop
    H: tl.constexpr,
):
    """Return the sums [S, ROWS, N] of each matrix over all steps."""
    MATRICES: tl.constexpr = len(words)
    AHEAD: tl.constexpr = len(tiles) // len(words)
    sums = ()
    for m in tl.static_range(MATRICES):
        sums += (tl.zeros((place.shape[1], words[m].shape[2] * 8, place.shape[2] * 8), tl.float32),)
    for start in tl.range(0, STEPS, EACH, num_stages=1):
        next_pass = start + EACH < STEPS
        next_factors = _load_scales(scales, start + EACH, next_pass, EACH, H)
        for j in tl.static_range(EACH):
            given, done, waiting = (), (), ()
            coming = start + j + AHEAD  # may be beyond the end; if all are in the next iteration, one check is enough
            for i in tl.static_range(len(tiles) - MATRICES):
                waiting += (tiles[i + MATRICES],)
            for i in tl.static_range(H):
                given += (_inputs(place + 32 * H * (start + j), inside, i),)
            for m in tl.static_range(MATRICES):
                scale = _scale_of(factors[m], j) if H == 4 else factors[j * MATRICES + m]
                done += (sums[m] + _step(tiles[m], given, scale, sums[m].shape, H),)
                waiting += (_load(words[m] + 16 * coming, next_pass if AHEAD == EACH else coming < STEPS),)
            sums, tiles = done, waiting
        factors = next_factors
    return sums


@triton.jit
def fp4_products(
    words,  # tuple of pointers, as fp4_rows has them
    scales,
    tiles,  # what first_steps has loaded
    factors,
    inputs,  # arranged, * INPUT_FACTOR
    offset,  # int64, of input_threads(4 * TOKENS): where each token's row of inputs begins, a token in four columns
    part,  # [1, SPLITS, 1] where those of each warp begin
    real,  # bool, whether there is such a token
    K: tl.constexpr,  # columns of a warp
    TOKENS: tl.constexpr,  # a multiple of FP4_TOKENS
    EACH: tl.constexpr,
):
    """Return each matrix's rows times each token, without scale_2: a tuple of fp32 [SPLITS, ROWS, TOKENS]."""
    SPLITS: tl.constexpr = words[0].shape[1]
    FACTOR: tl.constexpr = _NVFP4_FACTOR if scales[0].dtype.element_ty == tl.int64 else _FP4_FACTOR
    number = input_threads(4 * TOKENS)
    place = _inputs_of(inputs, offset + number % 4 * 32, part)
    # of a token's four columns, each thread fills its own
    inside = tl.broadcast_to(real & (number // 4 % 4 == number % 4), place.shape)
    sums = _products(words, scales, tiles, factors, place, inside, K // 128, EACH, 4)
    results = ()
    for m in tl.static_range(len(words)):
        by_block = tl.reshape(sums[m], (SPLITS, sums[m].shape[1], TOKENS, 4))
        results += (tl.sum(by_block, 3) * FACTOR,)
    return results


@triton.jit
def by_scale_2(sums, scale_2, row):
    """Multiply an expert's sums by its scale_2. row: in the stacks. scale_2: None for FP4."""
    return sums if scale_2 is None else sums * tl.load(scale_2 + row, cache_modifier=".cg")


@triton.jit
def fp8_products(
    words,  # tuple of pointers, as fp8_rows has them
    scales,
    tiles,
    factors,
    inputs,
    offset,  # int64, of input_threads(TOKENS), a token in one column
    part,
    real,
    K: tl.constexpr,  # columns of a warp
    TOKENS: tl.constexpr,  # a multiple of FP8_TOKENS
    EACH: tl.constexpr,
):
    """Compute `fp4_products` for FP8 rows."""
    place = _inputs_of(inputs, offset + input_threads(TOKENS) % 4 * 16, part)
    inside = tl.broadcast_to(real, place.shape)
    sums = _products(words, scales, tiles, factors, place, inside, K // 64, EACH, 2)
    results = ()
    for m in tl.static_range(len(words)):
        results += (sums[m] * _FP8_FACTOR,)
    return results
