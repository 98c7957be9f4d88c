"""Queries and keys in Triton: a program processes a few heads of one token; the key is one more group of heads."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from dsv4cli.kernels.block_scale.kernel import butterflies, through_fp4, through_fp8
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP4_BLOCK, KV_BLOCK
from dsv4cli.kernels.launch import cdiv, launched
from dsv4cli.kernels.norm.kernel import normed, normed_head
from dsv4cli.kernels.pdl import overlap_of_few, wait_for_inputs
from dsv4cli.kernels.qk_norm_rope.types import KeyCells, KeyNorm
from dsv4cli.kernels.rope.kernel import turned, turns_of
from dsv4cli.kernels.rows import rows, tile

BLOCK, INDEX_BLOCK = tl.constexpr(KV_BLOCK), tl.constexpr(FP4_BLOCK)


def queries_and_keys(
    q: torch.Tensor, kv: torch.Tensor, norm: KeyNorm, rotation: torch.Tensor, stored: KeyCells
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    none = torch.empty(len(kv), 0, FP4_BLOCK, dtype=kv.dtype, device=kv.device)
    return queries_keys_and_index(q, kv, none, norm, rotation, stored)[:3]


def queries_keys_and_index(
    q: torch.Tensor,
    kv: torch.Tensor,
    index_q: torch.Tensor,
    norm: KeyNorm,
    rotation: torch.Tensor,
    stored: KeyCells,
    first: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    given = rows(kv)
    tokens, width = given.shape
    heads, turns = q.shape[1], torch.view_as_real(rotation)  # [T, R, 2]
    index_heads, index_width = index_q.shape[1:]
    check(q, kv, turns, stored.ring, norm.rounded)
    check_index(index_q, kv)
    queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    keys = torch.empty(kv.shape, dtype=kv.dtype, device=kv.device)
    index = torch.empty(index_q.shape, dtype=kv.dtype, device=kv.device)
    per_program, index_rows, warps = head_tiles(tokens, heads)
    groups = cdiv(heads, per_program) + 1
    if tokens:
        _queries_and_keys[(tokens * (groups + cdiv(index_heads, index_rows)),)](
            q, given, index_q, norm.weight.contiguous(), turns, stored.cells, queries, keys, index, stored.ring,
            q.stride(0), q.stride(1), given.stride(0), index_q.stride(0), index_q.stride(1), turns.stride(0), first,
            len(index_q), norm.eps, index_width**-0.5, groups, heads, width, index_heads, index_width, turns.shape[1],
            norm.rounded, per_program, index_rows, tile(width).columns, num_warps=warps, **overlap_of_few(kv, tokens),
        )  # fmt: skip
    return queries, keys, stored.ring, index


class HeadTiles(NamedTuple):
    """Heads per program, indexer heads per program, and warps of each."""

    heads: int
    index_heads: int
    warps: int


def head_tiles(tokens: int, heads: int) -> HeadTiles:
    """Return the tile sizes, measured on an H200."""
    # heads of width 512: 64 tokens of 64 heads 3.96 us (one head per program 4.90), 4096 tokens 132 (164)
    # with indexer heads of width 128: one token 1.3 us (two heads per program 1.5), 64 tokens 5.6 (one 8.0, four 6.2),
    # 4096 tokens 205 (four 242)
    index_rows = 1 if tokens <= 4 else 2 if tokens <= 64 else 8
    return HeadTiles(1 if tokens * heads <= 1024 else 2, index_rows, 1)


def check(q: torch.Tensor, kv: torch.Tensor, turns: torch.Tensor, ring: torch.Tensor, round_keys: bool) -> None:
    """Raise KernelUnsupported for arguments that the kernel does not support; `rows` has checked kv."""
    width = kv.shape[1]
    fp8 = width - 2 * turns.shape[1]
    if q.dtype != kv.dtype or ring.dtype != kv.dtype:
        raise KernelUnsupported(f"queries, keys and ring have one dtype, not {q.dtype}, {kv.dtype} and {ring.dtype}")
    if q.stride(2) != 1 or turns.stride()[1:] != (2, 1) or not ring.is_contiguous():
        raise KernelUnsupported("the Triton kernel takes consecutive columns, turns and ring rows")
    if width % 2 or (round_keys and fp8 % KV_BLOCK):
        raise KernelUnsupported(f"the Triton kernel rounds keys in blocks of {KV_BLOCK}, not {fp8} of {width} columns")


def check_index(index_q: torch.Tensor, kv: torch.Tensor) -> None:
    """Raise KernelUnsupported for indexer queries that the kernel does not support."""
    width = index_q.shape[2]
    if index_q.dtype != kv.dtype or index_q.stride(2) != 1:
        raise KernelUnsupported("the indexer's queries have the keys' dtype and consecutive columns")
    if width & (width - 1) or width < FP4_BLOCK:
        raise KernelUnsupported(f"a Hadamard rotation takes a power of two from {FP4_BLOCK} on, not {width} columns")


@launched(do_not_specialize=["first", "index_tokens"])
def _queries_and_keys(
    q,  # [T, HEADS, WIDTH]
    kv,  # [T, WIDTH]
    index_q,  # [index_tokens, INDEX_HEADS, INDEX_WIDTH]
    weight,  # [WIDTH]
    turns,  # [T, TURNED, 2]: cosine, sine
    cells,  # int64 [T]
    queries,  # as q, contiguous
    keys,  # as kv, contiguous
    index,  # as index_q, contiguous
    ring,  # [cells, WIDTH]
    q_stride,
    head_stride,
    kv_stride,
    index_stride,
    index_head_stride,
    turn_stride,
    first,  # first row that the indexer's queries belong to
    index_tokens,
    eps,
    index_factor,
    GROUPS: tl.constexpr,  # per token: its key, then its heads, ROWS each; the indexer's follow, INDEX_ROWS each
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    INDEX_HEADS: tl.constexpr,
    INDEX_WIDTH: tl.constexpr,
    TURNED: tl.constexpr,  # number of rotated pairs
    ROUNDED: tl.constexpr,  # whether keys are rounded to FP8 and the indexer's queries to FP4
    ROWS: tl.constexpr,
    INDEX_ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    EVERY: tl.constexpr = GROUPS + (INDEX_HEADS + INDEX_ROWS - 1) // INDEX_ROWS
    token = (tl.program_id(0) // EVERY).to(tl.int64)
    group = tl.program_id(0) % EVERY
    turn = turns + token * turn_stride
    column = tl.arange(0, COLUMNS)[None]
    factor = tl.load(weight + column, (column < WIDTH) & (group == 0), other=0.0).to(tl.float32)
    wait_for_inputs(OVERLAP)
    if group == 0:
        key = kv + token * kv_stride
        cell = tl.load(cells + token)
        prepare_key(key, factor, turn, keys + token * WIDTH, ring, cell, eps, TURNED, WIDTH, ROUNDED)
    elif group < GROUPS:
        head = (group - 1) * ROWS + tl.arange(0, ROWS)[:, None]
        places = q + token * q_stride + head * head_stride
        results = queries + (token * HEADS + head) * WIDTH
        prepare_heads(places, head < HEADS, turn, results, eps, TURNED, WIDTH, COLUMNS)
    elif (token >= first) & (token < first + index_tokens):
        number, row = (group - GROUPS) * INDEX_ROWS + tl.arange(0, INDEX_ROWS)[:, None], token - first
        sources = index_q + row * index_stride + number * index_head_stride
        targets = index + (row * INDEX_HEADS + number) * INDEX_WIDTH
        prepare_index(sources, number < INDEX_HEADS, turn, targets, index_factor, TURNED, INDEX_WIDTH, ROUNDED)


@triton.jit
def prepare_key(
    kv,
    factor,  # fp32 [1, columns]
    turn,
    key,
    ring,
    cell,
    eps,
    TURNED: tl.constexpr,
    WIDTH: tl.constexpr,
    ROUNDED: tl.constexpr,
):
    """Norm, rotate and round the key at kv; store it to `key` and to a cell of the ring."""
    COLUMNS: tl.constexpr = factor.shape[1]
    column = tl.arange(0, COLUMNS)[None]
    inside = column < WIDTH
    dtype = key.dtype.element_ty
    values = tl.load(kv + column, inside, other=0.0).to(tl.float32)  # [1, COLUMNS]
    cosine, sine = turns_of(turn, tl.full([1, 1], True, tl.int1), 1.0, TURNED, WIDTH, COLUMNS)
    values = ready_key(values, factor, cosine, sine, eps, dtype, TURNED, WIDTH, ROUNDED).to(dtype)
    tl.store(key + column, values, inside)
    tl.store(ring + cell * WIDTH + column, values, inside & (cell >= 0))


@triton.jit
def prepare_heads(places, inside, turn, results, eps, TURNED: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Norm and rotate heads of one token. places, results: pointers to each head [n, 1]; inside: mask [n, 1]."""
    column = tl.arange(0, COLUMNS)[None]
    known = inside & (column < WIDTH)
    dtype = results.dtype.element_ty
    values = tl.load(places + column, known, other=0.0).to(tl.float32)  # [n, COLUMNS]
    cosine, sine = turns_of(turn, inside, 1.0, TURNED, WIDTH, COLUMNS)
    values = normed_head(values, eps, WIDTH, dtype).to(dtype).to(tl.float32)
    tl.store(results + column, turned(values, cosine, sine, TURNED, WIDTH).to(dtype), known)


@triton.jit
def prepare_index(
    places, inside, turn, results, factor, TURNED: tl.constexpr, WIDTH: tl.constexpr, ROUNDED: tl.constexpr
):
    """Rotate the indexer's heads of one token; with ROUNDED apply Hadamard and FP4. Arguments as in prepare_heads.

    factor: 1 / sqrt(WIDTH).
    """
    ROWS: tl.constexpr = inside.shape[0]
    STAGES: tl.constexpr = WIDTH.bit_length() - 1
    column = tl.arange(0, WIDTH)[None]
    dtype = results.dtype.element_ty
    values = tl.load(places + column, inside, other=0.0).to(tl.float32)  # [ROWS, WIDTH]
    cosine, sine = turns_of(turn, inside, 1.0, TURNED, WIDTH, WIDTH)
    values = turned(values, cosine, sine, TURNED, WIDTH).to(dtype)
    if ROUNDED:
        values = (butterflies(values.to(tl.float32), STAGES) * factor).to(dtype).to(tl.float32)
        blocks = tl.reshape(values, [ROWS * (WIDTH // INDEX_BLOCK), INDEX_BLOCK])
        values = tl.reshape(through_fp4(blocks), [ROWS, WIDTH]).to(dtype)
    tl.store(results + column, values, inside)


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
    """Return a key (fp32 [1, columns]) normed with the weights `factor`, rotated and, with ROUNDED, rounded to FP8."""
    values = normed(values, factor, eps, WIDTH).to(dtype).to(tl.float32)
    values = turned(values, cosine, sine, TURNED, WIDTH).to(dtype).to(tl.float32)
    return rounded_key(values, TURNED, WIDTH) if ROUNDED else values


@triton.jit
def rounded_key(values, TURNED: tl.constexpr, WIDTH: tl.constexpr):
    """Return a key (fp32 [1, columns]) with all columns except the rotated ones rounded to FP8."""
    COLUMNS: tl.constexpr = values.shape[1]
    rounded = tl.reshape(through_fp8(tl.reshape(values, [COLUMNS // BLOCK, BLOCK])), [1, COLUMNS])
    return tl.where(tl.arange(0, COLUMNS)[None] < WIDTH - 2 * TURNED, rounded, values)
