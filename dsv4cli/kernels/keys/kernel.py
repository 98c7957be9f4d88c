"""Queries and keys in Triton: a program takes a few heads of one token; its key counts as one more group of heads."""

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import code_blocks
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import E4M3_MAX, FP8_AMAX_FLOOR, KV_BLOCK
from dsv4cli.kernels.norm.kernel import normed, normed_head
from dsv4cli.kernels.rope.kernel import turned, turns_of
from dsv4cli.kernels.rows import rows, tile

BLOCK, FLOOR, LARGEST = tl.constexpr(KV_BLOCK), tl.constexpr(FP8_AMAX_FLOOR), tl.constexpr(E4M3_MAX)


def queries_and_keys(
    q: torch.Tensor,
    kv: torch.Tensor,
    weight: torch.Tensor,
    rotation: torch.Tensor,
    ring: torch.Tensor,
    cells: torch.Tensor,
    eps: float,
    round_keys: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    given = rows(kv)
    tokens, width = given.shape
    heads, turns = q.shape[1], torch.view_as_real(rotation)  # [T, R, 2]
    check(q, kv, turns, ring, round_keys)
    queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    per_program, warps = heads_per_program(tokens, heads)
    groups = triton.cdiv(heads, per_program) + 1
    if tokens:
        _queries_and_keys[(tokens * groups,)](
            q, given, weight.contiguous(), turns, cells, queries, keys, ring, q.stride(0), q.stride(1),
            given.stride(0), turns.stride(0), eps, groups, heads, width, turns.shape[1],
            round_keys, per_program, tile(width)[1], num_warps=warps,
        )  # fmt: skip
    return queries, keys, ring


def heads_per_program(tokens: int, heads: int) -> tuple[int, int]:
    """How many heads a program takes, and the warps for them."""
    # H200, heads of 512: 64 tokens of 64 heads 3.96 us (one head a program 4.90), 4096 tokens 132 (164)
    return (1, 1) if tokens * heads <= 1024 else (2, 1)


def check(q: torch.Tensor, kv: torch.Tensor, turns: torch.Tensor, ring: torch.Tensor, round_keys: bool) -> None:
    """Raises KernelUnsupported for what the kernel does not take; `rows` has seen kv."""
    width = kv.shape[1]
    fp8 = width - 2 * turns.shape[1]
    if q.dtype != kv.dtype or ring.dtype != kv.dtype:
        raise KernelUnsupported(f"queries, keys and ring have one dtype, not {q.dtype}, {kv.dtype} and {ring.dtype}")
    if q.stride(2) != 1 or turns.stride()[1:] != (2, 1) or not ring.is_contiguous():
        raise KernelUnsupported("the Triton kernel takes consecutive columns, turns and ring rows")
    if width % 2 or (round_keys and fp8 % KV_BLOCK):
        raise KernelUnsupported(f"the Triton kernel rounds keys in blocks of {KV_BLOCK}, not {fp8} of {width} columns")


@triton.jit
def _queries_and_keys(
    q,  # [T, HEADS, WIDTH]
    kv,  # [T, WIDTH]
    weight,  # [WIDTH]
    turns,  # [T, TURNED, 2]: cosine, sine
    cells,  # int64 [T]
    queries,  # as q, contiguous
    keys,  # as kv, contiguous
    ring,  # [cells, WIDTH]
    q_stride,
    head_stride,
    kv_stride,
    turn_stride,
    eps,
    GROUPS: tl.constexpr,  # of a token: its key, then its heads, ROWS at a time
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    TURNED: tl.constexpr,  # pairs
    ROUNDED: tl.constexpr,  # whether a key goes through FP8
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = (tl.program_id(0) // GROUPS).to(tl.int64)
    group = tl.program_id(0) % GROUPS
    turn = turns + token * turn_stride
    if group == 0:
        key = kv + token * kv_stride
        cell = tl.load(cells + token)
        prepare_key(key, weight, turn, keys + token * WIDTH, ring, cell, eps, TURNED, WIDTH, ROUNDED, COLUMNS)
    else:
        head = (group - 1) * ROWS + tl.arange(0, ROWS)[:, None]
        places = q + token * q_stride + head * head_stride
        results = queries + (token * HEADS + head) * WIDTH
        prepare_heads(places, head < HEADS, turn, results, eps, TURNED, WIDTH, COLUMNS)


@triton.jit
def prepare_key(
    kv,
    weight,
    turn,
    key,
    ring,
    cell,
    eps,
    TURNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The key at kv, as the cache holds it, to `key` and to a cell of the ring."""
    column = tl.arange(0, COLUMNS)[None]
    inside = column < WIDTH
    dtype = key.dtype.element_ty
    values = tl.load(kv + column, inside, other=0.0).to(tl.float32)  # [1, COLUMNS]
    factor = tl.load(weight + column, inside, other=0.0).to(tl.float32)
    cosine, sine = turns_of(turn, tl.full([1, 1], True, tl.int1), 1.0, TURNED, WIDTH, COLUMNS)
    values = ready_key(values, factor, cosine, sine, eps, dtype, TURNED, WIDTH, ROUNDED).to(dtype)
    tl.store(key + column, values, inside)
    tl.store(ring + cell * WIDTH + column, values, inside & (cell >= 0))


@triton.jit
def prepare_heads(places, inside, turn, results, eps, TURNED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Heads of one token, normed and turned: places, inside and results [n, 1], where each is and goes."""
    column = tl.arange(0, COLUMNS)[None]
    known = inside & (column < WIDTH)
    dtype = results.dtype.element_ty
    values = tl.load(places + column, known, other=0.0).to(tl.float32)  # [n, COLUMNS]
    cosine, sine = turns_of(turn, inside, 1.0, TURNED, WIDTH, COLUMNS)
    values = normed_head(values, eps, WIDTH, dtype).to(dtype).to(tl.float32)
    tl.store(results + column, turned(values, cosine, sine, TURNED, WIDTH).to(dtype), known)


@triton.jit
def ready_key(
    values,
    factor,
    cosine,
    sine,
    eps,
    dtype: tl.constexpr,
    TURNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """A key (fp32 [1, columns]) normed with the weights factor, turned and, with ROUNDED, through FP8."""
    values = normed(values, factor, eps, WIDTH).to(dtype).to(tl.float32)
    values = turned(values, cosine, sine, TURNED, WIDTH).to(dtype).to(tl.float32)
    return rounded_key(values, TURNED, WIDTH) if ROUNDED else values


@triton.jit
def rounded_key(values, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    """A key (fp32 [1, columns]) with all but its turned columns through FP8."""
    COLUMNS: tl.constexpr = values.shape[1]
    codes, scale = code_blocks(tl.reshape(values, [COLUMNS // BLOCK, BLOCK]), FLOOR, LARGEST, 3, -6)
    rounded = tl.reshape(codes * scale.to(tl.float32, bitcast=True), [1, COLUMNS])
    return tl.where(tl.arange(0, COLUMNS)[None] < WIDTH - 2 * TURNED, rounded, values)
