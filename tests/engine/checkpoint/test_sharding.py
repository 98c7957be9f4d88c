"""Which numbers of ranks divide a model: one rule for loading, for `--tp` and for `inspect --fit`."""

import pytest

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.sharding import check_ranks
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.fit.share import SharedModel
from dsv4cli.errors import UsageError

OFFICIAL = Formats()
RANKS = (1, 2, 3, 4, 8, 16, 32)


@pytest.mark.parametrize(
    ("model", "formats", "possible"),
    [
        ("random:flash,layers=4,experts=8", OFFICIAL, {1, 2, 4, 8}),
        ("random:pro,layers=4,experts=8", OFFICIAL, {1, 2, 4, 8}),
        # what comes into FP4 experts of 3,072 inner values is rounded in blocks of 128: 16 ranks would have 192
        ("random:pro,layers=4,experts=8", Formats("bf16"), {1, 2, 4, 8}),
        ("random:pro,layers=4,experts=8", Formats("bf16", "bf16"), {1, 2, 4, 8, 16}),
        ("random:tiny", OFFICIAL, {1, 2}),
    ],
)
def test_fit_and_run_know_the_same_numbers_of_ranks(model, formats, possible):
    config = resolve_model(model).config
    shared = SharedModel(config, formats, None)
    assert {ranks for ranks in RANKS if shared.divides(ranks)} == possible
    for ranks in RANKS:
        if ranks not in possible:
            with pytest.raises(UsageError) as refused:
                check_ranks(config, expected_tensors(config, formats).values(), ranks, rounds=True)
            # each number that is advised would do
            assert refused.value.remedy == f"use one of these numbers: {', '.join(map(str, sorted(possible)))}"
