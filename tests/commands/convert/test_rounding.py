"""What a target does not have is told before anything is written: each tensor, and by how much."""

import json

import numpy as np
import pytest

from dsv4cli.engine.config.storage import Formats
from tests.support.conversions import convert, official_values, run, stored
from tests.support.variants import Arrays, recoded, write_variant

ODD = "layers.1.ffn.experts.2.w1"


def odd(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    """One matrix whose scales no power of two gives."""
    made = recoded(name, old, raw, new)
    if name == ODD and new == "nvfp4":
        made["weight_scale"] = made["weight_scale"] + np.arange(made["weight_scale"].shape[1], dtype=np.uint8) % 4
    if name == ODD and new == "fp8_f32":
        made["scale"] = made["scale"] * np.float32(1.3)
    return made


@pytest.fixture(scope="module", params=["nvfp4", pytest.param("fp8_f32", marks=pytest.mark.slow)])
def source(request, tmp_path_factory):
    """Every expert is FP4 in disguise but one."""
    formats = Formats(experts="nvfp4") if request.param == "nvfp4" else Formats("fp8_f32", "fp8_f32")
    return write_variant(tmp_path_factory.mktemp("source") / request.param, formats, encode=odd)


def test_what_is_rounded_is_told_first(source, tmp_path):
    code, out, err = run("convert", source, tmp_path / "out", "--to", "official", "--verify", "full")
    assert code == 0
    lines = err.splitlines()
    told = next(number for number, line in enumerate(lines) if "rounds the values of 1 tensor;" in line)
    assert lines[told + 1].split()[0] == ODD
    assert told < next(number for number, line in enumerate(lines) if "model-00001" in line)
    error = float(lines[told + 1].split()[1])
    before, after = (official_values(stored(folder))[f"{ODD}.weight"] for folder in (source, tmp_path / "out"))
    # the first 128 rows, to two places
    rows = slice(0, 128)
    assert error == pytest.approx(float((before[rows] - after[rows]).norm() / before[rows].norm()), rel=0.05)
    assert f"within {error:.2g} (relative, {ODD})" in out or "the others within" in out


def test_the_document_has_each(source, tmp_path):
    lines = [json.loads(line) for line in convert(source, tmp_path / "out", "--to", "official", "--json").splitlines()]
    assert [line["event"] for line in lines][:2] == ["rounding", "file"]
    assert lines[0]["tensors"].keys() == {ODD}
    plan = json.loads(convert(source, tmp_path / "other", "--to", "official", "--json", "--dry-run"))
    assert plan["rounded"] == lines[0]["tensors"]


def test_nothing_is_told_where_nothing_is_rounded(source, tmp_path):
    target = "nvfp4" if "nvfp4" in source.name else "base"
    code, _, err = run("convert", source, tmp_path / "out", "--to", target)
    assert (code, "does not have" in err) == (0, False)
