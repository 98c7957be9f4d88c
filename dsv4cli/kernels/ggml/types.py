"""The tensor types of GGUF: number, block layout, decoder and offsets of the block's scales.

Source: ggml.h (ggml_type) and ggml-common.h (the blocks).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import gcd

from dsv4cli.kernels.ggml import blocks
from dsv4cli.kernels.ggml.arrays import Array, empty, moved, units

# exponent bits of an fp16 number, in its second byte: all ones in NaN and infinity
HALF_EXPONENT = 0x7C
# ggml decodes this scale of MXFP4 as 2 ** 127, the format's definition says NaN
E8M0_NAN = 255
# most rows in a tile, and most bytes in a unit of one; see `to_tiles`
TILE_ROWS, UNIT_BYTES = 8, 8


@dataclass(frozen=True)
class BlockType:
    """A tensor type.

    Attributes:
        number: its code in a file.
        values, nbytes: per block; every row is a whole number of blocks.
        decoder: uint8 [..., blocks, nbytes] -> fp32 [..., blocks, values]; None if dsv4 cannot decode the type.
        halves: offsets of the block's fp16 scales.
        e8m0: whether the first byte of a block is an e8m0 scale.
        fields: offsets of the block's fields that kernels read, the first at 0; see `to_tiles`.
    """

    number: int
    values: int = 1
    nbytes: int = 4
    decoder: Callable[[Array], Array] | None = None
    halves: tuple[int, ...] = ()
    e8m0: bool = False
    fields: tuple[int, ...] = (0,)

    @property
    def ends(self) -> tuple[int, ...]:
        """The offsets of the fields, and the bytes of the block."""
        return (*self.fields, self.nbytes)

    @property
    def units(self) -> tuple[int, ...]:
        """The bytes of a unit of each field; see `to_tiles`."""
        return tuple(gcd(UNIT_BYTES, end - start) for start, end in pairwise(self.ends))

    @property
    def has_scales(self) -> bool:
        """Whether blocks have scales, so that a matrix is quantized."""
        return self.e8m0 or bool(self.halves)


TYPES = {
    "F32": BlockType(0, 1, 4, blocks.f32),
    "F16": BlockType(1, 1, 2, blocks.f16),
    "BF16": BlockType(30, 1, 2, blocks.bf16),
    "Q4_0": BlockType(2, 32, 18, blocks.q4_0, (0,), fields=(0, 2)),
    "Q5_0": BlockType(6, 32, 22, blocks.q5_0, (0,), fields=(0, 2, 6)),
    "Q8_0": BlockType(8, 32, 34, blocks.q8_0, (0,), fields=(0, 2)),
    "Q2_K": BlockType(10, 256, 84, blocks.q2_k, (80, 82), fields=(0, 16, 80)),
    "Q3_K": BlockType(11, 256, 110, blocks.q3_k, (108,), fields=(0, 32, 96, 108)),
    "Q4_K": BlockType(12, 256, 144, blocks.q4_k, (0, 2), fields=(0, 4, 16)),
    "Q5_K": BlockType(13, 256, 176, blocks.q5_k, (0, 2), fields=(0, 4, 16, 48)),
    "Q6_K": BlockType(14, 256, 210, blocks.q6_k, (208,), fields=(0, 128, 192, 208)),
    "IQ2_XXS": BlockType(16, 256, 66, blocks.iq2_xxs, (0,), fields=(0, 2)),
    "IQ2_XS": BlockType(17, 256, 74, blocks.iq2_xs, (0,), fields=(0, 2, 66)),
    "IQ2_S": BlockType(22, 256, 82, blocks.iq2_s, (0,), fields=(0, 2, 34, 66, 74)),
    "IQ3_XXS": BlockType(18, 256, 98, blocks.iq3_xxs, (0,), fields=(0, 2, 66)),
    "IQ3_S": BlockType(21, 256, 110, blocks.iq3_s, (0,), fields=(0, 2, 66, 74, 106)),
    "IQ4_NL": BlockType(20, 32, 18, blocks.iq4_nl, (0,), fields=(0, 2)),
    "IQ4_XS": BlockType(23, 256, 136, blocks.iq4_xs, (0,), fields=(0, 2, 4, 8)),
    "MXFP4": BlockType(39, 32, 17, blocks.mxfp4, e8m0=True, fields=(0, 1)),
    "I32": BlockType(26, 1, 4),
    # known by size only
    "F64": BlockType(28, 1, 8), "I8": BlockType(24, 1, 1), "I16": BlockType(25, 1, 2), "I64": BlockType(27, 1, 8),
    "Q4_1": BlockType(3, 32, 20), "Q5_1": BlockType(7, 32, 24), "Q8_1": BlockType(9, 32, 40),
    "Q8_K": BlockType(15, 256, 292), "IQ1_S": BlockType(19, 256, 50), "IQ1_M": BlockType(29, 256, 56),
    "TQ1_0": BlockType(34, 256, 54), "TQ2_0": BlockType(35, 256, 66), "NVFP4": BlockType(40, 64, 36),
    "Q1_0": BlockType(41, 128, 18),
}  # fmt: skip
NAMES = {kind.number: name for name, kind in TYPES.items()}
# types of weights that can be decoded; token ids (I32) are integers
DECODED = tuple(name for name, kind in TYPES.items() if kind.decoder is not None)
# bits of a value
BITS = {name: kind.nbytes * 8 / kind.values for name, kind in TYPES.items()}

# dtypes of tensors that keep their blocks: rows of bytes
BLOCK_DTYPES = {f"ggml:{name}": name for name in DECODED}


def block_dtype(name: str) -> str:
    """Return the dtype of tensors that keep the blocks of a type."""
    return f"ggml:{name}"


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes of a row, whose columns must fill whole blocks."""
    kind = TYPES[name]
    assert columns % kind.values == 0, (name, columns)
    return columns // kind.values * kind.nbytes


def tile_height(name: str, rows: int) -> int:
    """Return how many rows a tile has in a matrix with this many rows; see `to_tiles`. 1 for types without blocks."""
    return gcd(TILE_ROWS, rows) if TYPES[name].values > 1 else 1


def to_tiles(name: str, rows: Array, height: int, out: Array | None = None) -> Array:
    """Return rows of blocks, uint8 [..., N, bytes], in tiles of `height` rows; N is a multiple of it.

    A tile holds its fields one after the other, each of all its blocks. A field is divided into units of up to 8 bytes:
    first those of the first block, and of a unit first that of the first row. So what kernels load of several rows is
    adjacent, and aligned as its size allows; blocks themselves are aligned to 2 bytes or to 1.

    Args:
        out: contiguous memory for the result, of the same shape.
    """
    tiles = empty(rows) if out is None else out
    for of_rows, of_tiles in _fields(TYPES[name], rows, tiles, height):
        of_tiles[...] = of_rows
    return tiles


def from_tiles(name: str, tiles: Array, height: int) -> Array:
    """Return the rows whose `to_tiles` these are."""
    rows = empty(tiles)
    for of_rows, of_tiles in _fields(TYPES[name], rows, tiles, height):
        of_rows[...] = of_tiles
    return rows


def _fields(kind: BlockType, rows: Array, tiles: Array, height: int) -> Iterator[tuple[Array, Array]]:
    """Yield each field in rows and in tiles: [..., tiles, blocks, units, height, parts of a unit]."""
    *outer, count, nbytes = rows.shape
    number = nbytes // kind.nbytes
    blocks = rows.reshape(*outer, count // height, height, number, kind.nbytes)
    places = tiles.reshape(*outer, count // height, height * nbytes)
    for (start, end), size in zip(pairwise(kind.ends), kind.units, strict=True):
        of_rows = units(blocks[..., start:end], size)
        of_tiles = units(places[..., height * number * start : height * number * end], size)
        shape = (*outer, count // height, number, (end - start) // size, height, of_tiles.shape[-1])
        yield moved(of_rows, -4, -2), of_tiles.reshape(shape)


def decode(name: str, rows: Array) -> Array:
    """Return the values of rows, uint8 [..., bytes] -> fp32 [..., columns], bit-identical to ggml's. name: in DECODED.

    Rows are a NumPy array or a PyTorch tensor on any device; the result is of the same kind.
    """
    kind = TYPES[name]
    assert kind.decoder is not None, name
    values = kind.decoder(rows.reshape(*rows.shape[:-1], -1, kind.nbytes))
    return values.reshape(*rows.shape[:-1], -1)


def damaged_blocks(name: str, rows: Array) -> Array:
    """Return which blocks have a scale that is NaN or infinite: rows uint8 [..., bytes] -> bool [..., blocks]."""
    kind = TYPES[name]
    raw = rows.reshape(*rows.shape[:-1], -1, kind.nbytes)
    if kind.e8m0:
        return raw[..., 0] == E8M0_NAN
    found = raw[..., 0] != raw[..., 0]
    for offset in kind.halves:
        found |= raw[..., offset + 1] & HALF_EXPONENT == HALF_EXPONENT
    return found
