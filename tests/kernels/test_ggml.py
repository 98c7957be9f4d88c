"""GGUF's tensor types: sizes and values of the `gguf` package, bit for bit, in NumPy and in PyTorch."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from dsv4cli.kernels import experts, gemm
from dsv4cli.kernels.experts import ExpertWeights
from dsv4cli.kernels.ggml import types
from dsv4cli.kernels.stored_matrix import StoredMatrix
from tests.support.ggml_blocks import block_matrix, random_rows
from tests.support.slow import slow, slow_except, slow_rows

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


@pytest.mark.parametrize("height", [1, 4, 8])
@pytest.mark.parametrize("name", sorted(DECODED))
def test_a_tile_holds_the_same_unit_of_its_rows_together(name, height):
    kind, rows = types.TYPES[name], random_rows(name, 16, 3, seed=1)
    # the number of each byte: row by row, block by block
    numbers = np.arange(rows.size).reshape(16 // height, height, 3, kind.nbytes)
    expected = []
    for tile in numbers:
        for start, end in pairwise([*kind.fields, kind.nbytes]):
            unit = next(size for size in (8, 4, 2, 1) if (end - start) % size == 0)
            for block in range(3):
                for at in range(start, end, unit):
                    expected += [byte for row in tile[:, block] for byte in row[at : at + unit]]
    for given in (rows, torch.from_numpy(rows)):
        found = types.to_tiles(name, given, height)
        np.testing.assert_array_equal(np.asarray(found).ravel(), rows.ravel()[expected])
        np.testing.assert_array_equal(types.from_tiles(name, found, height), rows)
    stacked = types.to_tiles(name, torch.from_numpy(rows).view(2, 8, -1), height)
    np.testing.assert_array_equal(stacked.view(16, -1), types.to_tiles(name, rows, height))


@pytest.mark.parametrize("rows", [24, 20, 7])
def test_rows_are_found_in_their_tiles(rows):
    stored = torch.from_numpy(random_rows("Q4_K", rows, 2, seed=4, scale=0.1))
    matrix, numbers = block_matrix(stored, "Q4_K"), torch.tensor([5, 0, rows - 1, 5])
    assert matrix.height == {24: 8, 20: 4, 7: 1}[rows]
    assert torch.equal(matrix.values(), types.decode("Q4_K", stored))
    assert torch.equal(matrix.values_of(numbers), matrix.values()[numbers])
    # of 8, 12 and 13 rows: tiles stay whole, and the last part has fewer
    parts = [part.values() for part in matrix.parts(13 * 512)]
    assert [len(part) for part in parts] == {24: [8, 8, 8], 20: [12, 8], 7: [7]}[rows]
    assert torch.equal(torch.cat(parts), matrix.values())


@pytest.mark.parametrize("name", ["IQ2_XXS", "Q4_K"])
def test_rows_may_be_a_view_at_any_offset(name):
    rows = random_rows(name, 6, 2, seed=3)
    padded = np.concatenate((np.zeros((6, 1), np.uint8), rows), axis=1)
    np.testing.assert_array_equal(types.decode(name, padded[:, 1:]), types.decode(name, rows))
    view = torch.from_numpy(padded)[:, 1:]
    np.testing.assert_array_equal(types.decode(name, view).numpy(), types.decode(name, rows))


@pytest.mark.parametrize("name", [*slow_except(["Q2_K", "IQ2_XXS", "Q8_0"], sorted(DECODED))])
def test_linears_multiply_by_the_values_of_blocks(name):
    kind = types.TYPES[name]
    columns = 512
    rows = torch.from_numpy(random_rows(name, 70, columns // kind.values, seed=2, scale=0.01))
    matrix = block_matrix(rows, name)
    values = torch.from_numpy(theirs(name, rows.numpy())).double()
    assert matrix.block_type == name
    assert torch.equal(matrix.values().double(), values)
    for tokens in (1, 9):
        x = torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens))
        exact = x.double() @ values.T
        # 512 products summed in fp32
        bound = 512 * 2**-24 * (x.abs().double() @ values.abs().T)
        assert ((gemm.linear(x, matrix).double() - exact).abs() <= bound).all()
        grouped = gemm.grouped_linear(x.view(tokens, 2, -1).repeat(1, 1, 2), block_matrix(rows, name))
        assert grouped.shape == (tokens, 2, 35)


@pytest.mark.parametrize(("up", "down"), [("IQ2_XXS", "Q2_K"), *slow_rows(("MXFP4", "Q6_K"))])
def test_experts_multiply_by_the_values_of_blocks(up, down):

    def stack(name, seed):
        rows = random_rows(name, 3 * 256, 256 // types.TYPES[name].values, seed, scale=0.02)
        return block_matrix(torch.from_numpy(rows).view(3, 256, -1), name)

    blocks = ExpertWeights(stack(up, 1), stack(down, 2), stack(up, 3))
    wide = ExpertWeights(*(StoredMatrix(one.values()) for one in blocks.matrices))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 256, generator=generator)
    chosen, routing = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 2], [2, 0]]), torch.rand(5, 2, generator=generator)
    for weights in (blocks, wide):
        assert weights.count == 3
    found = [experts.routed_experts(x, weights, chosen, routing, 10.0, True) for weights in (blocks, wide)]
    assert torch.equal(*found)
    one = [ExpertWeights(*(matrix.row(1) for matrix in weights.matrices)) for weights in (blocks, wide)]
    assert torch.equal(*(experts.shared_expert(x, weights, 10.0, True) for weights in one))
