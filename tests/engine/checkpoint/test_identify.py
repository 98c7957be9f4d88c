"""What a folder holds, and refusals by name of what the engine does not run."""

from pathlib import Path

import pytest

from dsv4cli.engine.checkpoint.identify import describe, identify, recognise
from dsv4cli.engine.config.presets import PRESETS, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.errors import CheckpointError, UnsupportedCheckpoint
from tests.support import damage, foreign
from tests.support.foreign import FOREIGN


@pytest.mark.parametrize(
    ("name", "size", "release"),
    [("flash", "flash", "v4"), ("pro", "pro", "v4"), ("flash-0731", "flash", "0731"), ("tiny", "tiny", "v4")],
)
def test_a_preset_is_recognised(name, size, release):
    config = parse_config(PRESETS[name], name)
    for identity in (describe(config, Formats()), describe(config.without_drafter(), Formats())):
        assert identity.release == release
    assert describe(config, Formats()).size == size


def test_fewer_experts_are_another_size():
    assert describe(parse_config(shortened(PRESETS["flash"], None, 160), "reap"), Formats()).size == "custom"


@pytest.mark.parametrize("name", ["tiny-flash", "tiny-pro"])
def test_a_golden_checkpoint_is_recognised(name):
    identity = identify(damage.GOLDEN / name)
    assert (identity.size, identity.release, identity.config.drafter) == ("custom", "v4", "mtp")
    assert identity.formats == Formats("fp8", "fp4", "bf16")
    assert len(identity.checkpoint.files) == 3


def test_formats_come_from_the_tensors_whatever_the_config_says(tmp_path):
    def widen(name: str, stored: damage.Stored) -> dict[str, damage.Stored]:
        rows, columns = (*stored.shape, 0)[:2]
        if stored.dtype == "I8":
            return {name: damage.Stored("F8_E4M3", [rows, 2 * columns], bytes(2 * rows * columns))}
        if stored.dtype == "F8_E8M0" and ".ffn.experts." in name:
            return {name: damage.Stored("F8_E8M0", [rows // 128, columns // 4], bytes(rows // 128 * columns // 4))}
        return {name: stored}

    folder = damage.copy_checkpoint(tmp_path)
    damage.rewrite(folder, widen)
    damage.edit_config(folder, expert_dtype="fp4")
    assert identify(folder).formats == Formats("fp8", "fp8", "bf16")


def test_one_odd_tensor_does_not_change_the_format(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.edit_tensor(folder, damage.WEIGHT, lambda stored: damage.Stored("I8", stored.shape, stored.data))
    assert identify(folder).formats == Formats()


@pytest.mark.parametrize("dtype", ["F16", "F64"])
def test_an_unknown_format_is_refused(tmp_path, dtype):
    width = {"F16": 1, "F64": 4}[dtype]

    def recode(name: str, stored: damage.Stored) -> dict[str, damage.Stored]:
        return {name: damage.Stored(dtype, stored.shape, stored.data * width) if stored.dtype == "BF16" else stored}

    folder = damage.copy_checkpoint(tmp_path)
    damage.rewrite(folder, recode)
    with pytest.raises(UnsupportedCheckpoint, match=f"dense weights are stored as {dtype}"):
        identify(folder)


@pytest.mark.parametrize("harm", FOREIGN, ids=lambda harm: harm.__name__)
def test_a_foreign_model_is_refused_by_name(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    with pytest.raises(UnsupportedCheckpoint) as caught:
        identify(folder)
    assert all(words in caught.value.message for words in FOREIGN[harm])
    assert caught.value.message.startswith(f"{folder} is ")
    assert caught.value.remedy


def test_the_name_comes_before_a_complaint_about_the_config(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    foreign.has_v3_tensors(folder)
    damage.config_lacks_key(folder)
    with pytest.raises(UnsupportedCheckpoint, match="V3"):
        identify(folder)


def test_the_name_comes_before_a_complaint_about_the_files(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    foreign.is_v41(folder)
    damage.folder_empty(folder)
    with pytest.raises(UnsupportedCheckpoint, match=r"DeepSeek-V4\.1"):
        identify(folder)


@pytest.mark.parametrize(
    "harm",
    [
        damage.config_missing,
        damage.config_not_json,
        damage.config_lacks_key,
        damage.config_unknown_key,
        damage.config_contradicts_itself,
        damage.config_contradicts_inference_config,
        damage.config_names_other_drafter,
        damage.shard_missing,
    ],
    ids=lambda harm: harm.__name__,
)
def test_damage_is_named(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    with pytest.raises(CheckpointError) as caught:
        identify(folder)
    assert all(words in caught.value.message for words in damage.DAMAGES[harm])


@pytest.mark.parametrize("values", ["[]", '{"model_type": ["deepseek_v4"]}', '{"quantization_config": 7}'])
def test_a_strange_config_is_an_error_and_no_crash(tmp_path, values):
    folder = damage.copy_checkpoint(tmp_path)
    (folder / "config.json").write_text(values)
    with pytest.raises((CheckpointError, UnsupportedCheckpoint)):
        identify(folder)


@pytest.mark.parametrize("look", [identify, recognise])
def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch, look):
    def refuse(self: Path):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(CheckpointError, match="cannot be read: Permission denied"):
        look(tmp_path)
