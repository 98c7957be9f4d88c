"""Compression in Triton: a program makes one entry.

The program of a sequence's first group also makes the second where both read the rings, then keeps the raw rows: no
other reads or writes the sequence's rings. Of groups with many members that are mostly complete each program pools a
few channels, and a second launch makes the entries.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import butterflies, code_blocks, e2m1_pairs
from dsv4cli.kernels.compressor.pooling import keep_rows, plan_of, pooled_of
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import E2M1_MAX, FP4_AMAX_FLOOR, FP4_BLOCK, KV_BLOCK
from dsv4cli.kernels.keys.kernel import rounded_key
from dsv4cli.kernels.norm.kernel import normed
from dsv4cli.kernels.rope.kernel import turned, turns_of
from dsv4cli.kernels.rows import rows, tile

if TYPE_CHECKING:
    from dsv4cli.kernels.compressor import Plan, State

# what an entry goes through after norm and rotation
NOTHING, FP8, FP4, PACKED = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
FLOOR, LARGEST, FP4_COLUMNS = tl.constexpr(FP4_AMAX_FLOOR), tl.constexpr(E2M1_MAX), tl.constexpr(FP4_BLOCK)


def compress_keys(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: "State",
    plan: "Plan",
    weight: torch.Tensor,
    eps: float,
    round_keys: bool,
) -> "State":
    width, pairs = state.entries.shape[1], plan.rotation.shape[1]
    if width % 2 or (round_keys and (width - 2 * pairs) % KV_BLOCK):
        raise KernelUnsupported(f"the Triton kernel rounds {KV_BLOCK} columns at once, not {width - 2 * pairs}")
    return _compress(kv, score, ape, state, plan, weight, eps, width, FP8 if round_keys else NOTHING)


def compress_index_keys(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: "State",
    plan: "Plan",
    weight: torch.Tensor,
    eps: float,
) -> "State":
    width = state.entries.shape[1] * (1 if state.scale is None else 2)
    if width & (width - 1) or width < FP4_BLOCK:
        raise KernelUnsupported(f"a Hadamard rotation takes a power of two from {FP4_BLOCK} on, not {width} columns")
    return _compress(kv, score, ape, state, plan, weight, eps, width, FP4 if state.scale is None else PACKED)


def _compress(
    kv: torch.Tensor,
    score: torch.Tensor,
    ape: torch.Tensor,
    state: "State",
    plan: "Plan",
    weight: torch.Tensor,
    eps: float,
    width: int,
    form: tl.constexpr,
) -> "State":
    capacity, channels = state.kv.shape[1:]
    members, groups, tokens = len(ape) * channels // width, len(plan.entries), len(kv)
    turns, scale = torch.view_as_real(plan.rotation), state.entries if state.scale is None else state.scale
    fresh = rows(kv), rows(score)
    check(*fresh, state, plan, width)
    if not groups:
        return state
    inputs = (*fresh, ape.contiguous(), state.kv, state.score, plan.groups, plan.entries)
    entry = (weight.contiguous(), turns, state.entries, scale.view(torch.uint8))
    shape = {"KV_STRIDE": fresh[0].stride(0), "SCORE_STRIDE": fresh[1].stride(0), "CAPACITY": capacity}
    shape |= {"RATIO": len(ape), "MEMBERS": members, "CHANNELS": channels, "WIDTH": width}
    entry_shape = {"WIDTH": width, "TURNED": turns.shape[1], "FORM": form, "COLUMNS": tile(width)[1]}
    if members >= MANY and tokens >= groups * MANY // 2:
        part, kept, warps = SLICE
        pooled = torch.empty(groups, width, dtype=torch.float32, device=kv.device)
        _pool[(triton.cdiv(width, part), groups)](
            *inputs, pooled, **shape, COLUMNS=part, ROWS=triton.next_power_of_2(members), KEPT=kept, num_warps=warps,
        )  # fmt: skip
        _finish[(groups,)](pooled, plan.entries, *entry, turns.stride(0), eps, **entry_shape, num_warps=4)
    else:
        at_once, kept, warps = rows_at_once(members, width, tokens // groups)
        _entries[(groups,)](
            *inputs, *entry, turns.stride(0), eps, **shape | entry_shape, ROWS=at_once, KEPT=kept, num_warps=warps,
        )  # fmt: skip
    return state


# from how many members on a group's channels are divided among programs where most groups are complete
MANY = 32
# the channels of a program then, the raw rows that it keeps at once, its warps
SLICE = 32, 64, 4


def rows_at_once(members: int, width: int, tokens: int) -> tuple[int, int, int]:
    """How many members a program of a whole entry loads at once, how many rows it keeps at once, and its warps.

    tokens: of the step, for each group. H200, 4,096 tokens of ratio 4: 13.8 us at width 512 (with 8 members at once
    14.8), 7.2 at width 128; a thread has all members of four columns, with twice as many warps 23 and 10.
    """
    warps = min(max(width // 128, 1), 4)
    if members >= MANY:
        return 32, 1, 8
    if tokens <= 1:
        return 8, 1, warps
    return (4, 4, warps) if width > 128 else (8, 8, warps)


def check(kv: torch.Tensor, score: torch.Tensor, state: "State", plan: "Plan", width: int) -> None:
    """Raises KernelUnsupported for what the kernel does not take."""
    if not kv.dtype == score.dtype == state.kv.dtype == state.score.dtype == torch.float32:
        raise KernelUnsupported("raw rows and their rings are fp32")
    if not all(one.is_contiguous() for one in (*vars(state).values(), *vars(plan).values()) if one is not None):
        raise KernelUnsupported("the Triton kernel takes a contiguous state and plan")
    if kv.shape[1] not in (width, 2 * width):
        raise KernelUnsupported(f"raw rows are as wide as an entry or twice, not {kv.shape[1]} for {width}")


@triton.jit
def _entries(
    kv,  # [T, CHANNELS]
    score,
    ape,  # [RATIO, CHANNELS]
    ring_kv,  # [slots, CAPACITY, CHANNELS]
    ring_score,
    groups,  # int64 [G, 5]
    entries,  # int64 [G]
    weight,  # [WIDTH]
    turns,  # [G, TURNED, 2]: cosine, sine
    results,  # [cells, WIDTH], or e2m1 codes [cells, WIDTH / 2]
    scales,  # e8m0 [cells, WIDTH / 32]
    turn_stride,
    eps,
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    cell = tl.load(entries + group)
    slot, first, start, end, row = plan_of(groups, group)
    own = first + MEMBERS - RATIO  # the group's own first position
    leads = own <= start  # the sequence's first group
    column = tl.arange(0, COLUMNS)
    fresh_kv, fresh_score = kv + (row - start) * KV_STRIDE, score + (row - start) * SCORE_STRIDE
    old_kv, old_score = ring_kv + slot * CAPACITY * CHANNELS, ring_score + slot * CAPACITY * CHANNELS
    if leads | (first >= start):
        # the second group reads the rings too where overlap reaches behind the first token
        second = leads & (own < start) & (MEMBERS > RATIO) & (own + 2 * RATIO <= end)
        for extra in range(1 + second.to(tl.int32)):
            if cell >= 0:
                factor = tl.load(weight + column, column < WIDTH, other=0.0).to(tl.float32)
                turn = turns + (group + extra) * turn_stride
                cosine, sine = turns_of(turn, tl.full([1, 1], True, tl.int1), 1.0, TURNED, WIDTH, COLUMNS)
                if first + extra * RATIO >= start:
                    values = pooled_of(
                        fresh_kv, fresh_score, ape, old_kv, old_score, first + extra * RATIO, start, column, KV_STRIDE,
                        SCORE_STRIDE, CAPACITY, RATIO, MEMBERS, CHANNELS, WIDTH, True, ROWS,
                    )  # fmt: skip
                else:
                    values = pooled_of(
                        fresh_kv, fresh_score, ape, old_kv, old_score, first + extra * RATIO, start, column, KV_STRIDE,
                        SCORE_STRIDE, CAPACITY, RATIO, MEMBERS, CHANNELS, WIDTH, False, ROWS,
                    )  # fmt: skip
                values = tl.where(column < WIDTH, values, 0.0)[None]
                store_entry(values, factor[None], cosine, sine, results, scales, cell, eps, WIDTH, TURNED, FORM)
            cell = tl.load(entries + group + extra + 1, extra < second.to(tl.int32), other=-1)
        if leads:
            channel = tl.arange(0, COLUMNS * (CHANNELS // WIDTH))
            keep_rows(
                fresh_kv, fresh_score, ape, old_kv, old_score, start, end, channel, KV_STRIDE, SCORE_STRIDE,
                CAPACITY, RATIO, CHANNELS, KEPT,
            )  # fmt: skip


@triton.jit
def _pool(
    kv,  # these seven as in _entries
    score,
    ape,
    ring_kv,
    ring_score,
    groups,
    entries,
    pooled,  # fp32 [G, WIDTH]
    KV_STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr,
    CAPACITY: tl.constexpr,
    RATIO: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEPT: tl.constexpr,
):
    group = tl.program_id(1).to(tl.int64)
    cell = tl.load(entries + group)
    slot, first, start, end, row = plan_of(groups, group)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    fresh_kv, fresh_score = kv + (row - start) * KV_STRIDE, score + (row - start) * SCORE_STRIDE
    old_kv, old_score = ring_kv + slot * CAPACITY * CHANNELS, ring_score + slot * CAPACITY * CHANNELS
    if cell >= 0:
        if first >= start:
            values = pooled_of(
                fresh_kv, fresh_score, ape, old_kv, old_score, first, start, column, KV_STRIDE, SCORE_STRIDE, CAPACITY,
                RATIO, MEMBERS, CHANNELS, WIDTH, True, ROWS,
            )  # fmt: skip
        else:
            values = pooled_of(
                fresh_kv, fresh_score, ape, old_kv, old_score, first, start, column, KV_STRIDE, SCORE_STRIDE, CAPACITY,
                RATIO, MEMBERS, CHANNELS, WIDTH, False, ROWS,
            )  # fmt: skip
        tl.store(pooled + group * WIDTH + column, values, column < WIDTH)
    # without overlap no other group reads these columns of the rings
    if first <= start:
        keep_rows(
            fresh_kv, fresh_score, ape, old_kv, old_score, start, end, column, KV_STRIDE, SCORE_STRIDE,
            CAPACITY, RATIO, CHANNELS, KEPT,
        )  # fmt: skip


@triton.jit
def _finish(
    pooled,
    entries,  # these five as in _entries
    weight,
    turns,
    results,
    scales,
    turn_stride,
    eps,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    FORM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64)
    cell, column = tl.load(entries + group), tl.arange(0, COLUMNS)[None]
    factor = tl.load(weight + column, column < WIDTH, other=0.0).to(tl.float32)
    turn = turns + group * turn_stride
    cosine, sine = turns_of(turn, tl.full([1, 1], True, tl.int1), 1.0, TURNED, WIDTH, COLUMNS)
    values = tl.load(pooled + group * WIDTH + column, column < WIDTH, other=0.0)
    if cell >= 0:
        store_entry(values, factor, cosine, sine, results, scales, cell, eps, WIDTH, TURNED, FORM)


@triton.jit
def store_entry(
    values,  # [1, columns], 0 behind WIDTH
    factor,
    cosine,
    sine,
    results,
    scales,
    cell,
    eps,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,
    FORM: tl.constexpr,
):
    """Norm, rotation and rounding of a pooled entry, which goes to its cell."""
    COLUMNS: tl.constexpr = values.shape[1]
    dtype: tl.constexpr = tl.bfloat16 if FORM == PACKED else results.dtype.element_ty
    column = tl.arange(0, COLUMNS)[None]
    values = normed(values.to(dtype).to(tl.float32), factor, eps, WIDTH).to(dtype).to(tl.float32)
    values = turned(values, cosine, sine, TURNED, WIDTH).to(dtype).to(tl.float32)
    if FORM == FP8:
        values = rounded_key(values, TURNED, WIDTH)
    if FORM >= FP4:
        values = (butterflies(values, WIDTH.bit_length() - 1) * WIDTH**-0.5).to(dtype).to(tl.float32)
        blocks = tl.reshape(values, [COLUMNS // FP4_COLUMNS, FP4_COLUMNS])
        codes, scale = code_blocks(blocks, FLOOR, LARGEST, 1, 0)
        if FORM == PACKED:
            place = results + cell * (WIDTH // 2) + tl.arange(0, COLUMNS // 2)[None]
            tl.store(place, e2m1_pairs(tl.reshape(codes, [1, COLUMNS])).to(tl.int8))
            place = scales + cell * (WIDTH // FP4_COLUMNS) + tl.arange(0, COLUMNS // FP4_COLUMNS)[:, None]
            tl.store(place, (scale >> 23).to(tl.uint8))
        values = tl.reshape(codes * scale.to(tl.float32, bitcast=True), [1, COLUMNS])
    if FORM != PACKED:
        tl.store(results + cell * WIDTH + column, values.to(dtype), column < WIDTH)
