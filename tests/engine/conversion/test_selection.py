"""Cuts of a model: which layers, what becomes of the drafter, what each tensor was called."""

import pytest

from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.engine.config.presets import PRESETS, TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.conversion.selection import LayerSelection, parse_layers, select
from dsv4cli.errors import UsageError

CONFIG = parse_config(TINY, "tiny")
DSPARK = parse_config(PRESETS["flash-0731"], "flash-0731")


@pytest.mark.parametrize(
    ("text", "layers"), [("0-3", range(4)), ("7", range(7, 8)), ("0", range(1)), ("40-42", range(40, 43))]
)
def test_layers_are_named_with_both_ends(text, layers):
    assert parse_layers(text) == layers


@pytest.mark.parametrize(
    "text", ["", "3-1", "-1", "1-", "0-3-5", "0,3", "a", " 1", "1\n", "٣", "0x3", "1.5", "9999999"]
)
def test_another_form_is_an_error_of_usage(text):
    with pytest.raises(UsageError) as caught:
        parse_layers(text)
    assert repr(text) in caught.value.message
    assert "0-3" in caught.value.remedy


@pytest.mark.parametrize(
    ("layers", "drafter", "ratios", "hashed"),
    [
        # TINY: ratios 0 0 4 128 4, layer 0 chooses experts by token, one draft stage
        (None, True, (0, 0, 4, 128, 4, 0), 1),
        (None, False, (0, 0, 4, 128, 4), 1),
        (range(5), True, (0, 0, 4, 128, 4, 0), 1),
        (range(1), True, (0, 0), 1),
        (range(4), False, (0, 0, 4, 128), 1),
        (range(1, 3), True, (0, 4, 0), 0),
        (range(2, 5), False, (4, 128, 4), 0),
        (range(4, 5), False, (4,), 0),
    ],
)
def test_a_cut_is_a_model(layers, drafter, ratios, hashed):
    cut, _ = select(CONFIG, LayerSelection(layers, drafter))
    assert cut.compress_ratios == ratios
    assert cut.num_hash_layers == hashed
    assert cut.num_hidden_layers == len(layers or range(5))
    assert cut.drafter == ("mtp" if drafter else "none")


@pytest.mark.parametrize(("start", "hashed"), [(0, 3), (1, 2), (2, 1), (3, 0), (40, 0)])
def test_hash_layers_of_a_cut(start, hashed):
    cut, _ = select(parse_config(PRESETS["pro"], "pro"), LayerSelection(range(start, 43)))
    assert [cut.is_hash_layer(layer) for layer in range(3)] == [layer < hashed for layer in range(3)]


@pytest.mark.parametrize("layers", [range(2), range(1, 5), range(3, 5), None])
@pytest.mark.parametrize("drafter", [True, False])
def test_every_tensor_of_a_cut_is_one_of_the_whole_model(layers, drafter):
    whole = expected_tensors(CONFIG, Formats())
    cut, rename = select(CONFIG, LayerSelection(layers, drafter))
    tensors = expected_tensors(cut, Formats())
    names = {name: rename(name) for name in tensors}
    assert len({*names.values()}) == len(names)
    for name, old in names.items():
        assert (whole[old].dtype, whole[old].shape) == (tensors[name].dtype, tensors[name].shape)
    kept = layers or range(5)
    expected = {name for name in whole if not name.startswith("layers.") or int(name.split(".")[1]) in kept}
    assert {*names.values()} == {name for name in expected if drafter or not name.startswith("mtp.")}


def test_only_main_layers_are_renumbered():
    _, rename = select(CONFIG, LayerSelection(range(2, 5)))
    names = ("layers.0.attn.wq_a.weight", "layers.1.ffn.experts.0.w1.scale", "mtp.0.attn.wq_a.weight", "head.weight")
    assert [rename(name) for name in names] == [
        "layers.2.attn.wq_a.weight",
        "layers.3.ffn.experts.0.w1.scale",
        "mtp.0.attn.wq_a.weight",
        "head.weight",
    ]


def test_layers_that_the_model_does_not_have():
    with pytest.raises(UsageError, match=r"--layers 0-5: the model has 5 layers") as caught:
        select(CONFIG, LayerSelection(range(6)))
    assert caught.value.remedy == "choose from 0-4"
    with pytest.raises(UsageError, match=r"--layers 7: the model has 5 layers"):
        select(CONFIG, LayerSelection(range(7, 8)))


def test_dspark_reads_the_layers_that_it_always_read():
    cut, _ = select(DSPARK, LayerSelection(range(38, 43)))
    assert cut.dspark is not None
    assert cut.dspark.target_layer_ids == (2, 3, 4)
    assert (cut.drafter, cut.draft_stages) == ("dspark", 3)


@pytest.mark.parametrize(("layers", "lost"), [(range(4), 40), (range(41, 43), 40), (range(42), 42)])
def test_a_cut_that_dspark_does_not_survive_is_refused(layers, lost):
    with pytest.raises(UsageError, match=rf"removes layer {lost}, whose output the DSpark drafter reads") as caught:
        select(DSPARK, LayerSelection(layers))
    assert "--no-mtp" in caught.value.remedy
    cut, _ = select(DSPARK, LayerSelection(layers, drafter=False))
    assert (cut.dspark, cut.draft_stages, cut.num_hidden_layers) == (None, 0, len(layers))
