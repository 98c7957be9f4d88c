"""`dsv4 inspect --values` from outside: what it says, how it ends, what it reads."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.naming import MpNaming, TransformersNaming
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import UsageError
from tests.support import damage, program, variants
from tests.support.slow import slow

FLASH = str(damage.GOLDEN / "tiny-flash")
BF16 = Formats("bf16", "bf16")


def inside(*arguments: str):
    return program.inside("inspect", *arguments)


def fill(folder: Path, tensor: str, byte: int) -> None:
    """Every byte of a tensor the same."""
    damage.edit_tensor(folder, tensor, lambda stored: replace(stored, data=bytes([byte]) * len(stored.data)))


@pytest.mark.parametrize("depth", [*slow("sample"), "full"])
def test_sound_values(depth):
    done = inside(FLASH, "--values", depth)
    assert done.exit_code == 0
    assert done.stderr.startswith("read 7.35 MB in ")
    report, _, values = done.stdout.partition("\nvalues: ")
    assert report.startswith(f"{FLASH} would load")
    assert "7.35 MB, 272 tensors\n  no errors, nothing suspicious\n" in values
    assert "  shared experts     589,824    0.0898   0.114  -0.562  0.562   0.0%\n" in values
    assert "experts 2^-5 to 2^-3" in values
    assert max(map(len, done.stdout.splitlines()[1:])) <= 80
    assert inside(FLASH, "--values", depth, "--json").stderr == ""


def test_the_section_of_the_document():
    document = json.loads(inside(FLASH, "--values", "full", "--json").stdout)
    values = document["values"]
    assert (values["depth"], values["sound"], values["tensors"], values["absent"]) == ("full", True, 272, 0)
    assert values["nbytes"] == values["nbytes_all"] == document["sizes"]["nbytes"]
    assert values["findings"] == []
    experts = next(family for family in values["families"] if family["family"] == "experts")
    assert (experts["count"], experts["min"], experts["max"], experts["scale_exponents"]) == (
        3538944,
        -0.75,
        0.5,
        [-5, -3],
    )
    assert experts["largest_in"] == "mtp.0.ffn.experts.4.w3.weight"
    assert all(document[name] is None for name in ("tensor", "layer", "tree", "verdict", "fit", "diff"))


def test_what_is_wrong_makes_the_answer_no(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    fill(folder, damage.SCALE, 127)
    assert inside(str(folder)).exit_code == 0
    done = inside(str(folder), "--values", "full")
    assert done.exit_code == 3
    assert done.stdout.startswith(f"{folder} would load")
    flat = " ".join(done.stdout.split())
    assert f"wrong: {damage.SCALE} is 1 everywhere (byte 127): {damage.WEIGHT} is read without a scale" in flat
    document = inside(str(folder), "--values", "full", "--json")
    assert document.exit_code == 3
    values = json.loads(document.stdout)["values"]
    assert (values["sound"], values["findings"][0]["tensor"], values["findings"][0]["check"]) == (
        False,
        damage.SCALE,
        "scale",
    )


def test_what_is_suspicious_is_shown_and_the_answer_is_yes(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    fill(folder, "layers.3.ffn.gate.bias", 0)
    done = inside(str(folder), "--values", "full")
    assert done.exit_code == 0
    assert "suspicious: layers.3.ffn.gate.bias is zero everywhere" in done.stdout
    values = json.loads(inside(str(folder), "--values", "full", "--json").stdout)["values"]
    assert (values["sound"], values["counts"]) == (True, {"suspicious": 1})


def test_many_findings_of_one_kind_are_cut_in_the_table(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)

    def blank(name: str, stored: damage.Stored) -> dict[str, damage.Stored]:
        return {name: replace(stored, data=bytes(len(stored.data))) if name.endswith("w1.scale") else stored}

    damage.rewrite(folder, blank)
    table = inside(str(folder), "--values", "full").stdout
    assert " ".join(table.split()).count("which is 2^-127, over codes that are not zero") == 4
    assert "more like these; --json lists them all" in table
    findings = json.loads(inside(str(folder), "--values", "full", "--json").stdout)["values"]["findings"]
    assert sum(finding["check"] == "scale" for finding in findings) == 42  # 6 experts and the shared one, 6 layers


def test_values_of_a_damaged_checkpoint_are_read_as_far_as_they_are_there(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.shard_missing(folder)
    done = inside(str(folder), "--values", "full")
    assert done.exit_code == 3
    assert f"{damage.SHARD} is missing" in done.stdout
    assert "tensors are missing and were not read" in done.stdout
    assert "no errors" in done.stdout


@pytest.mark.parametrize(
    "write_variant",
    [
        *slow(
            lambda target: variants.write_variant(target, BF16, TransformersNaming(recognise(variants.GOLDEN).config))
        ),
        lambda target: variants.write_variant(target, Formats("fp8", "nvfp4")),
        *slow(
            lambda target: variants.write_variant(target, Formats(wo_a="bf16"), MpNaming(2, 6)),
            lambda target: variants.write_variant(target, Formats("fp8_f32", "fp8_f32")),
        ),
    ],
    ids=["transformers", "nvfp4", "mp2", "base"],
)
def test_other_layouts_are_read_too(tmp_path, write_variant):
    done = inside(str(write_variant(tmp_path)), "--values", "full", "--json")
    document = json.loads(done.stdout)
    assert (done.exit_code, document["loads"], document["problem"]) == (0, True, None)
    assert document["coverage"]["complete"]
    values = document["values"]
    assert (values["sound"], values["tensors"], values["absent"]) == (True, 272, 0)
    assert {family["family"]: family["count"] for family in values["families"]}["experts"] == 3538944


def test_values_of_one_file():
    done = inside(f"{FLASH}/{damage.SHARD}", "--values", "full", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["values"]["sound"]


@pytest.mark.parametrize("arguments", [("random:tiny", "--values", "full"), ("random:tiny", "--tensor", "norm")])
def test_random_weights_have_no_values(arguments):
    done = inside(*arguments)
    assert isinstance(done.exception, UsageError)
    assert "no files" in done.exception.message


def test_a_wrong_depth_is_a_usage_error():
    done = inside(FLASH, "--values", "some")
    assert done.exit_code == 2
    assert "sample" in done.stderr
