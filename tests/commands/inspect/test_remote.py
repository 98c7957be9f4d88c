"""Inspecting a repository on the hub: headers by range requests, from a real HTTP server on loopback."""

import functools
import json
import shutil
import struct
import tempfile
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from dsv4cli.engine.checkpoint.identify import recognise
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.hub import headers, retry
from dsv4cli.engine.inspection.sources import RemoteSource, resolve_inspectable
from dsv4cli.errors import CheckpointError, HubError, ModelNotFound, UnsupportedCheckpoint
from tests.support import damage, foreign
from tests.support.hub_server import HubServer, point_at
from tests.support.slow import slow, slow_rows
from tests.support.variants import write_variant

NAME = "deepseek-ai/DeepSeek-V4-Flash"
SHARDS = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.stem != "expected"}


GOLDEN = files_of(damage.GOLDEN / "tiny-flash")
SMALL = sum(len(content) for name, content in GOLDEN.items() if not name.endswith(".safetensors"))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, in front of an empty cache; failures cost milliseconds, and temporary folders lie in tmp_path."""
    server = HubServer()
    point_at(server, tmp_path / "home", monkeypatch)
    hasty = functools.partial(retry.RetryPolicy, first_wait=0.002, longest_wait=0.01, stall=0.4)
    monkeypatch.setattr(retry, "RetryPolicy", hasty)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield server
    close_session()
    server.close()


def test_a_model_is_recognised_by_its_headers(hub, tmp_path):
    hub.add(NAME, GOLDEN | {"tokenizer.json": bytes(10**6), "README.md": b"# A model"})
    source = resolve_inspectable("flash")
    assert isinstance(source, RemoteSource)
    assert hub.requests == []
    there, here = source.identity, recognise(damage.GOLDEN / "tiny-flash")
    assert (there.config, there.formats, there.layout) == (here.config, here.formats, "official")
    assert list(there.checkpoint.tensors) == list(here.checkpoint.tensors)
    assert there.checkpoint.index == here.checkpoint.index
    for name, info in there.checkpoint.tensors.items():
        other = here.checkpoint.tensors[name]
        assert (info.dtype, info.shape, info.begin, info.end) == (other.dtype, other.shape, other.begin, other.end)
        assert info.file == Path(NAME) / other.file.name
    assert source.recognised.checkpoint is there.checkpoint


def test_nothing_but_headers_comes_over_the_network(hub, tmp_path):
    hub.add(NAME, GOLDEN | {"tokenizer.json": bytes(10**6)})
    assert resolve_inspectable(NAME).recognised.checkpoint.nbytes == 7348132
    assert hub.sent <= SMALL + len(SHARDS) * headers.FIRST
    assert not hub.asked("tokenizer")
    assert {request.begin for request in hub.asked("storage")} == {0}
    assert len(hub.asked("storage")) == len(SHARDS)
    # the cache is as it was, and the small files are gone with the source
    assert not (tmp_path / "home" / "hub").exists()
    assert not list(tmp_path.glob("dsv4-*"))


def test_a_long_header_is_read_to_its_end(hub, monkeypatch):
    monkeypatch.setattr(headers, "FIRST", 1000)
    hub.add(NAME, GOLDEN)
    assert len(resolve_inspectable(NAME).identity.checkpoint.tensors) == 432
    lengths = [struct.unpack("<Q", GOLDEN[shard][:8])[0] + 8 for shard in SHARDS]
    assert hub.sent == SMALL + sum(lengths)


def test_a_revision_is_asked_for_by_name(hub):
    repository = hub.add(NAME, {"README.md": b"empty"})
    commit = repository.commit(GOLDEN, branch="v2")
    for name in (f"{NAME}@v2", f"hf://{NAME}@{commit}"):
        assert resolve_inspectable(name).identity.layout == "official"
    with pytest.raises(HubError, match="no revision v3"):
        resolve_inspectable(f"{NAME}@v3").identity  # noqa: B018 - the question raises


@pytest.mark.parametrize(
    ("consumer", "command"),
    [
        ("vllm", "→ vllm serve {name} --tool"),
        *slow_rows(("sglang", "--model-path {name} --tool"), ("transformers", "→ transformers serve {name}@v2\n")),
        ("dsv4", "→ dsv4 run --model {name}@v2 'What"),
        *slow_rows(("official", "→ dsv4 convert {name}@v2 OUT --to mp")),
    ],
)
def test_a_revision_that_is_judged_is_the_one_that_is_started(hub, dsv4, consumer, command):
    repository = hub.add(NAME, {"README.md": b"empty"})
    repository.commit(GOLDEN | {"tokenizer.json": b"{}"}, branch="v2")
    done = dsv4("inspect", f"{NAME}@v2", "--for", consumer)
    assert command.format(name=NAME) in done.out
    assert done.out.endswith(" --revision v2\n") is (consumer in ("vllm", "sglang"))


@pytest.mark.parametrize("consumer", ["vllm", *slow("dsv4")])
def test_no_program_loads_a_repository_whose_headers_are_damaged(hub, dsv4, tmp_path, consumer):
    folder = damage.copy_checkpoint(tmp_path)
    damage.header_not_json(folder)
    hub.add(NAME, files_of(folder))
    done = dsv4("inspect", NAME, "--for", consumer, "--json")
    assert (done.code, done.err) == (3, "")
    assert json.loads(done.out)["verdict"]["loads"] is False
    assert len(hub.asked("api/models")) == 1


def test_the_command_that_runs_a_repository_names_it_as_run_does(hub, dsv4):
    hub.add(NAME, GOLDEN)
    done = dsv4("inspect", f"hf://{NAME}@main", "--fit", "--ram", "64GB")
    assert f"→ dsv4 run --model {NAME}@main --max-context" in done.out


@pytest.mark.parametrize("harm", [foreign.is_v41, *slow(foreign.has_bf16_scales, foreign.is_cut_for_no_process)])
def test_a_foreign_model_is_refused_by_name(hub, tmp_path, harm):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    hub.add(NAME, files_of(folder))
    with pytest.raises(UnsupportedCheckpoint) as caught:
        resolve_inspectable(NAME).identity  # noqa: B018 - the question raises
    assert foreign.FOREIGN[harm][0] in caught.value.message
    assert caught.value.message.startswith(f"{NAME} is ")
    assert str(tmp_path) not in caught.value.message + caught.value.remedy


def test_an_export_that_convert_reads_is_recognised(hub, tmp_path):
    hub.add(NAME, files_of(write_variant(tmp_path / "bf16", Formats("bf16", "bf16"))))
    assert resolve_inspectable(NAME).recognised.layout == "bf16"


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        *slow_rows((damage.shard_missing, (damage.SHARD, "is missing")), (damage.shard_truncated, (damage.SHARD,))),
        (damage.shard_is_lfs_pointer, (damage.SHARD, "is a git-lfs pointer, not the weights")),
        *slow_rows(
            (damage.header_length_absurd, (damage.SHARD, "header")),
            (damage.header_not_json, (damage.SHARD, "not JSON")),
            (damage.folder_empty, ("no safetensors file",)),
            (damage.index_not_json, (f"{NAME}/{damage.INDEX} is not a safetensors index",)),
        ),
        (damage.index_leaves_the_folder, (f"{NAME}/{damage.INDEX} names",)),
        (damage.config_missing, (NAME, "no config.json")),
    ],
)
def test_damage_is_named(hub, tmp_path, harm, words):
    folder = damage.copy_checkpoint(tmp_path)
    harm(folder)
    hub.add(NAME, files_of(folder))
    with pytest.raises(CheckpointError) as caught:
        resolve_inspectable(NAME).identity  # noqa: B018 - the question raises
    assert all(word in caught.value.message for word in words)
    assert caught.value.remedy
    assert str(tmp_path) not in caught.value.message + caught.value.remedy


def test_damaged_headers_are_asked_for_once(hub, dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.header_not_json(folder)
    hub.add(NAME, files_of(folder))
    done = dsv4("inspect", NAME)
    assert done.code == 3
    assert (
        f"{damage.SHARD} has a corrupt header: not JSON\n→ use another revision, for example {NAME}@REVISION"
        in done.out
    )
    assert len(hub.asked("api/models")) == 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"path": "storage", "status": 503}, ""),
        ({"path": "storage", "cut": 500}, ""),
        ({"path": "storage", "ignore_range": True}, ""),
        *slow_rows(
            ({"path": "config.json", "cut": 10}, ""),
            ({"path": "storage", "status": 503, "times": 99}, "HTTP 503"),
            ({"path": "storage", "cut": 500, "times": 99}, "reached|cut|ended"),
            ({"path": "storage", "status": 404, "times": 99}, "404|no longer"),
        ),
        ({"path": "api/models", "status": 401, "times": 99}, "401|login"),
        ({"path": "resolve", "status": 403, "times": 99}, "403|refuses"),
    ],
    ids=str,
)
def test_a_failing_hub_is_asked_again_and_then_told(hub, fault, words):
    hub.add(NAME, GOLDEN)
    hub.fail(**fault)
    if not words:
        assert len(resolve_inspectable(NAME).identity.checkpoint.tensors) == 432
        return
    with pytest.raises(HubError, match=words) as caught:
        resolve_inspectable(NAME).identity  # noqa: B018 - the question raises
    assert (caught.value.exit_code, bool(caught.value.remedy)) == (6, True)


def test_a_hub_that_is_asked_again_is_told_meanwhile(hub, dsv4):
    hub.add(NAME, GOLDEN)
    hub.fail("api/models", status=503)
    done = dsv4("inspect", NAME)
    assert done.code == 0
    assert "the hub fails with HTTP 503 on" in done.err
    assert "; try 2 of 4 in 0.002 s\n" in done.err


def test_what_the_hub_does_not_have_or_show_is_told(hub):
    hub.add("someone/secret", GOLDEN, private={"key"})
    for name in ("someone/else", "someone/secret"):
        with pytest.raises(HubError, match=f"no repository {name}, or it is private"):
            resolve_inspectable(name).identity  # noqa: B018 - the question raises


def test_offline_nothing_is_asked(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFound, match="not in the Hugging Face cache"):
        resolve_inspectable("flash")
    assert hub.requests == []


def test_the_command_answers_as_for_a_folder(hub, dsv4):
    hub.add(NAME, GOLDEN)
    there, here = dsv4("inspect", NAME), dsv4("inspect", str(damage.GOLDEN / "tiny-flash"))
    report = here.out[here.out.index("\nsize ") :]  # the first lines name the folder, and the tokenizer that it lacks
    assert (there.code, there.out.endswith(report)) == (0, True)
    assert there.out.startswith(f"{NAME} would load: all 432 tensors are present and as expected\n")
    assert there.err == f"reading the headers of {NAME} over the network\n"
    assert dsv4("inspect", "flash").err == there.err
    document = dsv4("inspect", "flash", "--json")
    assert (document.code, document.err) == (0, "")
    assert json.loads(document.out)["coverage"]["complete"]


def test_the_command_says_no_with_exit_code_3(hub, dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.tensor_missing(folder)
    hub.add(NAME, files_of(folder))
    done = dsv4("inspect", NAME)
    assert done.code == 3
    assert done.out.startswith(f"{NAME} would not load\n  tensor layers.3.attn.q_norm.weight is missing\n")


def test_a_failing_hub_is_exit_code_6(hub, dsv4):
    done = dsv4("inspect", "someone/else")
    assert (done.code, done.out) == (6, "")
    assert "the hub has no repository someone/else, or it is private" in done.err


def test_a_part_in_the_cache_is_told_by_the_files_that_are_missing(hub, dsv4, tmp_path):
    hub.add(NAME, GOLDEN)
    folder = tmp_path / "part"
    shutil.copytree(damage.GOLDEN / "tiny-flash", folder, ignore=shutil.ignore_patterns("expected.*", SHARDS[1]))
    done = dsv4("inspect", str(folder))
    assert done.code == 3
    assert SHARDS[1] in done.out
