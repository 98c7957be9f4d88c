"""The tensor types of GGUF: number, values per block, bytes per block; no torch.

Source: ggml.h (ggml_type) and ggml-common.h (the blocks).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """A tensor type. number: its code in a file. values, nbytes: per block; every row is a whole number of blocks."""

    number: int
    values: int = 1
    nbytes: int = 4


TYPES = {
    "F32": BlockType(0, 1, 4), "F16": BlockType(1, 1, 2), "BF16": BlockType(30, 1, 2), "F64": BlockType(28, 1, 8),
    "I8": BlockType(24, 1, 1), "I16": BlockType(25, 1, 2), "I32": BlockType(26, 1, 4), "I64": BlockType(27, 1, 8),
    "Q4_0": BlockType(2, 32, 18), "Q4_1": BlockType(3, 32, 20), "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24), "Q8_0": BlockType(8, 32, 34), "Q8_1": BlockType(9, 32, 40),
    "Q2_K": BlockType(10, 256, 84), "Q3_K": BlockType(11, 256, 110), "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176), "Q6_K": BlockType(14, 256, 210), "Q8_K": BlockType(15, 256, 292),
    "IQ2_XXS": BlockType(16, 256, 66), "IQ2_XS": BlockType(17, 256, 74), "IQ3_XXS": BlockType(18, 256, 98),
    "IQ1_S": BlockType(19, 256, 50), "IQ4_NL": BlockType(20, 32, 18), "IQ3_S": BlockType(21, 256, 110),
    "IQ2_S": BlockType(22, 256, 82), "IQ4_XS": BlockType(23, 256, 136), "IQ1_M": BlockType(29, 256, 56),
    "TQ1_0": BlockType(34, 256, 54), "TQ2_0": BlockType(35, 256, 66), "MXFP4": BlockType(39, 32, 17),
    "NVFP4": BlockType(40, 64, 36), "Q1_0": BlockType(41, 128, 18),
}  # fmt: skip
NAMES = {kind.number: name for name, kind in TYPES.items()}
# types whose values can be read
READABLE = ("F32", "F16", "BF16", "I32", "Q8_0", "MXFP4")
# bits of a value
BITS = {name: kind.nbytes * 8 / kind.values for name, kind in TYPES.items()}


def row_bytes(name: str, columns: int) -> int:
    """Return the bytes of a row, whose columns must fill whole blocks."""
    kind = TYPES[name]
    assert columns % kind.values == 0, (name, columns)
    return columns // kind.values * kind.nbytes
