"""`dsv4 convert random:PRESET,… OUT`: a checkpoint of the weights that the preset has without a file."""

import pytest
import torch

from dsv4cli.engine.chat.dialogue import open_dialogue
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.weights.random_weights import RandomRows, random_tensors
from tests.support import conversions
from tests.support.conversions import convert
from tests.support.slow import slow

TINY = "random:tiny,layers=2,seed=3"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written") / "out"
    assert "all are exact" in convert(TINY, folder, "--verify", "full")
    return folder


def test_a_checkpoint_of_random_weights(written):
    identity = resolve_model(TINY).identity
    specs = expected_tensors(identity.config, identity.formats)
    found = conversions.stored(written)
    expected = random_tensors(specs.values(), 3, identity.config.n_routed_experts)
    assert found.keys() == specs.keys()
    for spec, tensor in expected:
        assert (found[spec.name].dtype, tuple(found[spec.name].shape)) == (spec.dtype, spec.shape)
        assert found[spec.name].data == tensor.contiguous().view(torch.uint8).numpy().tobytes(), spec.name
    assert conversions.run("inspect", written)[0] == 0


def test_it_takes_the_text_that_the_preset_takes(written):
    text = "<｜begin▁of▁sentence｜>Grüße"
    ours, theirs = (open_dialogue(resolve_model(str(model)), "off").tokenizer for model in (written, TINY))
    assert ours.encode(text) == theirs.encode(text)


def test_it_is_complete_and_another_seed_is_not(written, tmp_path):
    code, out, _ = conversions.run("convert", TINY, written)
    assert (code, "is complete" in out) == (0, True)
    assert conversions.run("convert", TINY.replace("seed=3", "seed=4"), written)[0] == 2
    convert("--check", written, "--against", TINY)
    code, out, _ = conversions.run("convert", "--check", written, "--against", TINY.replace("seed=3", "seed=4"))
    assert (code, "differs from random:tiny" in out) == (3, True)
    convert(TINY, tmp_path / "nvfp4", "--to", "nvfp4", "--no-mtp", "--dry-run")
    assert not (tmp_path / "nvfp4").exists()


@pytest.mark.parametrize("rows", [*slow((0, 0), (0, 1)), (300, 900), (7808, 7820), *slow((0, 16000))])
def test_rows_are_those_of_the_whole(rows):
    """7,812 rows of 128 are a little less than a period, of which the third tensor has two."""
    identity = resolve_model("random:tiny").identity
    specs = expected_tensors(identity.config, Formats())
    names = (
        "embed.weight",
        "layers.0.attn.wq_a.scale",
        "layers.1.ffn.experts.0.w1.weight",
        "layers.0.ffn.gate.tid2eid",
    )
    for name in names:
        spec = specs[name]
        if name == "embed.weight":
            spec = type(spec)(name, spec.dtype, (16000, 128), spec.family, spec.count)
        whole = next(random_tensors([spec], 0, 4))[1]
        found = RandomRows(0, 4).rows(spec, slice(*rows))
        assert torch.equal(found.view(torch.uint8), whole[slice(*rows)].view(torch.uint8))
