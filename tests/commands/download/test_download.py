"""`dsv4 download` from outside, against a real HTTP server on loopback that speaks the hub's interface."""

import errno
import functools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants, snapshot_download

from dsv4cli.engine.hub import fetch, retry
from tests.support import damage
from tests.support.hub_server import HubServer, environment, git_blob, point_at, sha256
from tests.support.program import ROOT, inside
from tests.support.slow import slow, slow_rows

REPOSITORY = "deepseek-ai/DeepSeek-V4-Flash"
SHARDS = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
GOLDEN = {path.name: path.read_bytes() for path in (damage.GOLDEN / "tiny-flash").iterdir() if path.stem != "expected"}
FLASH = GOLDEN | {"README.md": b"# A model\n", "encoding/encoding.py": b"", "tokenizer.json": b"{}"}
# several pieces each, to be cut anywhere; not a model
BLOBS = {f"part-{number}.bin": random.Random(number).randbytes(20_000 + 7_000 * number) for number in range(4)}
# complete, but the answer is no
NO_MODEL = 3
MIXED = BLOBS | {"config.json": b'{"model_type": "other"}', "notes/empty.txt": b"", "notes/long.md": b"word " * 9000}
# runs the program and ends with 9 if it has imported torch, which takes seconds
IMPORTS_NO_TORCH = """\
import sys
from dsv4cli import cli
try:
    cli.main()
except SystemExit as left:
    sys.exit(9 if "torch" in sys.modules else left.code)
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, in front of an empty cache and nobody who is logged in; failures cost milliseconds."""
    server = HubServer()
    point_at(server, tmp_path, monkeypatch)
    hasty = functools.partial(retry.RetryPolicy, first_wait=0.001, longest_wait=0.004, stall=0.4)
    monkeypatch.setattr(retry, "RetryPolicy", hasty)
    yield server
    server.close()


def document(done):
    assert done.err == ""
    return json.loads(done.out)


def content(folder: Path) -> dict[str, bytes]:
    """What a user finds in the folder."""
    paths = [path for path in folder.rglob("*") if path.is_file() and ".cache" not in path.parts]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def cached(tmp_path: Path, repository: str = REPOSITORY) -> Path:
    return tmp_path / "hub" / f"models--{repository.replace('/', '--')}"


def test_a_whole_model_comes_into_the_cache(hub, dsv4, tmp_path):
    commit = hub.add(REPOSITORY, FLASH).branches["main"]
    done = dsv4("download", "flash")
    assert (done.code, done.err) == (0, "8 files, 7.42 MB of 7.42 MB to download\n→ dsv4 inspect flash\n")
    lines = done.out.splitlines()
    assert lines[0] == "flash is complete: 9 files, 7.42 MB, every byte verified".replace("9", "8")
    assert lines[-1] == "flash would load: all 432 tensors are present and as expected"
    folder = cached(tmp_path) / "snapshots" / commit
    assert content(folder) == FLASH
    assert (cached(tmp_path) / "refs" / "main").read_text() == commit
    assert dsv4("inspect", "flash").code == 0


def test_huggingface_hub_takes_what_was_downloaded_for_its_own(hub, dsv4, tmp_path):
    hub.add(REPOSITORY, FLASH)
    hub.page = 3
    assert dsv4("download", "flash").code == 0
    hub.sent = 0
    ours = Path(snapshot_download(REPOSITORY, local_files_only=True))
    theirs = Path(snapshot_download(REPOSITORY))
    assert (ours, content(theirs), hub.sent) == (theirs, FLASH, 0)
    assert all(path.is_symlink() for path in theirs.rglob("*") if path.is_file())


def test_what_huggingface_hub_has_fetched_is_verified_and_not_fetched_again(hub, dsv4):
    hub.add(REPOSITORY, FLASH)
    folder = snapshot_download(REPOSITORY, allow_patterns=SHARDS[:2])
    dsv4.capture.readouterr()
    hub.sent = 0
    files = {file["name"]: file for file in document(dsv4("download", "flash", "--json"))["files"]}
    assert [files[name]["outcome"] for name in SHARDS] == ["there", "there", "fetched"]
    assert hub.sent == sum(map(len, FLASH.values())) - sum(len(FLASH[name]) for name in SHARDS[:2])
    assert content(Path(folder)) == FLASH


def test_the_document_has_everything(hub, dsv4, tmp_path):
    commit = hub.add("org/name", FLASH).branches["main"]
    value = document(dsv4("download", "org/name", "--local-dir", str(tmp_path / "model"), "--json"))
    assert (value["schema"], value["repository"], value["commit"]) == ("dsv4.download/1", "org/name", commit)
    assert (value["complete"], value["dry_run"], value["left_out"]) == (True, False, [])
    assert value["bytes"] == {"wanted": 7_423_041, "held": 0, "missing": 7_423_041} | {
        key: sum(map(len, FLASH.values())) for key in ("wanted", "missing")
    }
    assert value["verdict"]["sound"] is True
    hashes = {file["name"]: file.get("sha256") or file["git_sha1"] for file in value["files"]}
    assert hashes == {n: (sha256 if n.endswith("safetensors") else git_blob)(c) for n, c in FLASH.items()}
    assert content(tmp_path / "model") == FLASH


def test_a_second_run_reads_all_and_fetches_nothing(hub, dsv4):
    hub.add(REPOSITORY, FLASH)
    assert dsv4("download", "flash").code == 0
    hub.sent = 0
    value = document(dsv4("download", "flash", "--json"))
    assert {file["outcome"] for file in value["files"]} == {"there"}
    assert hub.sent == 0


@pytest.mark.parametrize("target", ["cache", *slow("folder")])
def test_a_damaged_file_is_found_and_repaired(hub, dsv4, tmp_path, target):
    commit = hub.add(REPOSITORY, FLASH).branches["main"]
    options = ["--local-dir", str(tmp_path / "model")] if target == "folder" else []
    folder = tmp_path / "model" if options else cached(tmp_path) / "snapshots" / commit
    assert dsv4("download", "flash", *options).code == 0
    for name, harm in ((SHARDS[0], lambda b: b[:-1] + b"!"), (SHARDS[2], lambda b: b[:99]), ("README.md", len)):
        harmed = harm(FLASH[name])
        (folder / name).resolve().write_bytes(harmed if isinstance(harmed, bytes) else b"x" * harmed)
    hub.sent = 0
    files = {file["name"]: file["outcome"] for file in document(dsv4("download", "flash", *options, "--json"))["files"]}
    assert [name for name, outcome in files.items() if outcome == "repaired"] == ["README.md", SHARDS[0], SHARDS[2]]
    assert hub.sent == sum(len(FLASH[name]) for name in ("README.md", SHARDS[0], SHARDS[2]))
    assert content(folder) == FLASH


@pytest.mark.parametrize("mine", [*slow(b'{"mine": 1}'), b"x" * len(GOLDEN["config.json"])], ids=["shorter", "as-long"])
def test_a_file_that_no_download_has_put_there_is_not_overwritten(hub, dsv4, tmp_path, mine):
    hub.add(REPOSITORY, FLASH)
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_bytes(mine)
    (folder / "README.md").write_bytes(FLASH["README.md"])
    done = dsv4("download", "flash", "--local-dir", str(folder))
    assert (done.code, done.out) == (2, "")
    assert f"{folder}/config.json is not the file of {REPOSITORY}" in done.err
    command = f"mv '{folder}/config.json' '{folder}/config.json.old'"
    assert f"use another --local-dir, or keep yours: {command}" in done.err
    assert content(folder)["config.json"] == mine
    subprocess.run(["bash", "-c", command], check=True)
    assert dsv4("download", "flash", "--local-dir", str(folder)).code == 0
    assert content(folder) == FLASH | {"config.json.old": mine}
    # from now on these files are the download's, and what is wrong with them is repaired
    for name in ("README.md", "config.json"):
        (folder / name).write_bytes(b"x" * 11)
    assert dsv4("download", "flash", "--local-dir", str(folder)).code == 0
    assert content(folder) == FLASH | {"config.json.old": mine}


@pytest.mark.parametrize(
    ("options", "left_out", "owners"),
    [
        (("--layers", "0-1", "--no-mtp"), [SHARDS[1]], ["layers.0", "layers.1"]),
        *slow_rows(
            (("--layers", "2"), [], ["layers.2", "mtp.0"]),
            (("--no-mtp",), [], [f"layers.{layer}" for layer in range(5)]),
        ),
        (("--only", "config, index"), ["README.md", "encoding/encoding.py", *SHARDS, "tokenizer.json"], None),
        (("--only", "weights", "--layers", "0-0", "--no-mtp"), sorted({*FLASH} - {SHARDS[0], SHARDS[2]}), None),
    ],
    ids=["layers", "one", "no-mtp", "only", "weights"],
)
def test_a_part(hub, dsv4, tmp_path, options, left_out, owners):
    hub.add(REPOSITORY, FLASH)
    folder = tmp_path / "part"
    value = document(dsv4("download", "flash", *options, "--local-dir", str(folder), "--json"))
    assert value["left_out"] == left_out
    assert content(folder).keys() == FLASH.keys() - {*left_out}
    names = json.loads(FLASH[damage.INDEX])["weight_map"]
    wanted = [name for name in names if not name.startswith(("layers.", "mtp."))]
    wanted += [name for name in names for owner in owners or () if name.startswith(owner + ".")]
    sound, count = (True, len(wanted)) if owners else (None, 0)
    assert (value["verdict"]["sound"], value["verdict"]["tensors"]) == (sound, count)


def test_a_hint_can_be_pasted_and_leads_to_a_model(hub, dsv4, tmp_path):
    hub.add(REPOSITORY, FLASH)
    folder, made = tmp_path / "it's mine", tmp_path / "made"
    done = dsv4("download", "flash", "--layers", "0-1", "--no-mtp", "--local-dir", str(folder))
    hint = done.err.splitlines()[-1].partition("layers: ")[2]
    words = shlex.split(hint.replace(" OUT ", f" {made} "))
    assert words == ["dsv4", "convert", str(folder), str(made), "--to", "official", "--layers", "0-1", "--no-mtp"]
    assert dsv4(*words[1:]).code == 0
    assert dsv4("inspect", str(made)).code == 0
    done = dsv4("download", "flash", "--local-dir", str(folder))
    assert shlex.split(done.err.splitlines()[-1]) == ["→", "dsv4", "inspect", str(folder)]


def test_a_part_says_what_was_left_out(hub, dsv4):
    hub.add(REPOSITORY, FLASH)
    done = dsv4("download", "flash", "--layers", "0-1", "--no-mtp")
    assert done.code == 0
    assert "not selected: 1 of 8 files, 2.56 MB\n" in done.out
    assert done.out.endswith("all 136 tensors of the part are present and as expected\n")


def test_a_part_that_is_not_the_model_it_says_is_told(hub, dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.drop_tensor(folder, "layers.0.attn.wkv.scale")
    hub.add("org/name", {path.name: path.read_bytes() for path in folder.iterdir()})
    done = dsv4("download", "org/name", "--layers", "0-1", "--no-mtp")
    assert (done.code, "the part is damaged\n" in done.out) == (3, True)
    assert "layers.0.attn.wkv.scale is missing, but its weight is there" in done.out
    assert dsv4("download", "org/name", "--layers", "2-3", "--no-mtp").code == 0


@pytest.mark.parametrize("target", ["cache", "folder"])
def test_a_repository_that_lacks_a_file_is_so_after_the_next_download_too(hub, dsv4, tmp_path, target):
    repository = hub.add("org/name", {name: content for name, content in FLASH.items() if name != SHARDS[0]})
    options = ["--local-dir", str(tmp_path / "to")] if target == "folder" else []
    done = dsv4("download", "org/name", *options)
    assert done.code == 3
    assert f"{SHARDS[0]} is missing, but model.safetensors.index.json names it\n" in done.out
    remedy = "use another revision, for example org/name@REVISION, or ask its owners"
    assert done.out.endswith(f"→ org/name is so at commit {repository.branches['main'][:12]}: {remedy}\n")


def test_a_file_beside_a_download_is_not_the_repositorys(hub, dsv4, tmp_path):
    hub.add("org/name", {name: content for name, content in FLASH.items() if not name.endswith(".index.json")})
    (tmp_path / "model-of-mine.safetensors").write_bytes(FLASH[SHARDS[0]])
    done = dsv4("download", "org/name", "--local-dir", str(tmp_path))
    assert done.code == 3
    assert "is stored twice" in done.out
    assert "is so at commit" not in done.out


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize("name", ["config.json", SHARDS[0]])
def test_a_folder_in_the_place_of_a_file_is_told_before_anything_comes(hub, dsv4, tmp_path, name, options):
    hub.add(REPOSITORY, FLASH)
    (tmp_path / name).mkdir()
    done = dsv4("download", "flash", "--local-dir", str(tmp_path), *options)
    assert (done.code, done.out) == (2, "")
    assert f"error: {tmp_path / name} is a folder, and a file of {REPOSITORY} has its name\n" in done.err
    assert f"mv {tmp_path / name} {tmp_path / name}.old\n" in done.err
    assert list(tmp_path.iterdir()) == [tmp_path / name]
    done = dsv4("download", "flash", "--local-dir", str(tmp_path), "--only", "tokenizer")
    assert done.code == 0


def test_another_model_comes_whole_but_the_answer_is_no(hub, dsv4, tmp_path):
    folder = damage.copy_checkpoint(tmp_path)
    damage.edit_config(folder, model_type="deepseek_v3")
    hub.add("org/name", {path.name: path.read_bytes() for path in folder.iterdir()})
    done = dsv4("download", "org/name")
    assert done.code == 3
    assert "org/name is complete" in done.out
    assert "org/name would not load\n" in done.out
    assert "DeepSeek-V3" in done.out


def test_one_file_is_one_file(hub, dsv4):
    hub.add(REPOSITORY, FLASH)
    done = dsv4("download", "flash", "--only", "index")
    assert done.err.startswith("1 file, ")
    assert " is complete: 1 file, " in done.out


def test_a_dry_run_shows_the_plan_and_fetches_nothing(hub, dsv4, tmp_path):
    hub.add(REPOSITORY, FLASH)
    assert dsv4("download", "flash", "--only", "config").code == 0
    hub.sent = 0
    done = dsv4("download", "flash", "--dry-run")
    assert (done.code, done.err, hub.sent) == (0, "", 0)
    assert [line.split() for line in done.out.splitlines()[1:3]] == [
        ["files", "bytes", "present", "to", "download"],
        ["config", "1", "1.41", "kB", "1.41", "kB", "0", "B"],
    ]
    assert max(map(len, done.out.splitlines()[:-1])) <= 80
    value = document(dsv4("download", "flash", "--dry-run", "--json"))
    assert (value["dry_run"], value["complete"], value["verdict"]) == (True, False, None)
    assert value["bytes"]["held"] == len(FLASH["config.json"])


def test_what_does_not_fit_is_refused_before_the_first_byte(hub, dsv4, tmp_path, monkeypatch):
    hub.add(REPOSITORY, FLASH)
    assert dsv4("download", "flash", "--only", "weights", "--layers", "0-1", "--no-mtp").code == 0
    hub.sent = 0
    asked = []
    missing = sum(map(len, FLASH.values())) - len(FLASH[SHARDS[0]]) - len(FLASH[SHARDS[2]])
    usage = shutil._ntuple_diskusage(10**9, 0, missing - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or usage)
    done = dsv4("download", "flash")
    assert (done.code, hub.sent) == (5, 0)
    assert done.err.startswith("error: flash needs 2.59 MB more at ")
    assert "--local-dir" in done.err
    assert dsv4("download", "flash", "--dry-run").code == 5
    assert dsv4("download", "flash", "--dry-run", "--local-dir", str(tmp_path / "new" / "folder")).code == 5
    assert [cached(tmp_path) in path.parents for path in asked[:2]] == [True] * 2
    assert asked[2] == tmp_path
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=missing))
    assert dsv4("download", "flash").code == 0


def test_a_disk_that_fills_up_meanwhile(hub, dsv4, tmp_path, monkeypatch):
    hub.add(REPOSITORY, FLASH)
    write, room = os.write, [3_000_000]

    def full(handle, piece):
        room[0] -= len(piece)
        if room[0] < 0:
            raise OSError(28, "No space left on device")
        return write(handle, piece)

    monkeypatch.setattr(fetch.os, "write", full)
    done = dsv4("download", "flash", "--max-workers", "1")
    assert (done.code, "is full" in done.err, "continues where it stopped" in done.err) == (5, True, True)
    assert not (cached(tmp_path) / "refs").exists()
    monkeypatch.setattr(fetch.os, "write", write)
    hub.sent = 0
    assert dsv4("download", "flash").code == 0
    # what had come stays
    assert hub.sent < sum(map(len, FLASH.values())) - 2_900_000


@pytest.mark.parametrize("target", ["cache", "folder"])
def test_a_cut_connection_continues_where_it_stopped(hub, dsv4, tmp_path, target):
    hub.add("org/name", BLOBS)
    hub.fail("storage", cut=10_000, times=3)
    hub.fail("storage", cut=0, times=2)
    options = ["--local-dir", str(tmp_path / "model")] if target == "folder" else []
    dsv4("download", "org/name", *options, "--max-workers", "1")
    assert {request.begin for request in hub.asked("storage")} >= {0, 10_000}
    assert hub.sent == sum(map(len, BLOBS.values()))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"status": 503, "times": 3}, ""),
        ({"status": 429, "times": 3, "headers": {"Retry-After": "0"}}, ""),
        ({"status": 500, "times": 3}, ""),
        ({"short": 5000, "times": 3}, ""),
        ({"flip": 5000, "times": 2}, ""),
        ({"extra": 5000, "times": 99}, ""),
        ({"pause": (5000, 9.0), "times": 1}, ""),
        ({"ignore_range": True, "cut": 5000, "times": 3}, ""),
        ({"status": 503, "times": 99}, "fails with HTTP 503"),
        ({"status": 429, "times": 99, "headers": {"Retry-After": "0"}}, "the hub limits the rate of requests"),
        ({"status": 429, "times": 1, "headers": {"Retry-After": "4000"}}, "the hub limits the rate of requests"),
        ({"status": 403, "times": 1}, "fails with HTTP 403 on org/name"),
        ({"cut": 0, "times": 99}, "cannot be reached"),
        ({"ignore_range": True, "cut": 5000, "times": 99}, "cannot be reached"),
        ({"flip": 5000, "times": 99}, "came with wrong bytes 3 times; the other files are complete"),
    ],
    ids=str,
)
def test_faults(hub, dsv4, tmp_path, fault, words):
    hub.add("org/name", {"config.json": b"{}", "one.bin": BLOBS["part-0.bin"]})
    hub.fail("storage", **fault)
    folder = tmp_path / "model"
    done = dsv4("download", "org/name", "--local-dir", str(folder))
    assert (done.code, words in done.err) == (6 if words else NO_MODEL, True)
    if words:
        assert "one.bin" not in content(folder)
        assert "→ " in done.err
        hub.faults.clear()
        assert dsv4("download", "org/name", "--local-dir", str(folder)).code == NO_MODEL
    assert content(folder)["one.bin"] == BLOBS["part-0.bin"]


def test_a_small_file_with_wrong_bytes_is_named(hub, dsv4):
    hub.add(REPOSITORY, FLASH)
    hub.fail("config.json", flip=3, times=99)
    done = dsv4("download", "flash")
    assert (done.code, done.out) == (6, "")
    assert "error: config.json came with wrong bytes 3 times" in done.err
    hub.faults.clear()
    hub.sent = 0
    assert dsv4("download", "flash").code == 0
    assert hub.sent == len(FLASH["config.json"])


@pytest.mark.parametrize("seed", [0, *slow(*range(1, 12))])
def test_random_faults_end_in_identical_files(hub, dsv4, tmp_path, seed):
    """Whatever fails, a run that says it is complete is, and running it again gets there."""
    dice = random.Random(seed)
    hub.add("org/name", MIXED)
    kinds = [
        lambda: {"cut": dice.randrange(30_000)},
        lambda: {"short": dice.randrange(20_000)},
        lambda: {"flip": dice.randrange(20_000)},
        lambda: {"status": dice.choice([408, 429, 500, 502, 503, 504])},
        lambda: {"ignore_range": True, "cut": dice.randrange(30_000)},
    ]
    for _ in range(dice.randrange(8, 40)):
        path = dice.choice(["storage", "storage", "resolve", "part-1", "/api/models/org", "long"])
        hub.fail(path, times=dice.randrange(1, 4), **dice.choice(kinds)())
    folder = tmp_path / "model"
    for _ in range(20):
        done = dsv4("download", "org/name", "--local-dir", str(folder), "--max-workers", str(dice.randrange(1, 5)))
        assert done.code in (NO_MODEL, 6)
        for name, held in content(folder).items():
            assert held == MIXED[name]  # a final name never has wrong bytes
        if done.code == NO_MODEL:
            break
    assert content(folder) == MIXED


def test_one_run_takes_one_commit(hub, dsv4, tmp_path):
    """The branch moves after the listing: all files are still those of the commit that was listed."""
    repository = hub.add("org/name", MIXED)
    later = {name: content[::-1] + b"later" for name, content in MIXED.items()}
    hub.on_request = lambda request: "resolve" in request.path and repository.commit(later)
    first = repository.branches["main"]
    folder = tmp_path / "model"
    value = document(dsv4("download", "org/name", "--local-dir", str(folder), "--json"))
    assert (value["commit"], content(folder)) == (first, MIXED)
    hub.on_request = lambda request: None
    value = document(dsv4("download", "org/name", "--local-dir", str(folder), "--json"))
    assert (value["commit"], content(folder)) == (repository.branches["main"], later)


@pytest.mark.parametrize("form", ["option", "name"])
def test_a_revision(hub, dsv4, tmp_path, form):
    repository = hub.add(REPOSITORY, {"config.json": b"old"})
    commit = repository.commit({"config.json": b"new"}, "refs/pr/1")
    arguments = [f"{REPOSITORY}@refs/pr/1"] if form == "name" else [REPOSITORY, "--revision", "refs/pr/1"]
    value = document(dsv4("download", *arguments, "--json"))
    assert (value["commit"], value["revision"]) == (commit, "refs/pr/1")
    assert (cached(tmp_path) / "refs" / "refs" / "pr" / "1").read_text() == commit
    assert (cached(tmp_path) / "snapshots" / commit / "config.json").read_bytes() == b"new"
    assert document(dsv4("download", f"{REPOSITORY}@{commit}", "--json"))["commit"] == commit


@pytest.mark.parametrize(
    ("options", "token", "words"),
    [
        ({}, None, ""),
        ({"private": {"mine"}}, None, "has no repository org/name, or it is private"),
        ({"private": {"mine"}}, "other", "has no repository org/name, or it is private"),
        ({"private": {"mine"}}, "mine", ""),
        ({"gated": {"mine"}}, None, "org/name is gated"),
        ({"gated": {"mine"}}, "other", "org/name is gated"),
        ({"gated": {"mine"}}, "mine", ""),
        ({}, "wrong", "the hub refuses the login for org/name (HTTP 401)"),
    ],
    ids=str,
)
def test_who_may_read(hub, dsv4, tmp_path, options, token, words):
    hub.add("org/name", MIXED, **options)
    if token:
        (tmp_path / "token").write_text(token)
    done = dsv4("download", "org/name")
    assert (done.code, words in done.err) == (6 if words else NO_MODEL, True)
    assert bool(words) == ("hf auth login" in done.err)
    # a token never goes to the storage, which is another host
    assert {request.token for request in hub.asked("storage")} <= {None}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("org/none",), 6, "the hub has no repository org/none"),
        (("flash", "--revision", "none"), 6, f"{REPOSITORY} has no revision none"),
        (("flash", "--layers", "0-5"), 2, "there is no layer 5"),
        (("flash", "--layers", "3-0"), 2, "names no layers"),
        (("flash", "--only", "config,vocabulary"), 2, "there is no kind 'vocabulary'"),
        (("flash", "--only", "config", "--layers", "0"), 2, "--only leaves out"),
        (("org/plain", "--layers", "0"), 2, "can only be downloaded as a whole"),
        (("org/plain", "--only", "weights"), 2, "has no files of the kind weights"),
        (("random:tiny",), 2, "is not a repository on the hub"),
        (("./flash",), 2, "is not a repository on the hub"),
        (("org/a--b",), 2, "is not the name of a repository"),
        (("flash@one", "--revision", "two"), 2, "is not a repository on the hub"),
        (("org/name@one", "--revision", "two"), 2, "specify two revisions"),
        (("org/evil",), 6, "a dangerous name: '../evil.txt'"),
        (("flash", "--local-dir", "/dev/null/model"), 2, "cannot be written"),
    ],
    ids=str,
)
def test_refusals(hub, dsv4, tmp_path, arguments, code, words):
    hub.add(REPOSITORY, FLASH)
    hub.add("org/plain", MIXED)
    hub.add("org/evil", {"../evil.txt": b"evil"})
    done = dsv4("download", *arguments)
    assert (done.code, done.out, words in done.err) == (code, "", True)
    assert not (tmp_path / "hub").exists() or not (cached(tmp_path) / "refs").exists()


@pytest.mark.parametrize("name", ["/etc/a", "a//b", "./a", "a/../../b", "a/.", "..", "a\\..\\b", "a\0b"])
def test_a_name_that_could_lead_elsewhere(hub, dsv4, name):
    hub.add("org/evil", {name: b"evil"})
    done = dsv4("download", "org/evil")
    assert (done.code, "a file with a dangerous name" in done.err) == (6, True)


def test_an_index_that_names_an_absent_file(hub, dsv4):
    hub.add(REPOSITORY, {name: content for name, content in FLASH.items() if name != SHARDS[0]})
    done = dsv4("download", "flash", "--layers", "0")
    assert (done.code, f"names {SHARDS[0]}, which the repository does not contain" in done.err) == (1, True)


def test_an_index_that_is_none_is_named_by_its_repository(hub, dsv4):
    hub.add(REPOSITORY, FLASH | {damage.INDEX: b"{"})
    done = dsv4("download", "flash", "--layers", "0")
    assert done.code == 1
    assert done.err.startswith(f"error: {REPOSITORY}/{damage.INDEX} is not a safetensors index: ")
    assert done.err.endswith(f"→ use another revision, for example {REPOSITORY}@REVISION\n")


def test_offline_says_so(hub, dsv4, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = dsv4("download", "flash")
    assert (done.code, "offline mode" in done.err, "HF_HUB_OFFLINE" in done.err) == (6, True, True)


def offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()


def test_offline_a_full_cache_is_checked(hub, dsv4, tmp_path, monkeypatch):
    commit = hub.add(REPOSITORY, FLASH).branches["main"]
    assert dsv4("download", "flash").code == 0
    offline(hub, monkeypatch)
    done = dsv4("download", "flash")
    assert (done.code, hub.requests) == (0, [])
    assert "huggingface_hub is offline: checking the cached files of " in done.err
    assert done.out.startswith("flash is complete: 8 files, 7.42 MB, every byte verified\n")
    assert done.out.endswith("flash would load: all 432 tensors are present and as expected\n")
    value = document(dsv4("download", "flash", "--revision", commit, "--json"))
    assert (value["offline"], value["commit"], value["complete"]) == (True, commit, True)
    assert {file["outcome"] for file in value["files"]} == {"there"}
    assert dsv4("download", "flash", "--layers", "0-1", "--no-mtp").code == 0
    assert dsv4("download", "flash", "--local-dir", str(tmp_path / "model")).code == 0
    assert (content(tmp_path / "model"), hub.requests) == (FLASH, [])


def test_a_cache_that_cannot_be_written_is_checked(hub, dsv4, tmp_path, monkeypatch):
    branches = hub.add(REPOSITORY, FLASH).branches
    branches["v1"] = branches["main"]
    assert dsv4("download", "flash").code == 0
    offline(hub, monkeypatch)
    written, replace = [], os.replace

    def refuse(source, target):
        if not target.is_relative_to(cached(tmp_path)):
            return replace(source, target)
        written.append(target)
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(target))

    monkeypatch.setattr(os, "replace", refuse)
    done = dsv4("download", "flash")
    assert (done.code, written) == (0, []), done.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    done = dsv4("download", "flash", "--revision", "v1")
    assert (done.code, "cannot be written: Read-only file system" in done.err) == (2, True), done.err


def test_offline_what_is_wrong_or_absent_in_the_cache_is_named(hub, dsv4, tmp_path, monkeypatch):
    commit = hub.add(REPOSITORY, FLASH).branches["main"]
    assert dsv4("download", "flash", "--layers", "0-1", "--no-mtp").code == 0
    offline(hub, monkeypatch)
    done = dsv4("download", "flash")
    assert (done.code, done.out) == (6, "")
    assert f"huggingface_hub is offline, and the cache lacks {SHARDS[1]}" in done.err
    assert dsv4("download", "flash", "--layers", "0-1", "--no-mtp").code == 0
    shard = cached(tmp_path) / "snapshots" / commit / SHARDS[0]
    shard.resolve().write_bytes(b"x" * len(FLASH[SHARDS[0]]))
    done = dsv4("download", "flash", "--layers", "0-1", "--no-mtp")
    assert (done.code, f"{SHARDS[0]} is damaged" in done.err, hub.requests) == (6, True, [])
    assert "offline" in done.err
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert dsv4("download", "flash").code == 0


def test_offline_configurations_alone_are_no_model(hub, dsv4, monkeypatch):
    hub.add(REPOSITORY, FLASH)
    assert dsv4("download", "flash", "--only", "config,index").code == 0
    offline(hub, monkeypatch)
    assert dsv4("download", "flash", "--only", "config,index").code == 0
    assert (dsv4("download", "flash").code, dsv4("download", "pro").code) == (6, 6)


def test_no_hub_at_all(hub, dsv4, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    done = dsv4("download", "flash")
    assert (done.code, "http://127.0.0.1:9 cannot be reached: ConnectError" in done.err) == (6, True)
    assert "HF_ENDPOINT" in done.err


def test_storage_that_cannot_be_reached_is_not_called_the_hub(hub, dsv4, monkeypatch):
    hub.add(REPOSITORY, FLASH)
    monkeypatch.setattr(HubServer, "storage", "http://localhost:9/storage")
    done = dsv4("download", "flash")
    assert (done.code, done.out) == (6, "")
    assert "error: the hub's storage http://localhost:9 cannot be reached: ConnectError" in done.err
    assert "let it through" in done.err
    monkeypatch.undo()


@pytest.mark.parametrize("fault", [{"status": 503}, *slow({"cut": 500})], ids=str)
def test_storage_that_fails_is_named(hub, dsv4, fault):
    hub.add(REPOSITORY, FLASH)
    hub.fail("storage", times=99, **fault)
    assert f"the hub's storage {hub.storage.removesuffix('/storage')} " in dsv4("download", "flash").err


def test_a_failure_that_is_tried_again_is_told_with_its_reason_and_the_wait(hub, dsv4, monkeypatch):
    hub.add(REPOSITORY, FLASH)
    hub.fail("storage", status=503, times=2)
    done = dsv4("download", "flash", "--max-workers", "1")
    assert done.code == 0
    told = [line for line in done.err.splitlines() if "HTTP 503" in line]
    assert [line.partition("; ")[2] for line in told] == ["try 2 of 6 in 0.001 s", "try 3 of 6 in 0.002 s"]
    hub.fail("api/models", status=503)
    assert "the hub fails with HTTP 503" in dsv4("download", "flash").err
    hub.fail("api/models", status=503)
    assert document(dsv4("download", "flash", "--json"))["complete"]


def test_another_server_at_the_endpoint(hub, dsv4):
    hub.add(REPOSITORY, FLASH)
    hub.fail("/api/models", status=200, times=99)
    done = dsv4("download", "flash")
    assert (done.code, "does not answer as a hub does" in done.err) == (6, True)


def test_what_the_cache_has_is_copied_into_a_folder(hub, dsv4, tmp_path):
    hub.add(REPOSITORY, FLASH)
    assert dsv4("download", "flash").code == 0
    hub.sent = 0
    folder = tmp_path / "model"
    assert dsv4("download", "flash", "--local-dir", str(folder)).code == 0
    assert (content(folder), hub.sent) == (FLASH, 0)
    # not by trust
    (folder / SHARDS[0]).unlink()
    shard = cached(tmp_path) / "blobs" / sha256(FLASH[SHARDS[0]])
    shard.write_bytes(b"x" * len(FLASH[SHARDS[0]]))
    assert dsv4("download", "flash", "--local-dir", str(folder)).code == 0
    assert (content(folder), hub.sent) == (FLASH, len(FLASH[SHARDS[0]]))


@pytest.mark.slow
def test_killed_at_random_points_it_continues(hub, tmp_path):
    hub.add("org/name", BLOBS)
    hub.pace = 0.004  # 118 kB in 29 pieces
    folder = tmp_path / "model"
    command = [sys.executable, "-m", "dsv4cli", "download", "org/name", "--local-dir", str(folder), "--json"]
    setting = {**os.environ, **environment(hub, tmp_path)}
    for killed_at in (9_000, 45_000, 90_000):
        running = subprocess.Popen([*command, "--max-workers", "2"], cwd=ROOT, env=setting)
        while hub.sent < killed_at and running.poll() is None:
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        assert running.wait() == -signal.SIGKILL
        assert all(held == BLOBS[name] for name, held in content(folder).items())
    hub.pace = 0
    command[1:3] = ["-c", IMPORTS_NO_TORCH]
    done = subprocess.run(command, cwd=ROOT, env=setting, capture_output=True, text=True)
    assert (done.returncode, done.stderr, content(folder)) == (NO_MODEL, "", BLOBS)
    assert any(request.begin for request in hub.asked("storage"))
    # what a killed run had not written yet comes twice, no more
    assert hub.sent < 1.5 * sum(map(len, BLOBS.values()))


def test_interrupted_it_says_how_to_continue(hub, tmp_path):
    hub.add("org/name", BLOBS)
    hub.pace = 0.01
    running = subprocess.Popen(
        [sys.executable, "-m", "dsv4cli", "download", "org/name"],
        cwd=ROOT,
        env={**os.environ, **environment(hub, tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    )
    while hub.sent < 9_000 and running.poll() is None:
        time.sleep(0.001)
    running.send_signal(signal.SIGINT)
    _, said = running.communicate(timeout=10)
    assert (running.returncode, "→ run the same command again to continue" in said) == (130, True)
    assert "Traceback" not in said


def test_its_help():
    done = inside("download", "--help")
    assert done.exit_code == 0
    for words in (
        "--layers",
        "--no-mtp",
        "--only",
        "--local-dir",
        "--dry-run",
        "--max-workers",
        "6 network",
        "Examples",
    ):
        assert words in done.stdout
