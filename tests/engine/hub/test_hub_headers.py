"""A model on the hub by its headers: what stands there is what the files say, and next to nothing comes."""

import gc
import struct
from pathlib import Path

import pytest

from dsv4cli.engine.checkpoint.headers import open_checkpoint, scan_checkpoint
from dsv4cli.engine.hub import headers
from dsv4cli.engine.hub.files import list_files
from dsv4cli.engine.hub.repository import repository_of
from dsv4cli.engine.hub.retry import RetryPolicy
from dsv4cli.errors import CheckpointError, HubError, UsageError
from tests.support import damage
from tests.support.hub_server import HubServer, point_at
from tests.support.slow import slow

HASTY = RetryPolicy(first_wait=0.001, longest_wait=0.004, stall=0.4)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    server = HubServer()
    point_at(server, tmp_path, monkeypatch)
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path):
    return damage.copy_checkpoint(tmp_path)


def offer(hub, folder: Path, name: str = "org/name") -> str:
    """Puts a folder on the hub."""
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return hub.add(name, files).branches["main"]


def remote_headers(text: str, policy: RetryPolicy) -> headers.RemoteHeaders:
    name = repository_of(text, None)
    return headers.remote_headers(list_files(name.repository, name.revision, policy), None, policy)


def described(checkpoint):
    """All that a checkpoint says, but for where its files are."""
    tensors = {
        name: (info.dtype, info.shape, info.begin, info.end, info.file.name)
        for name, info in checkpoint.tensors.items()
    }
    files = [path.name for path in checkpoint.files]
    return tensors, files, checkpoint.index, checkpoint.index_problems, checkpoint.missing_files


@pytest.mark.parametrize("first", [1 << 18, 64], ids=["at-once", "in-two"])
def test_the_headers_are_those_of_the_files(hub, folder, monkeypatch, first):
    monkeypatch.setattr(headers, "FIRST", first)
    commit = offer(hub, folder)
    source = remote_headers("org/name", policy=HASTY)
    assert described(source.checkpoint) == described(open_checkpoint(folder))
    assert source.listing.commit == commit
    assert source.checkpoint.files[0] == Path("org/name/model-00001-of-00003.safetensors")
    asked = hub.asked("storage")
    assert len(asked) == (3 if first > 64 else 6)
    small = sum((folder / name).stat().st_size for name in ("config.json", damage.INDEX))
    heads = [8 + struct.unpack("<Q", path.read_bytes()[:8])[0] for path in folder.glob("*.safetensors")]
    assert hub.sent <= small + (3 * first if first > 64 else sum(heads))


def test_the_small_files_are_there_while_the_source_is(hub, folder):
    offer(hub, folder)
    source = remote_headers("org/name", policy=HASTY)
    temporary = source.folder
    assert sorted(path.name for path in temporary.iterdir() if path.is_file()) == ["config.json", damage.INDEX]
    assert (temporary / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    del source
    gc.collect()
    assert not temporary.exists()


def test_one_file_without_an_index(hub, folder):
    (folder / damage.INDEX).unlink()
    shard = next(iter(sorted(folder.glob("*.safetensors"))))
    for path in folder.glob("*.safetensors"):
        path.rename(folder / "model.safetensors") if path == shard else path.unlink()
    offer(hub, folder)
    assert described(remote_headers("org/name", policy=HASTY).checkpoint) == described(open_checkpoint(folder))


DAMAGES = [
    damage.shard_truncated,
    damage.shard_cut_in_its_header,
    damage.shard_too_long,
    damage.header_length_absurd,
    damage.header_not_json,
    damage.header_offsets_overlap,
]


@pytest.mark.parametrize("harm", DAMAGES, ids=lambda harm: harm.__name__)
def test_a_damaged_file_is_named(hub, folder, harm):
    harm(folder)
    offer(hub, folder)
    with pytest.raises(CheckpointError, match=f"org/name/{damage.SHARD} "):
        remote_headers("org/name", policy=HASTY)


def test_a_file_that_the_index_names_and_the_repository_lacks(hub, folder):
    damage.shard_missing(folder)
    offer(hub, folder)
    checkpoint = remote_headers("org/name", policy=HASTY).checkpoint
    assert described(checkpoint) == described(scan_checkpoint(folder))
    assert checkpoint.missing_files == (damage.SHARD,)


def test_index_and_files_that_disagree(hub, folder):
    damage.drop_tensor(folder, damage.WEIGHT)
    damage.edit_json(folder / damage.INDEX, lambda index: index["weight_map"].pop(damage.SCALE))
    offer(hub, folder)
    checkpoint = remote_headers("org/name", policy=HASTY).checkpoint
    assert described(checkpoint) == described(scan_checkpoint(folder))
    assert checkpoint.index_problems.keys() == {damage.WEIGHT, damage.SCALE}


@pytest.mark.parametrize(
    "fault",
    [
        {"cut": 500, "times": 4},
        *slow({"short": 3, "times": 2}, {"status": 503, "times": 4}),
        {"status": 429, "times": 2, "headers": {"Retry-After": "0"}},
        {"ignore_range": True, "times": 9},
        *slow({"pause": (100, 9.0), "times": 1}),
    ],
    ids=str,
)
def test_faults_on_the_way(hub, folder, monkeypatch, fault):
    monkeypatch.setattr(headers, "FIRST", 1000)
    offer(hub, folder)
    hub.fail("storage", **fault)
    assert described(remote_headers("org/name", policy=HASTY).checkpoint) == described(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("org/none", HubError, "no repository org/none"),
        ("org/name@none", HubError, "no revision none"),
        ("org/plain", CheckpointError, "org/plain contains no safetensors file"),
        ("a/b/c", UsageError, "is not a repository on the hub"),
    ],
)
def test_refusals(hub, folder, text, error, words):
    offer(hub, folder)
    hub.add("org/plain", {"config.json": b"{}"})
    with pytest.raises(error, match=words):
        remote_headers(text, HASTY)


def test_a_gated_repository(hub, folder, tmp_path):
    offer(hub, folder)
    hub.repositories["org/name"].gated = {"mine"}
    with pytest.raises(HubError, match="is gated"):
        remote_headers("org/name", policy=HASTY)
    (tmp_path / "token").write_text("mine")
    assert remote_headers("org/name", policy=HASTY).checkpoint.tensors
    assert {request.token for request in hub.asked("storage")} == {None}
