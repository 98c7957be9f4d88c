"""Checkpoints without the tensors of a drafter, whatever their config.json says of one."""

import pytest

from dsv4cli.engine.checkpoint.coverage import check_coverage
from dsv4cli.engine.checkpoint.headers import scan_file
from dsv4cli.engine.checkpoint.identify import identify, recognise
from dsv4cli.errors import CheckpointError
from tests.support import damage

RATIOS = [0, 0, 4, 128, 4]
EDITS = {
    "unchanged": {},
    "no stages": {"num_nextn_predict_layers": 0},
    "no ratios": {"compress_ratios": RATIOS},
    "neither": {"num_nextn_predict_layers": 0, "compress_ratios": RATIOS},
}
NOTE = "config.json describes a drafter, and no tensor is named mtp.*"


@pytest.mark.parametrize("edit", EDITS)
def test_it_loads_without_one(tmp_path, edit):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drafter_lost(folder)
    damage.edit_config(folder, **EDITS[edit])
    found = identify(folder)
    check_coverage(found.checkpoint, found.stored_table).raise_if_incomplete()
    assert (found.config.drafter, found.config.compress_ratios) == ("none", tuple(RATIOS))
    assert found.contradictions == (() if edit == "neither" else (NOTE,))


@pytest.mark.parametrize("lost", ["mtp.0.ffn.gate.weight", "mtp.0.enorm.weight", "mtp.0.e_proj.weight"])
def test_a_part_of_one_is_an_error_that_names_what_is_missing(tmp_path, lost):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drop_tensor(folder, lost)
    damage.edit_json(folder / damage.INDEX, lambda index: index["weight_map"].pop(lost))
    found = identify(folder)
    with pytest.raises(CheckpointError, match=f"{lost} is missing"):
        check_coverage(found.checkpoint, found.stored_table).raise_if_incomplete()


def test_a_file_that_is_missing_may_hold_one(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    (folder / damage.INDEX).unlink()
    shards = sorted(folder.glob("*.safetensors"))
    bare = next(shard for shard in shards if not any("mtp." in name for name in damage.read_shard(shard)))
    assert recognise(folder, lambda _: scan_file(bare)).config.drafter == "mtp"


def test_the_release_is_known_by_the_key_alone(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drafter_lost(folder)
    damage.edit_config(folder, **EDITS["neither"])
    assert (identify(folder).config.release, identify(folder).release) == (None, "v4")
    damage.edit_config(folder, dsv4_release="0731")
    assert identify(folder).release == "0731"
