"""The indexer in Triton: which kernel takes a shape, and in what pieces."""

import math

import torch
import triton

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.formats import FP4_BLOCK
from dsv4cli.kernels.indexer.plain import scores_of_plain_keys
from dsv4cli.kernels.indexer.stream import scores_of_one_token
from dsv4cli.kernels.indexer.tiles import prepare_queries, scores_of_many_tokens
from dsv4cli.kernels.indexer.topk import choose_largest

# tokens of a sequence from which on a tile of keys is unpacked once for several of them
MANY = 8
# the longest row, or part of one, that a program keeps in registers: 32 scores for each of 1024 threads
LONGEST = 32_768


def index_scores(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scale: torch.Tensor | None,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> torch.Tensor:
    _check(q, weights, keys, key_scale, table)
    entries = table.shape[1]
    # rows begin where a wide load may, and have room for one behind their end: top_entries reads them so
    out = torch.empty(q.shape[0], triton.cdiv(entries, 64) * 64, dtype=q.dtype, device=q.device)[:, :entries]
    if not out.numel():
        return out
    if key_scale is None:
        _score_plain(out, q, weights, keys, table, sequence, visible)
    else:
        score = _score_many if q.shape[0] >= MANY * table.shape[0] else _score_few
        score(out, q, weights, keys.view(torch.int32), key_scale.view(torch.uint8), table, sequence, visible)
    return out


def _check(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, key_scale: torch.Tensor | None, table: torch.Tensor
) -> None:
    width = q.shape[2]
    if q.dtype not in (torch.bfloat16, torch.float32) or weights.dtype != q.dtype:
        raise KernelUnsupported(f"the Triton indexer takes bf16 or fp32, not {q.dtype} with weights {weights.dtype}")
    if key_scale is None and keys.dtype != q.dtype:
        raise KernelUnsupported(f"the Triton indexer takes keys like the queries, {q.dtype}, not {keys.dtype}")
    if key_scale is not None and (q.dtype != torch.bfloat16 or width % FP4_BLOCK or width & (width - 1)):
        raise KernelUnsupported(
            f"the Triton indexer takes FP4 keys with bf16 queries of a power of two columns, not {q.dtype} and {width}"
        )
    parts = (q[0] if len(q) else q, keys, *(() if key_scale is None else (key_scale,)))
    if not all(part.is_contiguous() for part in parts) or table.stride(-1) != 1 or weights.stride(-1) != 1:
        raise KernelUnsupported("the Triton indexer takes queries, keys and tables with consecutive columns")


def _score_plain(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    (tokens, heads, width), entries, rows = q.shape, table.shape[1], 64
    scores_of_plain_keys[(tokens, triton.cdiv(entries, rows))](
        q, weights, keys, table, sequence, visible, out, entries, q.stride(0), weights.stride(0), table.stride(0),
        out.stride(0), heads, width, max(16, _power(heads)), max(16, _power(width)), rows, num_warps=4,
    )  # fmt: skip


def _score_few(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    (tokens, heads, width), entries = q.shape, table.shape[1]
    rows, splits, warps = _stream(tokens, entries)
    scores_of_one_token[(tokens, splits)](
        q, weights, keys, key_scale, table, sequence, visible, out, entries, splits,
        q.stride(0), weights.stride(0), table.stride(0), out.stride(0), heads, width, max(16, _power(heads)), rows,
        num_warps=warps,
    )  # fmt: skip


def _stream(tokens: int, entries: int) -> tuple[int, int, int]:
    """Keys of a tile, programs for a token, warps; an H200 holds four programs of 64 keys a processor, three of 128.

    One token, 8,192 keys: 3.3 us with 64 (3.9 with 128); 262,144 keys: 20.8 us with 128 (21.3 with 64).
    """
    rows, programs = (128, 396) if tokens * entries >= 131_072 else (64, 528)
    return rows, min(triton.cdiv(entries, rows), max(1, programs // tokens)), 4


def _score_many(
    out: torch.Tensor,
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    key_scale: torch.Tensor,
    table: torch.Tensor,
    sequence: torch.Tensor,
    visible: torch.Tensor,
) -> None:
    (tokens, heads, width), entries, padded = q.shape, table.shape[1], max(16, _power(q.shape[1]))
    queries = torch.empty(tokens, padded, width, dtype=_operand(q.device), device=q.device)
    scaled = torch.empty(tokens, padded, dtype=weights.dtype, device=q.device)
    prepare_queries[(tokens,)](
        q, weights, queries, scaled, q.stride(0), weights.stride(0), heads, width, padded, num_warps=4
    )
    # H200, 4,096 tokens and 8,192 keys: 859 us; 64 keys instead of 128 take 970, eight warps 1,043, two stages 894
    rows, per_program, warps, stages = 128, 64, 4, 3
    scores_of_many_tokens[(triton.cdiv(entries, rows), triton.cdiv(tokens, per_program))](
        queries, scaled, keys, key_scale, table, sequence, visible, out, tokens, entries, table.stride(0),
        out.stride(0), width, padded, rows, per_program, stages, num_warps=warps,
    )  # fmt: skip


def _operand(device: torch.device) -> torch.dtype:
    """What the tensor cores multiply: e4m3 holds FP4 values with a scale a row, where there is hardware for it."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        return torch.bfloat16
    return torch.float8_e4m3fn


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    rows, length = scores.shape
    k = min(k, length)
    if scores.dtype not in (torch.bfloat16, torch.float32) or scores.stride(-1) != 1:
        raise KernelUnsupported(
            f"the Triton top-k takes bf16 or fp32 with consecutive columns, not {scores.dtype} {scores.stride()}"
        )
    out = torch.empty(rows, k, dtype=torch.int64, device=scores.device)
    if not out.numel():
        return out
    numbers = scores  # of the first pass: the places themselves
    while (chunk := _chunk(length, k)) < length:
        chunks = triton.cdiv(length, chunk)
        found = torch.empty(rows, chunks * k, dtype=torch.int32, device=scores.device)
        found_scores = torch.empty(rows, chunks * k, dtype=scores.dtype, device=scores.device)
        found_visible = torch.empty_like(visible)
        _choose((rows, chunks), scores, visible, numbers, found, found_scores, found_visible, chunk, k)
        scores, visible, numbers, length = found_scores, found_visible, found, chunks * k
    _choose((rows, 1), scores, visible, numbers, out, out, out, chunk, k)
    return out


def _choose(
    grid: tuple[int, int],
    scores: torch.Tensor,
    visible: torch.Tensor,
    numbers: torch.Tensor,
    out: torch.Tensor,
    out_scores: torch.Tensor,
    out_visible: torch.Tensor,
    chunk: int,
    k: int,
) -> None:
    length = scores.shape[1]
    first, last = numbers is scores, out_scores is out
    alignment = _alignment(scores)
    warps = _warps(chunk, alignment)
    threads = 32 * warps
    # groups of each thread's scores, as many as k or more in all; 0 where a thread has too few
    groups = triton.cdiv(_power(k), threads)
    integers = torch.int16 if scores.dtype == torch.bfloat16 else torch.int32
    choose_largest[grid](
        scores.view(integers), visible, numbers, out, out_scores if last else out_scores.view(integers), out_visible,
        length, k, scores.stride(0), first, last, alignment, chunk // (8 * threads), threads, _power(k),
        groups if groups <= 8 else 0, num_warps=warps,
    )  # fmt: skip


def _alignment(scores: torch.Tensor) -> int:
    """How many scores a load may take at once: 8 where each row has room behind its end."""
    rows, length = scores.shape
    room = scores.untyped_storage().nbytes() // scores.element_size() - scores.storage_offset()
    fits = scores.stride(0) % 8 == 0 and (rows - 1) * scores.stride(0) + triton.cdiv(length, 8) * 8 <= room
    return 8 if fits else 1


def _chunk(length: int, k: int) -> int:
    """How much of a row a program takes: all of it, or so much that as much is left of all parts together (H200)."""
    if length <= LONGEST // 2:
        return max(256, _power(length))
    chunk = max(LONGEST // 4, _power(math.isqrt(length * k)), 2 * _power(k))
    if chunk > LONGEST and length > LONGEST:
        raise KernelUnsupported(f"the Triton top-k takes up to {LONGEST // 2} of rows longer than {LONGEST}, not {k}")
    return min(LONGEST, chunk)


def _warps(chunk: int, alignment: int) -> int:
    """Warps of a program, 64 scores a thread or fewer (H200, 512 of 8,192: 6.5 us with four warps, 7.2 with eight)."""
    if alignment == 1:
        return min(32, max(1, chunk // 1024))  # one address for each score: 64 a thread do not fit into registers
    least = 1 if chunk < 512 else 2 if chunk < 2048 else 4
    return min(16, max(least, chunk // 2048))


def _power(number: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (number - 1).bit_length()
