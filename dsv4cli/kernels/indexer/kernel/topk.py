"""Top-k selection of entries in Triton: selects the kernels and tile sizes for a shape."""

import math

import torch

from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.indexer.kernel.topk_prefilter import keep_high, list_kept
from dsv4cli.kernels.indexer.kernel.topk_radix import choose_largest
from dsv4cli.kernels.indexer.kernel.topk_split import choose_in_parts
from dsv4cli.kernels.indexer.types import IndexEntries, WindowList
from dsv4cli.kernels.launch import cdiv, next_power_of_2
from dsv4cli.kernels.pdl import overlap, overlap_beside, overlap_of_few
from dsv4cli.kernels.rows import planned_rows

# the longest row or chunk, in scores, that a program holds in registers: 32 for each of 1024 threads
LONGEST = 32_768
# the most rows for which several programs share a row, and the most scores of a row that they read
FEW, SHORT = 8, 8192
# the longest row that is prefiltered by its peaks: entry numbers must fit 16 bits
LONGEST_WITH_PEAKS = 65_536


def top_entries(scores: torch.Tensor, visible: torch.Tensor, k: int) -> torch.Tensor:
    k = min(k, scores.shape[1])
    out = torch.empty(len(scores), k, dtype=torch.int64, device=scores.device)
    _choose(scores, visible, k, out, _unlisted(visible), 0, listed=False)
    return out


def choose_entries(scores: torch.Tensor, k: int, entries: IndexEntries, window: WindowList) -> torch.Tensor:
    k, table, width = min(k, scores.shape[1]), entries.table, window.index.shape[1]
    if not k:
        return window.index.clone()
    if table.stride(-1) != 1 or window.index.stride(-1) != 1:
        raise KernelUnsupported("the Triton indexer takes tables and lists with consecutive columns")
    out = torch.empty(len(scores), width + k, dtype=torch.int64, device=scores.device)
    strides = table.stride(0), window.index.stride(0), window.rows
    listing = table, entries.sequence, window.index, window.columns, *strides
    _choose(scores, entries.visible, k, out, listing, width, listed=True)
    return out


def takes_prefilter(rows: int, length: int, k: int) -> bool:
    """Return whether `choose_prefiltered` is fastest: for one row longer than the other kernels search at once.

    H200, scores and lists of one token: 32,800 entries 14.5 us (17.0 otherwise), 16,416 9.5 (15.8), 65,536 17.1 (21.3);
    selection alone for 16 tokens 15.9 (14.4), for 64 46 (22).
    """
    return planned_rows(rows, 1) == 1 and SHORT < length <= LONGEST_WITH_PEAKS and k <= 1024


def choose_prefiltered(
    scores: torch.Tensor,
    peaks: torch.Tensor,
    counts: torch.Tensor,
    k: int,
    entries: IndexEntries,
    window: WindowList,
) -> torch.Tensor:
    """Return the lists of `choose_entries` for bf16 scores with rows aligned for wide loads.

    peaks: the largest of each eight scores with a visible one, rows aligned too; counts: int32 [T], zeros.
    """
    if window.index.stride(-1) != 1:
        raise KernelUnsupported("the Triton indexer takes lists with consecutive columns")
    (rows, length), table, width, device = scores.shape, entries.table, window.index.shape[1], scores.device
    # `bound` passes about 1.5 * k peaks, of eight scores each
    room = max(1024, next_power_of_2(15 * k))
    kept, cells = (torch.empty(rows, room, dtype=dtype, device=device) for dtype in (torch.int32, torch.int64))
    out = torch.empty(rows, width + k, dtype=torch.int64, device=device)
    bits, (tile, wide, ranking, registers) = scores.view(torch.int16), _kept(length)
    keep_high[(rows, cdiv(length, wide))](
        bits, peaks.view(torch.int16), entries.visible, table, entries.sequence, table.stride(0), window.rows, kept,
        cells, counts, length, k, scores.stride(0), peaks.stride(0), 128, tile // 1024, wide, room,
        **overlap_beside(scores, registers), num_warps=4,
    )  # fmt: skip
    list_kept[(rows, ranking)](
        kept, cells, counts, bits, entries.visible, table, entries.sequence, window.index, window.columns,
        table.stride(0), window.index.stride(0), window.rows, out, length, k, scores.stride(0), room,
        next_power_of_2(k), ranking, width, **overlap(scores), num_warps=4,
    )  # fmt: skip
    return out


def _kept(length: int) -> tuple[int, int, int, int]:
    """Return the peaks searched, entries per filtering program, programs that list a row, and registers of the filter.

    H200, selection alone of 32,800: 6.3 us; 128 or 512 entries per program 6.5 and 6.7, 64 programs that list 7.1, two
    or eight warps that search 7.8 and 7.6.
    """
    return (4096, 256, 128, 64) if length <= 40_960 else (8192, 256, 128, 128)


def _unlisted(some: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """Return placeholders for table, sequence and window, which kernels without LISTED never read."""
    return some, some, some, some, 0, 0, 0


def _choose(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    out: torch.Tensor,
    listing: tuple[torch.Tensor | int, ...],
    window: int,
    listed: bool,
) -> None:
    """Write the selection to `out`. listing: the tables of entries and window rows, as kernel arguments."""
    rows, length = scores.shape
    if scores.dtype not in (torch.bfloat16, torch.float32) or scores.stride(-1) != 1:
        raise KernelUnsupported(
            f"the Triton top-k takes bf16 or fp32 with consecutive columns, not {scores.dtype} {scores.stride()}"
        )
    if not rows or not k:
        return
    names = {"LISTED": listed, "WINDOW": window}
    if rows <= FEW and cdiv(length, LONGEST) * k <= SHORT:
        _choose_of_few(scores, visible, k, out, listing, names)
        return
    numbers = scores  # in the first pass a place is its own number
    while (chunk := _chunk(scores.shape[1], k)) < scores.shape[1]:
        scores, visible, numbers = _pass(scores, visible, numbers, chunk, k, left=0)
    _launch((rows, 1), scores, visible, numbers, (out, out, out), listing, chunk, k, **names)


def _choose_of_few(
    scores: torch.Tensor,
    visible: torch.Tensor,
    k: int,
    out: torch.Tensor,
    listing: tuple[torch.Tensor | int, ...],
    names: dict[str, int],
) -> None:
    rows, length = scores.shape
    found = scores, visible, visible
    if length > SHORT:
        chunk = SHORT
        while cdiv(length, chunk) * k > SHORT:
            chunk *= 2
        # skips rows with at most SHORT visible entries, which the second kernel handles alone
        found = _pass(scores, visible, scores, chunk, k, left=SHORT)
    alignment, tile = _alignment(scores), min(SHORT, max(1024, next_power_of_2(length)))
    warps, (parts, ranked, searching) = max(4, _warps(tile, alignment)), _parts(rows)
    integers = torch.int16 if scores.dtype == torch.bfloat16 else torch.int32
    choose_in_parts[(rows, parts)](
        scores.view(integers), visible, found[0].view(integers), *found[1:], *listing, out,
        length, k, scores.stride(0), found[0].stride(0), found[0] is not scores, alignment,
        tile // (256 * warps), 32 * warps, next_power_of_2(k), _groups(k, warps), parts, ranked, searching,
        **names, **overlap(scores), num_warps=warps,
    )  # fmt: skip


def _parts(rows: int) -> tuple[int, int, int]:
    """Return the programs per row, the maximum visible entries to rank, and the programs that search longer rows.

    H200, one row: 1,024 visible 2.2 us (64 programs 3.7, searched by 32 5.4), 8,192 4.2 (16 search: 4.7). Four rows 6.1
    and 4.7 (64 programs of which 16 search 4.2 and 6.8), eight 7.3 and 5.3 (32 programs 6.8 and 6.6).
    """
    # ranking lists entries in another order: with exact rows it is used for all numbers of few rows
    rows = planned_rows(rows, min(rows, 4))
    return (128, 1024, 32) if rows <= 2 else (32, 1024, 32) if rows <= 4 else (16, 0, 16)


def _pass(
    scores: torch.Tensor, visible: torch.Tensor, numbers: torch.Tensor, chunk: int, k: int, left: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return scores, count and numbers of the best k of each chunk; skip rows with at most `left` visible entries."""
    rows, length = scores.shape
    chunks = cdiv(length, chunk)
    padded = cdiv(chunks * k, 8) * 8
    found = torch.empty(rows, padded, dtype=torch.int32, device=scores.device)[:, : chunks * k]
    found_scores = torch.empty(rows, padded, dtype=scores.dtype, device=scores.device)[:, : chunks * k]
    results = found, found_scores, torch.empty_like(visible)
    names = {"LISTED": False, "WINDOW": 0, "LEFT": left}
    _launch((rows, chunks), scores, visible, numbers, results, _unlisted(visible), chunk, k, **names)
    return found_scores, results[2], found


def _launch(
    grid: tuple[int, int],
    scores: torch.Tensor,
    visible: torch.Tensor,
    numbers: torch.Tensor,
    results: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    listing: tuple[torch.Tensor | int, ...],
    chunk: int,
    k: int,
    **names: int,
) -> None:
    out, out_scores, _ = results
    last = out is out_scores
    alignment = _alignment(scores)
    warps = _warps(chunk, alignment)
    integers = torch.int16 if scores.dtype == torch.bfloat16 else torch.int32
    choose_largest[grid](
        scores.view(integers), visible, numbers, *listing, out, out_scores if last else out_scores.view(integers),
        results[2], scores.shape[1], k, scores.stride(0), numbers.stride(0), out.stride(0), numbers is scores, last,
        alignment, chunk // (256 * warps), 32 * warps, next_power_of_2(k), _groups(k, warps),
        **{"LEFT": 0} | names, **overlap_of_few(scores, len(scores)), num_warps=warps,
    )  # fmt: skip


def _groups(k: int, warps: int) -> int:
    """Return the number of groups that each thread's scores are divided into; 0 if a thread has too few scores.

    All threads together have at least k groups.
    """
    groups = cdiv(next_power_of_2(k), 32 * warps)
    return groups if groups <= 8 else 0


def _alignment(scores: torch.Tensor) -> int:
    """Return how many scores one load may read: 8 if reads past the end of each row stay in the storage, else 1."""
    rows, length = scores.shape
    room = scores.untyped_storage().nbytes() // scores.element_size() - scores.storage_offset()
    fits = scores.stride(0) % 8 == 0 and (rows - 1) * scores.stride(0) + cdiv(length, 8) * 8 <= room
    return 8 if fits else 1


def _chunk(length: int, k: int) -> int:
    """Return the length of row per program: all of it, or a size that leaves about as much for the next pass (H200)."""
    if length <= LONGEST // 2:
        return max(256, next_power_of_2(length))
    chunk = max(LONGEST // 4, next_power_of_2(math.isqrt(length * k)), 2 * next_power_of_2(k))
    if chunk > LONGEST and length > LONGEST:
        raise KernelUnsupported(f"the Triton top-k takes up to {LONGEST // 2} of rows longer than {LONGEST}, not {k}")
    return min(LONGEST, chunk)


def _warps(chunk: int, alignment: int) -> int:
    """Return warps per program, for at most 64 scores a thread.

    H200, 512 of 8,192: 6.5 us with four warps, 7.2 with eight.
    """
    if alignment == 1:
        return min(32, max(1, chunk // 1024))  # each score needs its own address: 64 per thread do not fit in registers
    least = 1 if chunk < 512 else 2 if chunk < 2048 else 4
    return min(16, max(least, chunk // 2048))
