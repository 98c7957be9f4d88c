"""Two checkpoints compared: the same model in every pair of variants, and each known mistake by name."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dsv4cli.engine.checkpoint import compare
from dsv4cli.engine.checkpoint.identify import FolderIdentity, recognise
from dsv4cli.engine.checkpoint.naming import MpNaming, Naming, TransformersNaming
from dsv4cli.engine.checkpoint.stored import StoredModel
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.diff import Diff, diff_document, diff_models
from tests.support import damage
from tests.support.slow import slow_except, slow_rows
from tests.support.variants import OFFICIAL, Arrays, Encode, recoded, write_variant

CONFIG = recognise(damage.GOLDEN / "tiny-flash").config
BF16 = Formats("bf16", "bf16")
# name -> formats, naming
VARIANTS: dict[str, tuple[Formats, Naming | None]] = {
    "official": (OFFICIAL, None),
    "bf16": (BF16, None),
    "fp8": (Formats("fp8", "fp8"), None),
    "nvfp4": (Formats("fp8", "nvfp4"), None),
    "mp2": (Formats(wo_a="bf16"), MpNaming(2, CONFIG.n_routed_experts)),
    "transformers": (BF16, TransformersNaming(CONFIG)),
    "mixed": (Formats("f32", "f32", "f32"), None),
}
EXPERT = "layers.3.ffn.experts.1.w2"
LINEAR = "layers.3.attn.wo_a"
HYPER = "layers.3.hc_attn_fn"
TABLE = "layers.0.ffn.gate.tid2eid"


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    """The golden matrices in pieces of 128 rows: they are compared in several."""
    monkeypatch.setattr(compare, "CHUNK", 1)


@pytest.fixture(scope="module")
def variants(tmp_path_factory) -> dict[str, FolderIdentity]:
    root = tmp_path_factory.mktemp("variants")
    return {name: recognise(write_variant(root / name, *variant)) for name, variant in VARIANTS.items()}


def compared(a: FolderIdentity, b: FolderIdentity, *wanted: str) -> Diff:
    return diff_models(a, b, lambda done, total: None, lambda name: not wanted or name in wanted)


def raw_of(identity: FolderIdentity, matrix: str) -> Arrays:
    with StoredModel(identity) as model:
        return {role: model.read(spec) for role, spec in model.matrices()[matrix].items()}


def spoiled(folder: Path, changes: dict[str, Encode], formats: Formats = OFFICIAL) -> FolderIdentity:
    """A copy in which some matrices are encoded otherwise."""
    return recognise(write_variant(folder, formats, encode=lambda name, *rest: changes.get(name, recoded)(name, *rest)))


PAIRS = [("official", name) for name in VARIANTS] + list(pairwise([*VARIANTS, "nvfp4", "bf16", "official"]))


@pytest.mark.parametrize(
    ("first", "second"),
    slow_except((PAIRS[0], PAIRS[-3], PAIRS[-1]), PAIRS),
)
def test_the_same_model_stored_differently(variants, first, second):
    assert variants[first].layout == first
    found = compared(variants[first], variants[second])
    assert found.same
    assert found.counts["identical"] + found.counts["equal"] == len(found.matrices) == 272
    assert (found.counts["identical"] == 272) == (VARIANTS[first][0] == VARIANTS[second][0])
    assert (found.only_a, found.only_b, found.fields, found.worst) == ((), (), (), [])


def test_progress_ends_with_all_bytes(variants):
    calls = []
    a, b = variants["official"], variants["bf16"]
    found = diff_models(a, b, lambda done, total: calls.append((done, total)))
    assert calls[-1] == (found.nbytes, found.nbytes)
    assert found.nbytes == a.checkpoint.nbytes + b.checkpoint.nbytes
    assert calls == sorted(calls)


def test_one_changed_value_is_found_in_its_place(tmp_path, variants):
    def change(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        weight = raw["weight"].copy()
        weight[130, 7] ^= 0x10  # the high nibble: column 15
        return raw | {"weight": weight}

    found = compared(variants["official"], spoiled(tmp_path, {EXPERT: change}))
    assert not found.same
    assert found.counts == {"identical": 271, "equal": 0, "zero_signs": 0, "different": 1, "unreadable": 0}
    [worst] = found.worst
    assert (worst.name, worst.forms, worst.different, worst.zero_signs) == (EXPERT, ("fp4", "fp4"), 1, 0)
    assert (worst.first.row, worst.first.column) == (130, 15)
    assert worst.largest == abs(worst.first.first - worst.first.second)
    assert 0 < worst.relative_error < 0.1
    assert worst.pattern == ""


def larger(steps: int) -> Encode:
    return lambda name, old, raw, new: raw | {"scale": raw["scale"] + np.uint8(steps)}


def test_the_worst_comes_first(tmp_path, variants):
    found = compared(variants["official"], spoiled(tmp_path, {EXPERT: larger(1), LINEAR: larger(3)}))
    assert [matrix.name for matrix in found.worst] == [LINEAR, EXPERT]
    # the reference is summed in float32 along a row
    assert [matrix.relative_error for matrix in found.worst] == pytest.approx([7, 1], rel=1e-6)
    assert found.worst[0].pattern == "every value of B is 2^3 times that of A"


def test_a_reader_that_drops_the_sign_of_zero_changes_nothing_else(tmp_path, variants):
    def unsigned(*args: Any) -> Arrays:
        weight = recoded(*args)["weight"]
        return {"weight": np.where(weight == 0x8000, 0, weight).astype(np.uint16)}

    folder = spoiled(tmp_path, {EXPERT: unsigned}, BF16)
    found = compared(variants["official"], folder)
    assert found.same
    assert found.counts["zero_signs"] == 1
    zeros = next(matrix for matrix in found.matrices if matrix.name == EXPERT)
    assert zeros.zero_signs > 0
    assert (zeros.different, zeros.relative_error) == (0, 0)
    assert diff_document(found)["zero_signs"] == {EXPERT: zeros.zero_signs}
    assert compared(variants["bf16"], folder).counts["zero_signs"] == 1


def nibbles_swapped(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    return recoded(name, old, raw | {"weight": raw["weight"] >> 4 | raw["weight"] << 4}, new)


def scales_converted_by_value(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    return recoded(name, old, raw | {"scale": np.zeros_like(raw["scale"])}, new)


def scales_forgotten(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    return recoded(name, old, raw | {"scale": np.full_like(raw["scale"], 127)}, new)


def bytes_as_numbers(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    scale = raw["scale"].astype(np.float32)
    scale = scale.repeat(32, 1) if old == "fp4" else scale.repeat(128, 0).repeat(128, 1)
    codes = scales_forgotten(name, old, raw, "f32")["weight"]
    return recoded(name, "f32", {"weight": codes * scale}, new)


ZERO = "{} is zero, as when scale bytes are converted as numbers"
CODES = "{} holds the codes without their scale"
NUMBERS = "{} took the scale bytes as numbers: 120 as 120, not as 2^-7"
EXCHANGED = "columns 2j and 2j+1 are exchanged: nibbles in the wrong order"
# the mistake, the formats of the harmed side, the matrix, the sentence
MISTAKES = [
    (nibbles_swapped, OFFICIAL, EXPERT, EXCHANGED),
    *slow_rows((nibbles_swapped, BF16, EXPERT, EXCHANGED)),
    (nibbles_swapped, VARIANTS["nvfp4"][0], EXPERT, EXCHANGED),
    (scales_converted_by_value, OFFICIAL, EXPERT, ZERO),
    *slow_rows((scales_converted_by_value, OFFICIAL, LINEAR, ZERO), (scales_converted_by_value, BF16, LINEAR, ZERO)),
    *slow_rows((scales_forgotten, OFFICIAL, EXPERT, CODES)),
    (scales_forgotten, BF16, EXPERT, CODES),
    (scales_forgotten, VARIANTS["mp2"][0], LINEAR, CODES),
    *slow_rows((bytes_as_numbers, BF16, EXPERT, NUMBERS), (bytes_as_numbers, BF16, LINEAR, NUMBERS)),
    (bytes_as_numbers, VARIANTS["mixed"][0], LINEAR, NUMBERS),
]


@pytest.mark.parametrize(("mistake", "formats", "matrix", "words"), MISTAKES)
def test_a_known_mistake_is_named(tmp_path, variants, mistake, formats, matrix, words):
    sound, harmed = variants["official"], spoiled(tmp_path, {matrix: mistake}, formats)
    for pair, side in (((sound, harmed), "B"), ((harmed, sound), "A")):
        [worst] = compared(*pair, matrix).worst
        assert worst.pattern == words.format(side)


def rounded(name: str, old: str, raw: Arrays, new: str) -> Arrays:
    return recoded(name, "bf16", recoded(name, old, raw, "bf16"), new)


def test_a_tensor_that_was_bf16_once_is_told(tmp_path, variants):
    folder = spoiled(tmp_path, {HYPER: rounded})
    [worst] = compared(variants["official"], folder).worst
    assert (worst.name, worst.pattern) == (HYPER, "B is rounded to bf16")
    [worst] = compared(folder, variants["official"]).worst
    assert worst.pattern == "A is rounded to bf16"


def test_a_tensor_of_another_dtype_is_compared_as_it_is(tmp_path, variants):
    folder = damage.copy_checkpoint(tmp_path)
    narrow = recoded(HYPER, "f32", raw_of(variants["official"], HYPER), "bf16")["weight"]
    damage.edit_tensor(folder, HYPER, lambda old: damage.Stored("BF16", old.shape, narrow.tobytes()))
    [worst] = compared(variants["official"], recognise(folder)).worst
    assert (worst.name, worst.forms, worst.pattern) == (HYPER, ("f32", "bf16"), "B is rounded to bf16")


def test_a_tensor_that_was_widened_is_equal(tmp_path, variants):
    folder, name = damage.copy_checkpoint(tmp_path), "layers.3.attn_norm.weight"
    wide = recoded(name, "bf16", raw_of(variants["official"], name), "f32")["weight"]
    damage.edit_tensor(folder, name, lambda old: damage.Stored("F32", old.shape, wide.tobytes()))
    found = compared(variants["official"], recognise(folder))
    assert found.same
    assert [(matrix.name, matrix.forms) for matrix in found.matrices if matrix.verdict == "equal"] == [
        (name, ("bf16", "f32"))
    ]


def test_other_numbers_in_the_configuration_are_another_model(tmp_path, variants):
    folder = damage.copy_checkpoint(tmp_path)
    damage.edit_config(folder, rope_theta=20000)
    found = compared(variants["official"], recognise(folder))
    assert not found.same
    assert (found.counts["identical"], found.only_a, found.only_b, found.worst) == (272, (), (), [])


def test_experts_whose_scales_lie_too_far_apart_for_fp8_are_told(tmp_path, variants):
    def spread(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        scale = raw["scale"].copy()
        scale[5] -= 20
        return recoded(name, old, raw | {"scale": scale}, new)

    a = spoiled(tmp_path / "a", {EXPERT: spread})
    b = spoiled(tmp_path / "b", {EXPERT: spread}, VARIANTS["fp8"][0])
    [worst] = compared(a, b).worst
    assert (worst.name, worst.first.row) == (EXPERT, 5)
    assert worst.pattern == "B is rounded to FP8: the scales of a block differ too much for its range"


def test_gate_and_up_in_the_wrong_order_are_told(tmp_path, variants):
    gate, up = (EXPERT.replace("w2", word) for word in ("w1", "w3"))
    raw = {name: raw_of(variants["official"], name) for name in (gate, up)}
    changes = {
        one: lambda name, old, _, new, other=other: recoded(name, old, raw[other], new)
        for one, other in ((gate, up), (up, gate))
    }
    found = compared(variants["official"], spoiled(tmp_path, changes, BF16))
    assert {matrix.name: matrix.pattern for matrix in found.worst} == {
        gate: f"B has the values of {up} of A here",
        up: f"B has the values of {gate} of A here",
    }


def test_a_factor_that_is_no_power_of_two_is_told(tmp_path, variants):
    def thirds(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        return recoded(name, old, raw, new) | {"weight_scale_2": np.array(1 / 3, np.float32)}

    def forgotten(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        return recoded(name, old, raw, new) | {"weight_scale_2": np.array(1, np.float32)}

    sides = [
        spoiled(tmp_path / change.__name__, {EXPERT: change}, VARIANTS["nvfp4"][0]) for change in (thirds, forgotten)
    ]
    [worst] = compared(*sides).worst
    assert worst.pattern == "every value of B is about 3 times that of A"


def test_a_mistake_in_some_rows_only_is_not_called_one_of_all(tmp_path, variants):
    def half(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        weight = nibbles_swapped(name, old, raw, new)["weight"]
        return raw | {"weight": np.concatenate((weight[:128], raw["weight"][128:]))}

    [worst] = compared(variants["official"], spoiled(tmp_path, {EXPERT: half})).worst
    assert (worst.first.row, worst.pattern) == (0, "")


def test_the_rows_that_differ_tell_the_mistake(tmp_path, variants):
    def doubled_below_zeros(steps: int) -> Encode:
        def encode(name: str, old: str, raw: Arrays, new: str) -> Arrays:
            weight = np.concatenate((np.zeros_like(raw["weight"][:128]), raw["weight"][128:]))
            return {"weight": weight, "scale": raw["scale"] + np.uint8(steps)}

        return encode

    a, b = (spoiled(tmp_path / str(steps), {EXPERT: doubled_below_zeros(steps)}) for steps in (0, 1))
    [worst] = compared(a, b).worst
    assert worst.first.row >= 128
    assert worst.pattern == "every value of B is 2^1 times that of A"


def test_a_factor_of_a_few_values_says_nothing(tmp_path, variants):
    name = "layers.3.hc_attn_scale"
    found = compared(variants["official"], spoiled(tmp_path, {name: lambda *args: {"weight": args[2]["weight"] * 2}}))
    assert [(matrix.name, matrix.pattern) for matrix in found.worst] == [(name, "")]


def test_the_codes_of_nvfp4_without_their_scales_are_told(tmp_path, variants):
    found = compared(variants["nvfp4"], spoiled(tmp_path, {EXPERT: scales_forgotten}, BF16))
    assert found.worst[0].pattern == "B holds the codes without their scale"


def test_what_only_one_has_is_listed(tmp_path, variants):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drafter_lost(folder)
    damage.edit_config(folder, compress_ratios=[0, 0, 4, 128, 4], num_nextn_predict_layers=0, rope_theta=20000)
    damage.drop_tensor(folder, damage.SCALE)
    found = compared(variants["official"], recognise(folder))
    assert not found.same
    assert (found.worst, found.only_b) == ([], ())
    assert {name.partition(".")[0] for name in found.only_a} == {"mtp", "layers"}
    assert "layers.3.attn.wq_a" in found.only_a
    assert {field.name: (field.a, field.b) for field in found.fields} == {
        "compress_ratios": ((0, 0, 4, 128, 4, 0), (0, 0, 4, 128, 4)),
        "rope_theta": (10000.0, 20000.0),
    }
    damage.edit_config(folder, dsv4_release="0731")
    released = compared(variants["official"], recognise(folder))
    assert [(field.a, field.b) for field in released.fields if field.name == "release"] == [("v4", "0731")]
    mirrored = compared(recognise(folder), variants["official"])
    assert (mirrored.only_a, mirrored.only_b) == ((), found.only_a)


def half_precision(folder: Path) -> None:
    damage.edit_tensor(folder, HYPER, lambda old: damage.Stored("F16", old.shape, old.data[::2]))


def table_in_floats(folder: Path) -> None:
    damage.edit_tensor(folder, TABLE, lambda old: damage.Stored("F32", old.shape, old.data[::2]))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (damage.tensor_misshapen, "is F8_E4M3 [256, 128] instead of F8_E4M3 [128, 256]"),
        (half_precision, "is F16 [24"),
        (table_in_floats, "is F32 ["),
    ],
)
def test_what_cannot_be_read_is_part_of_the_answer(tmp_path, variants, harm, words):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    found = compared(variants["official"], recognise(folder))
    [worst] = found.worst
    assert worst.verdict == "unreadable"
    assert words in worst.problem
    assert found.counts["identical"] == 271


@pytest.mark.slow  # tests/commands/inspect/test_diff.py compares other models
def test_other_dimensions_are_no_crash(variants):
    found = compared(variants["official"], recognise(damage.GOLDEN / "tiny-pro"))
    assert not found.same
    assert "the shape is" in found.worst[0].problem
    assert found.only_a or found.only_b


def test_a_document_has_no_number_that_json_lacks(tmp_path, variants):
    def broken(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        return raw | {"scale": np.full_like(raw["scale"], 255)}

    found = compared(variants["official"], spoiled(tmp_path, {LINEAR: broken}))
    document = json.loads(json.dumps(diff_document(found), allow_nan=False))
    assert (document["schema"], document["same"], document["a"]["layout"]) == ("dsv4.diff/1", False, "official")
    [worst] = document["worst"]
    assert (worst["name"], worst["relative_error"], worst["first"]["second"]) == (LINEAR, "inf", "nan")


def test_values_that_are_no_numbers_are_compared_in_silence(tmp_path, variants):
    def random_bytes(name: str, old: str, raw: Arrays, new: str) -> Arrays:
        generator = np.random.default_rng(0)
        return {
            role: np.frombuffer(generator.bytes(array.nbytes), array.dtype).reshape(array.shape)
            for role, array in raw.items()
        }

    names = (EXPERT, LINEAR, HYPER, "head", "layers.3.attn_norm")
    a, b = (spoiled(tmp_path / side, dict.fromkeys(names, random_bytes)) for side in "ab")
    # what numpy says of NaN and overflow is an error here, and on a user's terminal a line of our source
    for one, other in ((variants["official"], a), (a, variants["official"]), (a, b)):
        found = compared(one, other)
        json.dumps(diff_document(found), allow_nan=False)
        assert found.same is (one is a and other is b)
