"""Headers and indexes of safetensors folders, sound and damaged."""

import json

import pytest
from safetensors import safe_open

from dsv4cli.engine.checkpoint.headers import INDEX, open_checkpoint, read_header, scan_checkpoint
from dsv4cli.errors import CheckpointError
from tests.support import damage


@pytest.mark.parametrize("name", ["tiny-flash", "tiny-pro"])
def test_every_tensor_is_found_where_safetensors_finds_it(name):
    checkpoint = open_checkpoint(damage.GOLDEN / name)
    weight_map = json.loads((damage.GOLDEN / name / INDEX).read_text())["weight_map"]
    assert {key: info.file.name for key, info in checkpoint.tensors.items()} == weight_map == checkpoint.index
    assert checkpoint.index_problems == {}
    for path in checkpoint.files:
        with safe_open(path, "pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - no mapping
        assert shapes == {key: list(info.shape) for key, info in checkpoint.tensors.items() if info.file == path}


def test_offsets_point_at_the_bytes():
    checkpoint = open_checkpoint(damage.GOLDEN / "tiny-flash")
    stored = damage.read_shard(checkpoint.files[1])[damage.WEIGHT]
    info = checkpoint.tensors[damage.WEIGHT]
    assert info.file.read_bytes()[info.begin : info.end] == stored.data
    assert (info.dtype, list(info.shape), info.nbytes) == (stored.dtype, stored.shape, len(stored.data))


def test_bytes_add_up_to_the_index():
    total = json.loads((damage.GOLDEN / "tiny-pro" / INDEX).read_text())["metadata"]["total_size"]
    assert open_checkpoint(damage.GOLDEN / "tiny-pro").nbytes == total


def test_shards_without_an_index_are_read(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    (folder / INDEX).unlink()
    damage.write_shard(folder / "expected.safetensors", {"tokens": damage.Stored("I32", [2], bytes(8))})
    checkpoint = open_checkpoint(folder)
    assert checkpoint.tensors.keys() == open_checkpoint(damage.GOLDEN / "tiny-flash").tensors.keys()
    assert (checkpoint.index, checkpoint.index_problems) == ({}, {})


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors"])
def test_a_single_file_is_read(tmp_path, name):
    damage.write_shard(tmp_path / name, {"a": damage.Stored("F32", [], bytes(4))})
    checkpoint = open_checkpoint(tmp_path)
    assert [(info.name, info.shape, info.nbytes) for info in checkpoint.tensors.values()] == [("a", (), 4)]


def test_a_file_without_tensors_is_sound(tmp_path):
    damage.write_shard(tmp_path / "model.safetensors", {})
    assert read_header(tmp_path / "model.safetensors") == []


def test_an_empty_tensor_is_sound(tmp_path):
    tensors = {"a": damage.Stored("F32", [0, 4], b""), "b": damage.Stored("U8", [1], b"x")}
    damage.write_shard(tmp_path / "model.safetensors", tensors)
    assert [info.name for info in read_header(tmp_path / "model.safetensors")] == ["a", "b"]


HEADERS = [
    damage.shard_missing,
    damage.shard_truncated,
    damage.shard_cut_in_its_header,
    damage.shard_too_long,
    damage.shard_is_lfs_pointer,
    damage.header_length_absurd,
    damage.header_not_json,
    damage.header_offsets_overlap,
    damage.header_shape_wrong,
    damage.folder_empty,
    damage.index_not_json,
    damage.index_names_absent_file,
    damage.index_leaves_the_folder,
]


@pytest.mark.parametrize("harm", HEADERS, ids=lambda harm: harm.__name__)
def test_damage_is_refused_and_the_file_named(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder)
    assert all(words in caught.value.message for words in damage.DAMAGES[harm])
    assert caught.value.remedy


def test_an_empty_file_is_truncated(tmp_path):
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is truncated"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["{}", "[]", "7", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": {"a": 1}}']
)
def test_an_index_without_file_names_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX):
        open_checkpoint(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "entry",
    [
        ENTRY | {"dtype": "F128"},
        ENTRY | {"dtype": ["F32"]},
        ENTRY | {"shape": [-2]},
        ENTRY | {"shape": [2.0]},
        ENTRY | {"shape": None},
        ENTRY | {"data_offsets": [8, 0]},
        ENTRY | {"data_offsets": [0]},
        ENTRY | {"data_offsets": [4, 12]},
        ENTRY | {"data_offsets": [True, 8]},
        {},
        7,
        None,
    ],
    ids=str,
)
def test_a_malformed_entry_is_a_corrupt_header(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors has a corrupt header"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "text", [b"[]", b"7", b"nul", b"[" * 100_000, b"\x00\x00"], ids=["list", "7", "cut", "deep", "0"]
)
def test_a_header_that_is_no_object_is_corrupt(tmp_path, text):
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="corrupt header"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "harm",
    [
        damage.index_lacks_tensor,
        damage.index_names_other_shard,
        damage.index_names_unknown_tensor,
        damage.tensor_missing,
        damage.tensor_twice,
    ],
    ids=lambda harm: harm.__name__,
)
def test_index_and_files_that_disagree_are_recorded(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    checkpoint = open_checkpoint(folder)
    (name, sentence), *others = checkpoint.index_problems.items()
    assert others == []
    assert name == damage.DAMAGES[harm][0]
    assert sentence.startswith(f"{name} is ")


def test_a_tensor_is_taken_from_the_file_that_holds_it(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.index_names_other_shard(folder)
    assert open_checkpoint(folder).tensors[damage.WEIGHT].file.name == damage.SHARD


def test_a_tensor_stored_twice_needs_an_index_to_choose(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.tensor_twice(folder)
    assert open_checkpoint(folder).tensors[damage.WEIGHT].file.name == damage.SHARD
    (folder / INDEX).unlink()
    with pytest.raises(CheckpointError, match="stored twice"):
        open_checkpoint(folder)


def test_a_broken_link_is_a_missing_file(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blobs" / "0")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing, but a link points to it"):
        open_checkpoint(tmp_path)


def test_a_long_file_name_in_the_index_is_a_missing_file(tmp_path):
    name = "x" * 300 + ".safetensors"
    damage.write_shard(tmp_path / "a.safetensors", {"a": damage.Stored("U8", [1], b"x")})
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": name}}))
    assert scan_checkpoint(tmp_path).missing_files == (name,)


@pytest.mark.parametrize("metadata", [None, {}, {"format": "pt"}], ids=str)
def test_metadata_are_no_tensor(tmp_path, metadata):
    text = json.dumps({"__metadata__": metadata}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert read_header(tmp_path / "model.safetensors") == []
