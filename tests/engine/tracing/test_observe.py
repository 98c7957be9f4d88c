"""A model that is looked at is the same model as before and behind."""

from types import SimpleNamespace

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.tracing.observe import observed
from dsv4cli.engine.tracing.observer import Observer


def test_ranks_hold_all_rows_where_a_trace_looks_at_them():
    model = Transformer(parse_config(TINY, "test"), Numerics.plain(), World(1, 2, divides_from=3))
    with observed(model, Observer(SimpleNamespace(texts=()), ())):
        assert model.world.own_rows(10) == slice(0, 10)
    assert model.world.own_rows(10) == slice(6, 10)
    assert model.world.own_rows(2) == slice(0, 2)
