"""Numbers of others beside ours: the official code's recordings, transformers, files of ATOM."""

from dataclasses import replace
from inspect import signature

import pytest
import torch

from dsv4cli.engine.tracing.atom import AtomFolder
from dsv4cli.engine.tracing.compare import differences
from dsv4cli.engine.tracing.opened import is_recording, open_recording
from dsv4cli.engine.tracing.passes import Pass, Plan
from dsv4cli.engine.tracing.record import keep_noise, with_fed_twin
from dsv4cli.engine.tracing.recording import RecordedFolder
from dsv4cli.engine.tracing.report import compared
from dsv4cli.engine.tracing.stages import BY_NAME, STREAMS
from dsv4cli.engine.tracing.transformers import recorded_transformers
from dsv4cli.engine.tracing.walk import Walk
from dsv4cli.errors import UsageError
from tests.engine.model.test_mutations import MUTATIONS
from tests.support import oracle, tracing

# every stage but those that no hook of transformers sees
UNSEEN = {"attn.q", "attn.kv"}


def beside_official(net, prompt, folder):
    """Our net, fed with the official streams, beside the official recording."""
    one = tracing.official(net, prompt, folder / "official")
    plan = with_fed_twin(folder / "ours", one.manifest, one.folder, one.manifest)
    ours, twin = tracing.recorded(Walk(tracing.model(net), tracing.CPU), plan)
    return compared(one, ours, keep_noise(ours, twin, fed=True), fed=True)


@pytest.mark.parametrize(
    ("net", "prompt"),
    [
        ("tiny-flash", 5),
        pytest.param("tiny-pro", 5, marks=pytest.mark.slow),
        pytest.param("tiny-flash", 133, marks=pytest.mark.slow),
        pytest.param("tiny-pro", 133, marks=pytest.mark.slow),
    ],
)
def test_official_recordings_name_no_stage(net, prompt, tmp_path):
    found = beside_official(net, prompt, tmp_path)
    layers = tracing.sound_model(net).config.num_hidden_layers
    assert len(found.verdicts) == layers + 2  # the embedding, what each layer gives, logits
    assert found.beyond == []


@pytest.mark.slow
def test_a_mistake_shows_in_an_official_recording(monkeypatch, tmp_path):
    MUTATIONS["route scale missing"].put_in(monkeypatch)
    first = beside_official("tiny-flash", 5, tmp_path).first
    assert first is not None
    assert first.place == "layer 0, its output"


@pytest.mark.slow  # test_oracle.py compares the logits
@pytest.mark.parametrize("cached", [False, True])
def test_transformers_agrees_at_every_stage(cached, tmp_path):
    model, ids = oracle.engine_model(0), oracle.random_ids(0, 140)
    theirs = oracle.transformers_model(model)
    prompt = 136 if cached else 140
    with torch.no_grad(), recorded_transformers(theirs, ids, tmp_path / "theirs", prompt):
        # transformers 5.24 deprecates the older name of the argument
        cache = "cache" if "cache" in signature(theirs.forward).parameters else "past_key_values"
        given = theirs(input_ids=torch.tensor([ids[:prompt]]), use_cache=cached)
        for token in ids[prompt:]:
            given = theirs(input_ids=torch.tensor([[token]]), use_cache=True, **{cache: getattr(given, cache)})
    one = RecordedFolder(tmp_path / "theirs")
    plan = Plan(replace(one.manifest, model="ours"), (Pass(tmp_path / "ours"),))
    [ours] = tracing.recorded(Walk(model, tracing.CPU), plan)
    found = list(differences(one, ours, fed=False))
    assert {one.stage for one in found} == BY_NAME.keys() - UNSEEN
    assert [(one.layer, one.stage, one.relative) for one in found if one.relative > 1e-5] == []


@pytest.fixture
def recording(tmp_path):
    return tracing.official("tiny-flash", 5, tmp_path / "official")


def dump(folder, recording, layer, warm_up=True, first=0):
    """A block's output as ATOM writes it: a call that warms up, the prompt, a token at a time; first: call's number."""
    folder.mkdir()
    rows = recording.rows(layer + 1, STREAMS, 0, recording.manifest.rows("token", 0))
    prompt = recording.manifest.texts[0].prompt
    calls = [*([torch.zeros(64, *rows.shape[1:])] if warm_up else []), rows[:prompt], *rows[prompt:].split(1)]
    for number, call in enumerate(calls, first):
        name = f"layer{layer:02}_Block_rank0_call{number:03}.pt"
        torch.save({"hidden": call.flatten(1), "shape": tuple(call.shape)}, folder / name)


def test_files_of_atom(recording, tmp_path):
    dump(tmp_path / "atom", recording, 2)
    assert is_recording(tmp_path / "atom")
    theirs = open_recording(tmp_path / "atom", recording.manifest)
    assert (theirs.layers(), theirs.stages(3)) == ([3], [STREAMS])
    assert torch.equal(theirs.rows(3, STREAMS, 2, 11), recording.rows(3, STREAMS, 2, 11))


def test_calls_of_atom_are_in_order_beyond_the_thousandth(recording, tmp_path):
    dump(tmp_path / "atom", recording, 2, first=997)
    theirs = open_recording(tmp_path / "atom", recording.manifest)
    assert torch.equal(theirs.rows(3, STREAMS, 0, 11), recording.rows(3, STREAMS, 0, 11))


class Harmful:
    """Runs what it likes where it is unpickled."""

    def __reduce__(self):
        return print, ("unpickled",)


@pytest.mark.parametrize("content", [{"hidden": torch.zeros(9, 7)}, {"tokens": [1]}, {"hidden": Harmful()}, [1]])
def test_files_that_hold_something_else(content, recording, tmp_path, capsys):
    (tmp_path / "atom").mkdir()
    torch.save(content, tmp_path / "atom" / "layer02_Block_rank0.pt")
    with pytest.raises(UsageError, match="has no rows of shape 4 x 256"):
        AtomFolder(tmp_path / "atom", recording.manifest).rows(3, STREAMS, 0, 1)
    assert capsys.readouterr().out == ""


def test_files_of_other_tokens(recording, tmp_path):
    dump(tmp_path / "atom", recording, 2, warm_up=False)
    (tmp_path / "atom" / "layer02_Block_rank0_call000.pt").unlink()
    with pytest.raises(UsageError, match="6 rows, but the text has 11 tokens"):
        open_recording(tmp_path / "atom", recording.manifest).rows(3, STREAMS, 0, 1)
    (tmp_path / "none").mkdir()
    with pytest.raises(UsageError, match="no file of a known class"):
        AtomFolder(tmp_path / "none", recording.manifest)
