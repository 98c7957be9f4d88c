"""How far back a conversation's state can be used: what rolling back reaches, no token less and none more."""

import pytest

from dsv4cli.engine.config.capacity import ROLLBACK
from dsv4cli.engine.config.model_config import parse_config
from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.cache import Cache
from dsv4cli.engine.runtime.prefix_cache import Prefixes


@pytest.mark.parametrize("marked", [False, True], ids=["running", "restored"])
@pytest.mark.parametrize(("back", "found"), [(ROLLBACK, 30 - ROLLBACK), (ROLLBACK + 1, 0)])
def test_as_far_back_as_the_rings_hold(marked, back, found):
    prefixes = Prefixes(Cache(parse_config(TINY, "test"), Numerics.plain()))
    ids = list(range(30))
    stream = prefixes.begin(ids)
    stream.ids += ids
    stream.done = 30
    prefixes.cache.advance(stream.sequence, 30)
    if marked:
        prefixes.mark()
        prefixes.cache.free(stream.sequence)
        prefixes.recover()
    # the last token of a prompt is not taken from what is held
    begun = prefixes.begin([*ids[: 30 - back], 99])
    assert (begun.done, begun.sequence.length, begun.ids) == (found, found, ids[:found])
