"""The choice of entries in Triton: which kernels take a shape, and in what pieces."""

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

# the longest row, or part of one, that a program keeps in registers: 32 scores for each of 1024 threads
LONGEST = 32_768
# up to how many rows each is shared by several programs, and the most scores of one that they look at
FEW, SHORT = 8, 8192
# the longest row that is chosen from by its peaks: the entries' numbers go into 16 bits
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
    """Whether `choose_prefiltered` is the fastest way: for one row, longer than those that others search at once.

    H200, scores and lists of one token: 32,800 entries 14.5 us (17.0 otherwise), 16,416 9.5 (15.8), 65,536 17.1 (21.3);
    of 16 tokens the choice alone 15.9 (14.4), of 64 46 (22).
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
    """The lists of `choose_entries`, of bf16 scores whose rows begin where a wide load may.

    peaks: the largest of each eight scores of which one is seen, rows likewise; counts: int32 [T], zeros.
    """
    if window.index.stride(-1) != 1:
        raise KernelUnsupported("the Triton indexer takes lists with consecutive columns")
    (rows, length), table, width, device = scores.shape, entries.table, window.index.shape[1], scores.device
    # `bound` lets half as many peaks again as k through, or a little more, each of eight scores
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
    """Peaks that are searched, entries of a program that keeps, programs that list a row, registers that keep.

    H200, the choice alone of 32,800: 6.3 us; 128 or 512 entries a program 6.5 and 6.7, 64 programs that list 7.1, two
    or eight warps that search 7.8 and 7.6.
    """
    return (4096, 256, 128, 64) if length <= 40_960 else (8192, 256, 128, 128)


def _unlisted(some: torch.Tensor) -> tuple[torch.Tensor | int, ...]:
    """What kernels without LISTED take in place of table, sequence and window: any tensor, which they do not read."""
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
    """Lists what is chosen in out; listing: where entries and the window's rows are, as the kernels take them."""
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
    numbers = scores  # of the first pass: the places themselves
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
        # which does nothing where no more is visible than the second kernel takes at once
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
    """Programs that share a row, of how many visible entries each is ranked, and programs that search in more.

    H200, one row: 1,024 visible 2.2 us (64 programs 3.7, searched by 32 5.4), 8,192 4.2 (16 search: 4.7). Four rows 6.1
    and 4.7 (64 programs of which 16 search 4.2 and 6.8), eight 7.3 and 5.3 (32 programs 6.8 and 6.6).
    """
    # ranked entries come in another order
    rows = planned_rows(rows, min(rows, 4))
    return (128, 1024, 32) if rows <= 2 else (32, 1024, 32) if rows <= 4 else (16, 0, 16)


def _pass(
    scores: torch.Tensor, visible: torch.Tensor, numbers: torch.Tensor, chunk: int, k: int, left: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The best k of each chunk of a row, unless no more than `left` are visible: scores, how many, their numbers."""
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
    """Groups of each thread's scores, as many as k or more in all; 0 where a thread has too few."""
    groups = cdiv(next_power_of_2(k), 32 * warps)
    return groups if groups <= 8 else 0


def _alignment(scores: torch.Tensor) -> int:
    """How many scores a load may take at once: 8 where each row has room behind its end."""
    rows, length = scores.shape
    room = scores.untyped_storage().nbytes() // scores.element_size() - scores.storage_offset()
    fits = scores.stride(0) % 8 == 0 and (rows - 1) * scores.stride(0) + cdiv(length, 8) * 8 <= room
    return 8 if fits else 1


def _chunk(length: int, k: int) -> int:
    """How much of a row a program takes: all of it, or so much that as much is left of all parts together (H200)."""
    if length <= LONGEST // 2:
        return max(256, next_power_of_2(length))
    chunk = max(LONGEST // 4, next_power_of_2(math.isqrt(length * k)), 2 * next_power_of_2(k))
    if chunk > LONGEST and length > LONGEST:
        raise KernelUnsupported(f"the Triton top-k takes up to {LONGEST // 2} of rows longer than {LONGEST}, not {k}")
    return min(LONGEST, chunk)


def _warps(chunk: int, alignment: int) -> int:
    """Warps of a program, 64 scores a thread or fewer (H200, 512 of 8,192: 6.5 us with four warps, 7.2 with eight)."""
    if alignment == 1:
        return min(32, max(1, chunk // 1024))  # one address for each score: 64 a thread do not fit into registers
    least = 1 if chunk < 512 else 2 if chunk < 2048 else 4
    return min(16, max(least, chunk // 2048))
