"""What a server does once it is ready."""

import gc

import pytest

from dsv4cli.engine.server.warm import CPU_STEP_MS, CacheOptions, ready_engine, spare_what_is_there
from dsv4cli.engine.settings import AUTO_DRAFTING, Limits
from tests.support.shared_models import shared_model
from tests.support.slow import slow_rows


@pytest.mark.parametrize(("step_ms", "target"), [(None, CPU_STEP_MS), *slow_rows((70.0, 70.0), (0.0, None))])
def test_prompts_are_prefilled_beside_streams_within_a_target(step_ms, target):
    """A CPU has one too; 0 asks for none."""
    share, model = CacheOptions(1 << 24, step_ms), shared_model("random:tiny,layers=3")
    with ready_engine(model, share, Limits(max_tokens=8), "cpu", None, AUTO_DRAFTING, lambda _: None) as engine:
        pacer = engine._pacer
        assert (None if pacer is None else 1e3 * pacer._policy.target) == target


def test_the_collector_looks_at_what_comes_later():
    there = len(gc.get_objects())
    try:
        spare_what_is_there()
        assert gc.get_freeze_count() > there / 2
        assert len(gc.get_objects()) < there / 10
    finally:
        gc.unfreeze()


def test_full_collections_do_not_wait_for_as_many_objects_as_were_spared(monkeypatch):
    """CPython's threshold is a part of what the last full collection found: the last one finds nothing."""
    called = []
    for name in ("collect", "freeze"):
        monkeypatch.setattr(gc, name, lambda name=name: called.append(name))
    spare_what_is_there()
    assert called == ["collect", "freeze", "collect"]
