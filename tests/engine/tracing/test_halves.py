"""Whole forward passes: a half of a block that takes equal streams on both sides is judged as a fed one."""

import pytest
import torch

from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.tracing.compare import StageDifference
from dsv4cli.engine.tracing.judge import Moved, judged, judged_by_halves
from dsv4cli.engine.tracing.passes import Pass, Plan
from dsv4cli.engine.tracing.record import has_noise_of, keep_noise, manifest_of, with_twins
from dsv4cli.engine.tracing.report import compared
from dsv4cli.engine.tracing.stages import STREAMS
from dsv4cli.engine.tracing.walk import Walk
from tests.support import tracing
from tests.support.slow import slow

NET = "tiny-flash"
TEXT = tracing.text(40)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A recording, its noise, and that of its halves."""
    folder = tmp_path_factory.mktemp("sound") / "A"
    plan = with_twins(folder, manifest_of(tracing.source(NET), Numerics.reference(), [TEXT]))
    recording, *twins = tracing.recorded(Walk(tracing.sound_model(NET), tracing.CPU), plan)
    noise, halves = (keep_noise(recording, twin, fed=twin.manifest.fed) for twin in twins)
    return recording, noise, halves


def beside(sound, walk, folder, *, sharply=True):
    recording, noise, halves = sound
    [other] = tracing.recorded(walk, Plan(recording.manifest, (Pass(folder),)))
    return compared(recording, other, noise, fed=False, halves=halves if sharply else None)


@pytest.mark.parametrize("layer", [*slow(0), 3])
def test_a_mistake_is_named_where_it_arises_though_later_noise_would_hide_it(sound, tmp_path, layer):
    model = tracing.model(NET)
    # the latent queries' norm: 6 times what rounding makes of them, 0.4 times what it makes of all before
    model.layers[layer].attn.q_norm.eps = 1e-2
    walk = Walk(model, tracing.CPU)
    found = beside(sound, walk, tmp_path / "B")
    assert found.first is not None
    assert found.first.place == f"layer {layer}, attention, queries"
    assert found.first.excess > 2
    assert beside(sound, walk, tmp_path / "C", sharply=False).first is None


def test_rounding_names_nothing(sound, tmp_path):
    found = beside(sound, Walk(tracing.sound_model(NET), tracing.CPU, chunk=18), tmp_path / "B")
    assert found.beyond == []
    assert not found.identical


def test_the_same_again_is_identical(sound, tmp_path):
    assert beside(sound, Walk(tracing.sound_model(NET), tracing.CPU), tmp_path / "B").identical


def test_no_stage_is_judged_less_sharply_than_without_halves():
    rows = torch.full((8,), 0.01)
    alike = torch.ones(8, dtype=torch.bool)

    def difference(layer, stage, rows):
        return StageDifference(layer, stage, 1.0, 0.0, None, 0.0, rows, alike)

    found = [
        difference(0, STREAMS, 0 * rows),
        difference(0, "attn.q", rows),
        difference(0, "ffn.streams", rows),
        difference(0, "ffn.input", rows),
    ]
    noise = {(0, one.stage): Moved(rows, alike) for one in found}
    for size in (0.01, 100.0):
        halves = {place: Moved(size * moved.rows, alike) for place, moved in noise.items()}
        sharp, usual = list(judged_by_halves(found, noise, halves)), list(judged(found, noise))
        assert all(one.excess >= other.excess for one, other in zip(sharp, usual, strict=True))
        # the experts take streams that differ: what has come before explains more
        assert [one.excess > other.excess for one, other in zip(sharp, usual, strict=True)] == [
            False, size < 1, size < 1, False
        ]  # fmt: skip


def test_halves_are_judged_sharply_only_where_their_noise_is_of_the_two_sides():
    own = manifest_of(tracing.source(NET), Numerics.reference(), [TEXT])
    plain = manifest_of(tracing.source(NET), Numerics.plain(), [TEXT])
    assert has_noise_of(own, own, own)
    assert not has_noise_of(own, own, plain)


def test_streams_that_are_not_recorded_are_fed_to_no_twin(tmp_path):
    manifest = manifest_of(tracing.source(NET), Numerics.reference(), [TEXT], what=("attn",))
    assert [one.fed for one in with_twins(tmp_path, manifest).passes] == [None, None]
