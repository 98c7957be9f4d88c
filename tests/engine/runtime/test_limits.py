"""What prompts ask of a model, for which loading leaves room."""

import pytest

from dsv4cli.engine.config.presets import FLASH
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.runtime.limits import workload_of
from dsv4cli.engine.settings import Limits
from dsv4cli.engine.weights.reserve import FAR, Workload

CONFIG = parse_config(FLASH, "flash")


@pytest.mark.parametrize(
    ("lengths", "limits", "load"),
    [
        ([100], Limits(20), Workload(120)),
        ([100, 300], Limits(20, max_context=200), Workload(200, 2)),  # it is cut off there
        ([5] * 65, Limits(3), Workload(8, 64)),  # the others wait
        ([], Limits(3), Workload(1)),
        (None, Limits(3), Workload(FAR)),
        (None, Limits(3, max_context=900, prefill_chunk=64), Workload(900, chunk=64)),
    ],
)
def test_what_is_asked(lengths, limits, load):
    assert workload_of(CONFIG, limits, lengths) == load


def test_what_is_only_scored_has_no_answer():
    assert workload_of(CONFIG, Limits(20), [100], sampled=False) == Workload(100)
