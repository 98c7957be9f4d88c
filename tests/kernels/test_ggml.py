"""GGUF's tensor types: sizes and values of the `gguf` package, bit for bit, in NumPy and in PyTorch."""

import numpy as np
import pytest
import torch

from dsv4cli.kernels.ggml import types
from tests.support.ggml_blocks import random_rows
from tests.support.slow import slow

# the types of the community's files; a file with another one is refused by name
DECODED = {
    "Q8_0", "Q4_0", "Q5_0", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S",
    "IQ4_NL", "IQ4_XS", "MXFP4", "F16", "BF16", "F32",
}  # fmt: skip
WITH_SCALES = sorted(DECODED - {"F16", "BF16", "F32"})


def theirs(name: str, rows: np.ndarray) -> np.ndarray:
    gguf = pytest.importorskip("gguf")
    dtype = {"F32": np.float32, "F16": np.float16}.get(name, np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):
        return gguf.quants.dequantize(rows.view(dtype), gguf.GGMLQuantizationType[name])


def assert_same_bits(name: str, rows: np.ndarray) -> None:
    expected = theirs(name, rows).view(np.uint32)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(types.decode(name, rows).view(np.uint32), expected)
    found = types.decode(name, torch.from_numpy(rows))
    assert found.dtype == torch.float32
    np.testing.assert_array_equal(found.numpy().view(np.uint32), expected)


def test_the_table_has_the_listed_types():
    assert set(types.DECODED) == DECODED


def test_sizes_are_those_of_the_gguf_package():
    gguf = pytest.importorskip("gguf")
    theirs = {kind.name: (kind.value, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}
    ours = {name: (kind.number, kind.values, kind.nbytes) for name, kind in types.TYPES.items()}
    assert {name: ours[name] for name in theirs} == theirs


@pytest.mark.parametrize("blocks", [300, *slow(10_000)])
@pytest.mark.parametrize("name", sorted(DECODED))
def test_random_blocks_have_the_bits_of_the_gguf_package(name, blocks):
    rows = random_rows(name, blocks, 1, seed=blocks)
    rows = rows[~types.damaged_blocks(name, rows)[:, 0]]
    assert len(rows) > blocks // 2
    assert_same_bits(name, rows)
    # several blocks in a row, and a stack of matrices
    wide = random_rows(name, 12, 3, seed=1)
    stacked = types.decode(name, wide.reshape(2, 6, -1))
    np.testing.assert_array_equal(stacked.reshape(12, -1), types.decode(name, wide))


@pytest.mark.parametrize("name", sorted(DECODED))
@pytest.mark.parametrize("byte", [0x00, 0x01, 0x55, 0x7B, 0x80, 0xAA, 0xFB])
def test_edge_blocks_have_the_bits_of_the_gguf_package(name, byte):
    rows = np.full((1, types.TYPES[name].nbytes * 2), byte, np.uint8)
    assert_same_bits(name, rows)


@pytest.mark.parametrize("name", WITH_SCALES)
@pytest.mark.parametrize("scale", [0x0000, 0x8000, 0x0001, 0x03FF, 0x7BFF, 0xFBFF])
def test_codes_at_their_limits_with_extreme_scales(name, scale):
    kind = types.TYPES[name]
    rows = np.zeros((3, kind.nbytes), np.uint8)
    rows[1], rows[2] = 0xFF, 0x7F
    for offset in kind.halves:
        rows[:, offset : offset + 2] = np.frombuffer(np.uint16(scale).tobytes(), np.uint8)
    if kind.e8m0:
        rows[:, 0] = scale & 0xFF if scale & 0xFF < 255 else 254
    assert_same_bits(name, rows)


@pytest.mark.parametrize("name", WITH_SCALES)
def test_a_block_with_a_scale_that_is_not_finite_is_found(name):
    kind = types.TYPES[name]
    assert kind.has_scales
    rows = np.zeros((4, kind.nbytes * 3), np.uint8)
    assert not types.damaged_blocks(name, rows).any()
    for offset in kind.halves or (0,):
        for bits in (0x7C00, 0xFC00, 0x7E01) if kind.halves else (0xFF,):
            damaged = rows.copy()
            place = 1 * kind.nbytes + offset
            raw = np.uint16(bits).tobytes() if kind.halves else bytes([bits])
            damaged[2, place : place + len(raw)] = np.frombuffer(raw, np.uint8)
            for given in (damaged, torch.from_numpy(damaged)):
                found = types.damaged_blocks(name, given)
                assert found.shape == (4, 3)
                assert [tuple(map(int, at)) for at in np.argwhere(np.asarray(found))] == [(2, 1)]


@pytest.mark.parametrize("name", ["IQ2_XXS", "Q4_K"])
def test_rows_may_be_a_view_at_any_offset(name):
    rows = random_rows(name, 6, 2, seed=3)
    padded = np.concatenate((np.zeros((6, 1), np.uint8), rows), axis=1)
    np.testing.assert_array_equal(types.decode(name, padded[:, 1:]), types.decode(name, rows))
    view = torch.from_numpy(padded)[:, 1:]
    np.testing.assert_array_equal(types.decode(name, view).numpy(), types.decode(name, rows))
