"""Which rows each rank has."""

from itertools import pairwise

import pytest

from dsv4cli.engine.config.capacity import divides_from
from dsv4cli.kernels.shares import UNIT, share_of


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 16])
def test_shares_are_all_rows_in_whole_units(ranks):
    for tokens in range(4 * ranks * UNIT + 2):
        shares = [share_of(tokens, rank, ranks) for rank in range(ranks)]
        assert (shares[0].start, shares[-1].stop) == (0, tokens)
        assert all(one.stop == other.start for one, other in pairwise(shares))
        # the last has what is left
        assert all(one.start % UNIT == 0 for one in shares if one.start < tokens)
        assert max(one.stop - one.start for one in shares) == shares[0].stop


@pytest.mark.parametrize("ranks", [2, 4, 8, 16, 32])
def test_where_rows_are_divided_each_rank_has_some(ranks):
    for tokens in range(divides_from(ranks), 4 * divides_from(ranks)):
        last = share_of(tokens, ranks - 1, ranks)
        assert last.stop > last.start
