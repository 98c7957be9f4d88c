"""Decodes octets of GGUF blocks to int8, four codes of a word at a time, for Gluon kernels."""

import torch
import triton
import triton.language as tl
from triton import constexpr_function

from dsv4cli.kernels.ggml import tables
from dsv4cli.kernels.ggml.kernel.octets import (
    EVEN,
    HIGHEST,
    LOWEST,
    TO_LOWEST,
    KernelBlocks,
    bias,
    code_bytes,
    codebook_indices,
    has_codebook,
    packed_codebook,
)

# the magnitudes of each codebook as bytes; where there are fewer than four, followed by their negatives
MAGNITUDES = {
    name: (*values, *(0,) * (4 - len(values)), *(-value & 255 for value in values), *(0,) * (4 - len(values)))
    if len(values) < 4 else values
    for name, (_, values, _) in tables.GRIDS.items()
}  # fmt: skip


@constexpr_function
def _magnitudes(kind, half):
    """Return four of a codebook's bytes as a word."""
    return sum(int(value) << 8 * place for place, value in enumerate(MAGNITUDES[kind][half * 4 : half * 4 + 4]))


@constexpr_function
def _has_even_signs(kind):
    return kind in EVEN


@constexpr_function
def _has_entries_of_eight(kind):
    return tables.GRIDS[kind][2] == 8


def table_of(blocks: KernelBlocks) -> torch.Tensor | None:
    """Return the table for `signed_codes`: of a codebook as of `packed_codebook`, otherwise the one of the blocks."""
    return packed_codebook(blocks.kind, str(blocks.rows.device)) if has_codebook(blocks.kind) else blocks.table


@triton.jit
def signed_codes(words, group, lane, table, KIND: tl.constexpr):
    """Return the codes of octets, minus the bias of the type, as int8, the bytes of two words.

    Args:
        words, group, lane: as of `octets.decoded`.
        table: as of `table_of`.
    """
    if has_codebook(KIND):
        low, high = _from_codebook(words, lane, table, KIND)
    else:
        low, high = code_bytes(words, group, lane, table, KIND)
        if bias(KIND) == 128:
            low, high = low ^ HIGHEST, high ^ HIGHEST
        elif bias(KIND):
            # without carries between the bytes
            low = (low | HIGHEST) - bias(KIND) * LOWEST ^ HIGHEST
            high = (high | HIGHEST) - bias(KIND) * LOWEST ^ HIGHEST
    return low, high


@triton.jit
def _from_codebook(words, lane, table, KIND: tl.constexpr):
    first, second, signs = codebook_indices(words, lane, KIND)
    if _has_even_signs(KIND):
        signs += _ones(signs) << 7  # bits above the eighth are ignored
    if _has_entries_of_eight(KIND):
        # a hexadecimal digit for each column: its magnitude's number in two bits, and then its sign
        numbers = _entry(table, first * 4)
        signs = signs * 0x1001 & 0x000F000F
        signs = (signs | signs << 6) & 0x03030303
        chosen = signs * 0x24 & 0x44444444 | numbers
        low, high = _chosen(chosen, KIND), _chosen(chosen >> 16, KIND)
    else:
        low = _negated(_chosen(tl.load(table + first).to(tl.int32), KIND), signs & 15)
        high = _negated(_chosen(tl.load(table + second).to(tl.int32), KIND), signs >> 4)
    return low, high


@triton.jit
def _entry(table, offset):
    """Return the entry at an offset in bytes, of a table that is aligned to its size."""
    # no carry into the upper half of the address, and one instruction for this and the mask of an index
    place = table.to(tl.int64) | offset.to(tl.int64)
    return tl.load(place.to(tl.pointer_type(tl.int32)))


@triton.jit
def _negated(codes, signs):
    """Return four codes of 1 to 127, the bytes of a word, as int8, negative where a bit of `signs` is set.

    signs: less than 128; the four lowest bits count.
    """
    ones = signs * TO_LOWEST & LOWEST
    return (codes ^ ones * 255) + ones


@triton.jit
def _ones(words):
    """Return how many bits are set."""
    return tl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [words], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _chosen(numbers, KIND: tl.constexpr):
    """Return the magnitudes with the numbers in the four lowest hexadecimal digits, as bytes of a word."""
    return permuted(numbers & 0 | _magnitudes(KIND, 0), numbers & 0 | _magnitudes(KIND, 1), numbers)


@triton.jit
def permuted(first, second, numbers):
    """Return the four bytes of two words whose numbers, 0 to 7, are the four lowest hexadecimal digits of another."""
    given = [first, second, first & 0 | numbers]
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", given, dtype=tl.int32, is_pure=True, pack=1
    )  # fmt: skip
