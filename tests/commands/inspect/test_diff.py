"""`dsv4 inspect A --diff B` as people and programs see it."""

import json
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from dsv4cli.commands.inspect.diff import show_diff
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import Dsv4Error, ModelNotFound, UsageError
from dsv4cli.output import Colours, Output
from tests.support import damage, foreign
from tests.support.slow import slow_rows
from tests.support.variants import Arrays, recoded, write_variant

FLASH = str(damage.GOLDEN / "tiny-flash")
SHARD = f"{FLASH}/{damage.SHARD}"
BF16 = Formats("bf16", "bf16")


@pytest.fixture
def diff(capsys, monkeypatch):
    """show_diff, with what it printed; the network is off."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def call(*arguments, as_json=False, **options) -> tuple[bool, str, str]:
        same = show_diff(Output(Colours(), as_json), *arguments, **options)
        return same, *capsys.readouterr()

    return call


def spoil(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    """Nibbles in the wrong order, wo_a without scales, and one value of one matrix."""
    if ".ffn.experts." in name:
        raw = raw | {"weight": raw["weight"] >> 4 | raw["weight"] << 4}
    if name.endswith(".wo_a"):
        raw = raw | {"scale": np.full_like(raw["scale"], 127)}
    if name == "layers.3.attn.wq_b":
        raw = raw | {"weight": np.concatenate((raw["weight"][:-1], raw["weight"][-1:] ^ 1))}
    return recoded(name, old, raw, new)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    shorter = damage.copy_checkpoint(root)
    damage.drafter_lost(shorter)
    damage.edit_config(shorter, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, rope_theta=20000)
    found = {"bf16": write_variant(root / "bf16", BF16), "spoiled": write_variant(root / "spoiled", BF16, encode=spoil)}
    return {name: str(folder) for name, folder in {**found, "shorter": shorter}.items()}


def test_the_same_model_is_said_to_be_the_same(diff, folders):
    same, out, err = diff(FLASH, folders["bf16"])
    assert same
    assert out.splitlines()[2:] == [
        "the same model: all 272 matrices have the same values",
        "  112 with the same bytes",
        "  160 with the same values in other bytes",
    ]
    assert err.startswith("read 22.32 MB in ")
    same, out, _ = diff(FLASH, FLASH)
    assert same
    assert "the same model: all 272 matrices, byte for byte\n" in out


def test_what_differs_is_told_with_its_pattern_the_worst_first(diff, folders):
    same, out, _ = diff(FLASH, folders["spoiled"])
    assert not same
    lines = out.splitlines()
    assert "not the same: 115 of 272 matrices differ" in lines
    assert "  108 of them: columns 2j and 2j+1 are exchanged: nibbles in the wrong order" in lines
    assert "  6 of them: B holds the codes without their scale" in lines
    first = lines.index("worst first") + 1
    assert ".attn.wo_a  fp8 in A, bf16 in B" in lines[first]
    assert lines[first + 1].startswith("    relative error 1.02e+03, largest ")
    assert lines[first + 2].startswith("    first at [0, 0]: ")
    assert lines[first + 3] == "    B holds the codes without their scale"
    assert lines[-1] == "  and 107 more; --json lists them all"
    assert max(map(len, lines[2:])) <= 80


def test_the_document_has_all_of_it(diff, folders):
    same, out, err = diff(FLASH, folders["spoiled"], as_json=True)
    assert (same, err) == (False, "")
    document = json.loads(out)
    assert (document["schema"], document["same"]) == ("dsv4.diff/1", False)
    assert document["a"] == {"folder": FLASH, "layout": "official"}
    assert document["counts"] == {"identical": 112, "equal": 45, "zero_signs": 0, "different": 115, "unreadable": 0}
    errors = [matrix["relative_error"] for matrix in document["worst"]]
    assert (len(errors), errors) == (115, sorted(errors, reverse=True))
    least = document["worst"][-1]
    assert (least["name"], least["pattern"], least["first"]["row"]) == ("layers.3.attn.wq_b", "", 511)
    assert 0 < least["different"] <= 128


def test_fields_and_parts_that_only_one_has(diff, folders):
    same, out, _ = diff(FLASH, folders["shorter"])
    assert not same
    lines = out.splitlines()
    assert lines[2:4] == [
        "not the same, but the 225 matrices that both have are equal",
        "  225 with the same bytes",
    ]
    assert "  rope_theta: 10000.0 in A, 20000.0 in B" in lines
    assert "  47 only in A: mtp.0.hc_attn_fn, mtp.0.hc_attn_base, mtp.0.hc_attn_scale, ..." in lines
    assert "  47 only in B: " in diff(folders["shorter"], FLASH)[1]


@pytest.mark.slow  # tests/engine/inspection/test_diff.py compares values
def test_zeros_of_the_other_sign_are_no_difference(diff, tmp_path):
    def unsigned(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        weight = recoded(name, old, raw, new)["weight"]
        return {"weight": np.where(weight == 0x8000, 0, weight).astype(np.uint16) if old == "fp4" else weight}

    same, out, _ = diff(FLASH, str(write_variant(tmp_path, BF16, encode=unsigned)))
    assert same
    assert "have the same values, except the sign of zeros\n" in out
    assert "FP4 code 8 is 0 in the official table" in out
    assert max(map(len, out.splitlines()[2:])) <= 80


def test_other_models_are_no_crash_and_fit_the_screen(diff):
    same, out, _ = diff(FLASH, str(damage.GOLDEN / "tiny-pro"))
    assert not same
    assert "n_routed_experts: 6 in A, 12 in B" in out
    assert "the shape is [128, 256] in A, [256, 256] in B" in out
    assert max(map(len, out.splitlines()[2:])) <= 80


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"layer": 3}, 43),
        ({"tensor": "layers.3.attn.wo_a"}, 1),
        *slow_rows(({"tensor": "layers.3.attn.wo_a.weight"}, 1)),
        ({"tensor": "layers.3.attn.wo_a.scale"}, 1),
        *slow_rows(({"tensor": "layers.3.hc_attn_fn"}, 1), ({"tensor": "embed.weight"}, 1)),
        ({"layer": 3, "tensor": "layers.3.attn.attn_sink"}, 1),
    ],
    ids=str,
)
def test_a_part_is_compared_on_demand(diff, options, count):
    _, out, _ = diff(FLASH, FLASH, as_json=True, **options)
    assert json.loads(out)["counts"]["identical"] == count


@pytest.mark.parametrize("options", [{"layer": 5}, {"tensor": "layers.3.attn.wq"}, {"tensor": ""}], ids=str)
def test_a_part_that_neither_has_is_refused(diff, options):
    with pytest.raises(UsageError, match="neither model has"):
        diff(FLASH, FLASH, **options)


def test_a_file_is_compared_as_far_as_it_goes(diff, folders):
    for pair in ((SHARD, folders["bf16"]), (folders["bf16"], SHARD), (SHARD, SHARD)):
        same, out, _ = diff(*pair)
        assert same
        assert "the same model: all 91 matrices" in out


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("random:tiny", UsageError, "no weights on this machine"),
        ("flash", ModelNotFound, "not in the Hugging Face cache"),
        ("./nothing", ModelNotFound, "no folder"),
    ],
)
def test_what_has_no_values_here_is_refused(diff, name, kind, words):
    for pair in ((FLASH, name), (name, FLASH)):
        with pytest.raises(kind, match=words) as caught:
            diff(*pair)
        assert caught.value.remedy


def test_a_model_that_would_have_to_be_fetched_is_not(diff, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="no weights on this machine") as caught:
        diff(FLASH, "hf://someone/else@v2")
    assert caught.value.remedy == "download them: dsv4 download someone/else@v2"


@pytest.mark.parametrize("harm", [damage.config_missing, damage.shard_truncated, foreign.is_v41])
def test_a_model_that_cannot_be_opened_is_an_error(diff, tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    with pytest.raises(Dsv4Error) as caught:
        diff(FLASH, str(folder))
    assert caught.value.remedy


def test_a_name_with_control_characters_does_not_reach_the_terminal(diff, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    strange = Path(folder.rename(tmp_path / "a\x1b[31mb"))
    assert "\x1b" not in diff(FLASH, str(strange))[1]


def test_whether_the_model_would_load_is_not_the_question(dsv4, tmp_path):
    damage.index_lacks_tensor(path := damage.copy_checkpoint(tmp_path))
    folder = str(path)
    assert dsv4("inspect", folder).code == 3
    done = dsv4("inspect", folder, "--diff", FLASH)
    assert (done.code, done.out.splitlines()[0]) == (0, f"A  {folder}  official")
    document = json.loads(dsv4("inspect", folder, "--diff", FLASH, "--json").out)
    assert (document["loads"], document["diff"]["same"]) == (False, True)


def test_what_cannot_be_compared_is_told(dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.config_missing(folder)
    done = dsv4("inspect", str(folder), "--diff", FLASH)
    assert (done.code, done.out.splitlines()[0]) == (3, f"{folder} would not load")


def test_a_model_that_is_the_same_may_still_not_fit(dsv4):
    assert dsv4("inspect", FLASH, "--diff", FLASH).code == 0
    assert dsv4("inspect", FLASH, "--diff", FLASH, "--fit", "--gpus", "1x0.001GB").code == 3
