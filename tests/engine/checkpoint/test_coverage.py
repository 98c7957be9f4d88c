"""Tensors against the table of the model."""

import pytest

from dsv4cli.engine.checkpoint.coverage import Coverage, Difference, check_coverage
from dsv4cli.engine.checkpoint.identify import identify
from dsv4cli.engine.checkpoint.layout import expected_tensors
from dsv4cli.errors import CheckpointError
from tests.support import damage

LISTS = ("missing", "unpaired_scales", "misshapen", "mistyped", "unexpected", "index_problems")


def cover(folder) -> Coverage:
    found = identify(folder)
    return check_coverage(found.checkpoint, expected_tensors(found.config, found.formats))


@pytest.mark.parametrize(("name", "tensors"), [("tiny-flash", 432), ("tiny-pro", 544)])
def test_a_golden_checkpoint_is_complete(name, tensors):
    coverage = cover(damage.GOLDEN / name)
    assert coverage.complete
    assert (coverage.expected, coverage.count, coverage.problem()) == (tensors, 0, None)
    coverage.raise_if_incomplete()


IN_OTHER = f"{damage.WEIGHT} is in {damage.SHARD}, not in model-00001-of-00003.safetensors, where the index puts it"
CASES = [
    (damage.tensor_missing, {"missing": ("layers.3.attn.q_norm.weight",)}),
    (damage.tensor_and_scale_missing, {"missing": (damage.WEIGHT, damage.SCALE)}),
    (damage.tensor_extra, {"unexpected": ("layers.3.attn.bias",)}),
    (damage.tensor_misshapen, {"misshapen": (Difference(damage.WEIGHT, "[256, 128]", "[128, 256]"),)}),
    (damage.tensor_mistyped, {"mistyped": (Difference("layers.3.attn.attn_sink", "BF16", "F32"),)}),
    (damage.scale_missing, {"unpaired_scales": (damage.SCALE,)}),
    (damage.weight_missing, {"missing": (damage.WEIGHT,), "unpaired_scales": (damage.SCALE,)}),
    (damage.index_lacks_tensor, {"index_problems": (f"{damage.WEIGHT} is in {damage.SHARD}, but not in the index",)}),
    (damage.index_names_other_shard, {"index_problems": (IN_OTHER,)}),
]


@pytest.mark.parametrize(("harm", "expected"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_each_damage_is_in_its_list_and_in_no_other(tmp_path, harm, expected):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    coverage = cover(folder)
    assert {name: getattr(coverage, name) for name in LISTS} == dict.fromkeys(LISTS, ()) | expected
    assert coverage.count == len(list(coverage.sentences())) == sum(map(len, expected.values()))


@pytest.mark.parametrize(("harm", "_expected"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_the_error_names_the_tensor_and_the_file(tmp_path, harm, _expected):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    with pytest.raises(CheckpointError) as caught:
        cover(folder).raise_if_incomplete()
    assert all(words in caught.value.message for words in damage.DAMAGES[harm])
    file = damage.INDEX if harm.__name__.startswith("index") else damage.SHARD
    assert caught.value.remedy == f"download {file} again; `dsv4 inspect {folder}` shows all that is wrong"


def test_a_long_list_is_counted_and_not_printed(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.rewrite(folder, lambda name, stored: {} if ".ffn.experts." in name else {name: stored})
    coverage = cover(folder)
    assert len(coverage.missing) == 6 * 6 * 6
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.ffn\.experts\.0\.w1\.weight is missing \(and 215 more problems"
    ):
        coverage.raise_if_incomplete()
