"""What `inspect` may look at: folders, files, the cache, and what is left for the network."""

import json
import shutil
import socket
from pathlib import Path

import pytest
from huggingface_hub import constants

from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.checkpoint.naming import TransformersNaming
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.inspection.sources import FileSource, RemoteSource, resolve_inspectable
from dsv4cli.errors import CheckpointError, Dsv4Error, ModelNotFound, UnsupportedCheckpoint, UsageError
from tests.support import damage, foreign
from tests.support.variants import write_variant

SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))
COMMIT = "60d8d70770c6776ff598c94bb586a859a38244f1"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no network; nothing is read before it is asked for."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    return tmp_path / "hub"


def cached(cache: Path, *names: str) -> Path:
    """A snapshot of Flash in the cache with some of the golden files."""
    store = cache / "models--deepseek-ai--DeepSeek-V4-Flash"
    snapshot = store / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    for name in names:
        shutil.copy(damage.GOLDEN / "tiny-flash" / name, snapshot)
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize("name", ["flash", "deepseek-ai/DeepSeek-V4-Flash", "hf://deepseek-ai/DeepSeek-V4-Flash"])
def test_a_repository_is_taken_from_the_cache_and_else_from_the_network(cache, name):
    assert resolve_inspectable(name) == RemoteSource(name)
    snapshot = cached(cache, "config.json")
    found = resolve_inspectable(name)
    assert isinstance(found, FolderSource)
    assert found.folder == snapshot


def test_other_models_are_as_for_run():
    folder = damage.GOLDEN / "tiny-pro"
    assert resolve_inspectable(str(folder)) == FolderSource(str(folder), folder)
    assert isinstance(resolve_inspectable("random:tiny"), RandomSource)


@pytest.mark.parametrize("name", ["flash", "someone/else@v2", "hf://someone/else"])
def test_offline_the_network_is_not_offered(monkeypatch, name):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="not in the Hugging Face cache") as caught:
        resolve_inspectable(name)
    assert caught.value.remedy == f"fetch it with `dsv4 download {name.removeprefix('hf://')}`"


@pytest.mark.parametrize(
    "text", ["./nothing", "a/b/c", "~nobody/x", "nothing", "hf://", "hf://flash,1", "x" * 300, "a--b/c"]
)
def test_what_cannot_be_a_model_is_refused(text):
    with pytest.raises((UsageError, ModelNotFound)):
        resolve_inspectable(text)


@pytest.mark.parametrize("shard", SHARDS)
def test_a_file_is_a_part_of_the_model_beside_it(shard):
    path = damage.GOLDEN / "tiny-flash" / shard
    found = resolve_inspectable(str(path))
    assert found == FileSource(str(path), path)
    assert list(found.checkpoint.tensors) == list(damage.read_shard(path))
    assert found.checkpoint.missing_files == tuple(name for name in SHARDS if name != shard)
    assert found.checkpoint.index_problems == {}
    assert (found.identity.layout, found.identity.config.drafter) == ("official", "mtp")


def test_a_file_needs_no_index(tmp_path):
    for name in (damage.SHARD, "config.json"):
        shutil.copy(damage.GOLDEN / "tiny-flash" / name, tmp_path)
    found = resolve_inspectable(str(tmp_path / damage.SHARD))
    assert found.identity.config.drafter == "mtp"
    assert found.checkpoint.missing_files == (SHARDS[0], SHARDS[2])


def test_a_file_needs_no_configuration_for_its_headers(tmp_path):
    shutil.copy(damage.GOLDEN / "tiny-flash" / damage.SHARD, tmp_path / "part.safetensors")
    found = resolve_inspectable(str(tmp_path / "part.safetensors"))
    assert damage.WEIGHT in found.checkpoint.tensors
    assert found.checkpoint.missing_files == ()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        found.identity  # noqa: B018 - the question raises


def test_a_file_at_odds_with_the_index_is_told(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drop_tensor(folder, damage.WEIGHT)
    damage.index_lacks_tensor(folder)
    damage.tensor_extra(folder)
    damage.edit_json(folder / damage.INDEX, lambda index: index["weight_map"].pop("layers.3.attn.bias"))
    problems = resolve_inspectable(str(folder / damage.SHARD)).checkpoint.index_problems
    assert list(problems) == ["layers.3.attn.bias"]


@pytest.mark.parametrize(
    "harm", [damage.shard_truncated, damage.shard_is_lfs_pointer, damage.header_not_json, damage.header_shape_wrong]
)
def test_a_damaged_file_is_named(tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    with pytest.raises(CheckpointError) as caught:
        resolve_inspectable(str(folder / damage.SHARD)).checkpoint  # noqa: B018 - the question raises
    assert all(words in caught.value.message for words in damage.DAMAGES[harm])


def test_a_file_of_a_foreign_model_is_refused_by_name(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    foreign.is_v41(folder)
    with pytest.raises(UnsupportedCheckpoint, match=r"DeepSeek-V4\.1"):
        resolve_inspectable(str(folder / damage.SHARD)).identity  # noqa: B018 - the question raises


def test_a_file_without_a_telling_name_is_known_by_the_index(tmp_path):
    config = recognise(damage.GOLDEN / "tiny-flash").config
    folder = write_variant(tmp_path, Formats("bf16", "bf16"), TransformersNaming(config))
    tensors = damage.read_shard(folder / "model.safetensors")
    damage.write_shard(folder / "last.safetensors", {"lm_head.weight": tensors.pop("lm_head.weight")})
    damage.write_shard(folder / "model.safetensors", tensors)
    names = dict.fromkeys(tensors, "model.safetensors") | {"lm_head.weight": "last.safetensors"}
    (folder / damage.INDEX).write_text(json.dumps({"weight_map": names}))
    assert resolve_inspectable(str(folder / "last.safetensors")).identity.layout == "transformers"


def test_a_part_in_the_cache_is_recognised(cache):
    cached(cache, "config.json", damage.INDEX, SHARDS[0])
    found = resolve_inspectable("flash")
    assert isinstance(found, FolderSource)
    assert found.recognised.checkpoint.missing_files == SHARDS[1:]
    assert found.recognised.layout == "official"
    with pytest.raises(Dsv4Error, match="is missing"):
        found.identity  # noqa: B018 - the question raises


def test_an_empty_file_is_no_crash(tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.write_shard(folder / damage.SHARD, {})
    assert resolve_inspectable(str(folder / damage.SHARD)).identity.checkpoint.tensors == {}
