"""Comparing values: what is equal, what is the same bit for bit, and how large the errors are."""

from itertools import pairwise
from math import inf, sqrt

import numpy as np
import pytest

from dsv4cli.engine.checkpoint.compare import CHUNK, Comparison, FirstDifference, row_chunks

NAN, OTHER_NAN = np.array([0x7FC00000, 0xFFC00001], np.uint32).view(np.float32)


def compared(first: list[list[float]], second: list[list[float]]) -> Comparison:
    found = Comparison()
    found.add(np.array(first, np.float32), np.array(second, np.float32), 0)
    return found


def test_the_same_values_are_exact():
    found = compared([[1, -0.0, inf, NAN]], [[1, -0.0, inf, OTHER_NAN]])
    assert found.exact
    assert (found.values, found.different, found.zero_signs, found.share) == (4, 0, 0, 0)
    assert (found.relative_error, found.largest, found.first) == (0, 0, None)


def test_a_zero_of_the_other_sign_is_equal_and_not_exact():
    found = compared([[0, -0.0, 0, 5]], [[-0.0, 0, 0, 5]])
    assert found.equal
    assert not found.exact
    assert (found.different, found.zero_signs, found.relative_error, found.first) == (0, 2, 0, None)


def test_errors_are_relative_to_the_first():
    found = compared([[3, 4, -0.0], [0, 0, 0]], [[3, 4, 0], [0, -1, 2]])
    assert not found.equal
    assert (found.values, found.different, found.zero_signs, found.share) == (6, 2, 1, 1 / 3)
    assert found.relative_error == pytest.approx(sqrt(5) / 5, rel=1e-15)
    assert found.largest == 2
    assert found.first == FirstDifference(1, 1, 0, -1)


@pytest.mark.parametrize(
    ("first", "second"), [(1, NAN), (NAN, 1), (inf, 1), (inf, -inf), (0, 1), (3e38, -inf)], ids=str
)
def test_an_error_that_no_number_measures_is_infinite(first, second):
    found = compared([[first, 0]], [[second, 0]])
    assert (found.different, found.relative_error) == (1, inf)
    assert found.largest == (1 if first == 0 else inf)


@pytest.mark.parametrize("scale", [1e-38, 1e-15, 1, 1e15, 1e38])
def test_any_magnitude_is_measured(scale):
    random = np.random.default_rng(0)
    first = random.uniform(-1, 1, (300, 40))
    second = first * (1 + 1e-3 * random.uniform(-1, 1, first.shape))
    ours, theirs = ((values * scale).astype(np.float32) for values in (first, second))
    found = Comparison()
    found.add(ours, theirs, 0)
    expected = np.linalg.norm(ours.astype(float) - theirs) / np.linalg.norm(ours.astype(float))
    # the reference is summed in float32 along a row of 40
    assert found.relative_error == pytest.approx(expected, rel=1e-6)
    assert found.largest == pytest.approx(np.abs(ours.astype(float) - theirs).max())


def test_pieces_count_as_the_whole_in_any_order():
    random = np.random.default_rng(0)
    first = random.normal(size=(300, 7)).astype(np.float32)
    second = first.copy()
    second[250:, 3] += 1
    second[77, 5] = 9
    first[[3, 200], 6], second[[3, 200], 6] = 0.0, -0.0
    whole, pieces = Comparison(), Comparison()
    whole.add(first, second, 0)
    for rows in (slice(256, 300), slice(0, 128), slice(128, 256), slice(300, 300)):
        pieces.add(first[rows], second[rows], rows.start)
    assert whole.first == pieces.first == FirstDifference(77, 5, float(first[77, 5]), 9)
    assert (whole.values, whole.different, whole.largest) == (pieces.values, pieces.different, pieces.largest)
    assert whole.zero_signs == pieces.zero_signs == 2
    assert whole.relative_error == pytest.approx(pieces.relative_error, rel=1e-12)


def test_integers_are_compared_as_they_are():
    found = Comparison()
    ours = np.array([[2**62, -3]], np.int64)
    found.add(ours, ours.copy(), 0)
    assert found.exact
    found.add(ours, ours + np.array([[1, 0]]), 1)  # 2**62 + 1 is no float
    assert (found.values, found.different, found.zero_signs) == (4, 1, 0)


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (129, 4096), (5000, 7), (300, 2 * CHUNK), (4096, 2048), (3, 0)])
def test_chunks_cover_every_row_once_from_multiples_of_128(shape):
    chunks = list(row_chunks(*shape))
    assert all(rows.start % 128 == 0 for rows in chunks)
    assert [a.stop for a, _ in pairwise(chunks)] == [b.start for _, b in pairwise(chunks)]
    assert (chunks[0].start, chunks[-1].stop) == (0, shape[0]) if chunks else shape[0] == 0
