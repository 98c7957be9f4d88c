"""`dsv4 download org/name:NAME`: one GGUF model of a repository, with all its files and nothing else; and its users."""

import functools
import json
import shlex
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from dsv4cli.engine.hub import retry
from tests.commands.run.test_gguf import ANSWER, EXACT, QUESTION
from tests.support.gguf_models import write_nano
from tests.support.hub_server import HubServer, point_at

NAME = "org/nano-GGUF"
LIST = f"write it as {NAME}:NAME with NAME one of Q3_K_M, UD-Q4_K_XL"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, in front of an empty cache; failures cost milliseconds."""
    server = HubServer()
    point_at(server, tmp_path, monkeypatch)
    hasty = functools.partial(retry.RetryPolicy, first_wait=0.001, longest_wait=0.004, stall=0.4)
    monkeypatch.setattr(retry, "RetryPolicy", hasty)
    yield server
    close_session()
    server.close()


@pytest.fixture
def files(tmp_path) -> dict[str, bytes]:
    """A split model that answers, another that is no model, and what else such repositories hold."""
    first, _ = write_nano(tmp_path / "made", EXACT, parts=2)
    split = {
        path.name.replace("nano-", "UD-Q4_K_XL/nano-UD-Q4_K_XL-"): path.read_bytes() for path in first.parent.iterdir()
    }
    return split | {"nano-Q3_K_M.gguf": b"GGUF" * 50, "README.md": b"# nano", "imatrix_unsloth.gguf": b"GGUF"}


def cached(tmp_path: Path) -> set[str]:
    """What the snapshots of the cache hold."""
    root = tmp_path / "hub" / f"models--{NAME.replace('/', '--')}" / "snapshots"
    return {path.relative_to(root).as_posix().split("/", 1)[1] for path in root.rglob("*.*") if path.is_file()}


def test_all_files_of_one_model_come_and_no_others(hub, dsv4, tmp_path, files, monkeypatch):
    hub.add(NAME, files)
    done = dsv4("download", f"{NAME}:q4_k_xl", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    split = [name for name in files if name.startswith("UD-Q4_K_XL/")]
    assert (found["variant"], found["complete"]) == ("UD-Q4_K_XL", True)
    assert [file["name"] for file in found["files"]] == split
    assert found["verdict"]["sound"] is True
    assert cached(tmp_path) == {*split}
    # as `run`, offline
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    done = dsv4("run", QUESTION, "-m", f"{NAME}:UD-Q4_K_XL", "--temperature", "0", "--max-tokens", "16")
    assert (done.code, done.out, hub.requests) == (0, ANSWER, [])
    # the only one here needs no name
    assert dsv4("inspect", NAME).out.startswith(f"{NAME} would load: all ")
    # its files are verified again
    again = json.loads(dsv4("download", f"{NAME}:UD-Q4_K_XL", "--json").out)
    assert {file["outcome"] for file in again["files"]} == {"there"}


def test_a_model_that_is_not_here_is_downloaded_to_run(hub, dsv4, tmp_path, files):
    repository = hub.add(NAME, {"README.md": b""})
    repository.commit(files, branch="v2")
    done = dsv4("run", QUESTION, "-m", f"{NAME}@v2:UD-Q4_K_XL", "--temperature", "0", "--max-tokens", "16")
    assert (done.code, done.out) == (0, ANSWER)
    assert f"{NAME}@v2:UD-Q4_K_XL is not in the Hugging Face cache: downloading 2 files, " in done.err
    hub.sent = 0
    done = dsv4("run", QUESTION, "-m", f"{NAME}@v2:ud-q4_k_xl", "--temperature", "0", "--max-tokens", "1")
    assert (done.code, hub.sent) == (0, 0)
    assert "downloading" not in done.err


def test_a_revision_is_kept_in_the_name(hub, dsv4, files):
    repository = hub.add(NAME, {"README.md": b""})
    commit = repository.commit(files, branch="v2")
    done = dsv4("download", f"{NAME}:UD-Q4_K_XL", "--revision", "v2")
    assert done.code == 0
    assert done.err.endswith(f"→ dsv4 inspect {NAME}@v2:UD-Q4_K_XL\n")
    assert dsv4("inspect", f"{NAME}@v2:UD-Q4_K_XL").code == 0
    assert dsv4("inspect", f"{NAME}@{commit}:q4_k_xl").code == 0


def test_a_folder_gets_the_files_under_their_names(hub, dsv4, tmp_path, files):
    hub.add(NAME, files)
    done = dsv4("download", f"{NAME}:UD-Q4_K_XL", "--local-dir", str(tmp_path / "mine"))
    assert done.code == 0
    assert done.err.startswith("UD-Q4_K_XL: 2 files, ")
    assert "left out" not in done.out
    command = shlex.split(done.err.splitlines()[-1].removeprefix("→ dsv4 "))
    assert command == ["inspect", str(tmp_path / "mine" / "UD-Q4_K_XL" / "nano-UD-Q4_K_XL-00001-of-00002.gguf")]
    assert dsv4(*command).code == 0


@pytest.mark.parametrize(
    ("words", "code", "problem"),
    [
        (["download", NAME], 2, f"{NAME} has 2 GGUF models\n→ {LIST}; `dsv4 download {NAME} --only other` "),
        (["download", f"{NAME}:Q9"], 2, f"'Q9' names no GGUF model of {NAME}\n→ {LIST}\n"),
        (["download", f"{NAME}:Q3_K_M", "--layers", "0-1"], 2, "do not select parts of a GGUF model"),
        (["download", f"{NAME}:Q3_K_M", "--only", "config"], 2, f"remove them, or use {NAME}\n"),
        (["run", "hi", "-m", f"{NAME}:Q9"], 2, f"'Q9' names no GGUF model of {NAME}\n→ {LIST}\n"),
        (["run", "hi", "-m", NAME], 1, f"fetch it with `dsv4 download {NAME}`"),
        (["run", "hi", "-m", "org/none:Q9"], 6, "no repository org/none"),
        (["convert", f"{NAME}:Q3_K_M", "OUT", "--to", "bf16"], 1, f"fetch it with `dsv4 download {NAME}:Q3_K_M`"),
    ],
)  # fmt: skip
def test_refusals(hub, dsv4, files, words, code, problem):
    hub.add(NAME, files)
    done = dsv4(*words)
    assert (done.code, done.out) == (code, "")
    assert problem in done.err


def test_a_model_without_all_its_files_is_refused(hub, dsv4, files):
    lost = next(name for name in files if "-00001-" in name)
    hub.add(NAME, {name: content for name, content in files.items() if name != lost})
    done = dsv4("download", f"{NAME}:UD-Q4_K_XL")
    assert done.code == 1
    assert f"{NAME} lacks {lost} of UD-Q4_K_XL" in done.err


def test_offline_only_what_is_here_is_found(hub, dsv4, tmp_path, files, monkeypatch):
    hub.add(NAME, files)
    for name in ("nano-Q3_K_M", "UD-Q4_K_XL"):
        dsv4("download", f"{NAME}:{name}")
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = dsv4("inspect", NAME)
    assert done.code == 2
    assert f"{NAME} has 2 GGUF models in the Hugging Face cache\n→ {LIST}" in done.err
    done = dsv4("run", "hi", "-m", f"{NAME}:Q8_0")
    assert done.code == 6
    assert f"offline mode, and {NAME}:Q8_0 is not completely in its cache" in done.err
    assert hub.requests == []
    # a part that is lost makes the model incomplete
    next(tmp_path.glob("hub/*/snapshots/*/UD-Q4_K_XL/*-00002-*")).unlink()
    done = dsv4("profile", "kernels", "--model", f"{NAME}:UD-Q4_K_XL", "--device", "cpu")
    assert f"{NAME}:UD-Q4_K_XL is not complete in the Hugging Face cache, which has Q3_K_M\n" in done.err


def test_an_interrupted_download_says_how_to_go_on(hub, dsv4, files, monkeypatch):
    hub.add(NAME, files)

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("dsv4cli.engine.hub.job.carry_out", interrupt)
    done = dsv4("run", "hi", "-m", f"{NAME}:UD-Q4_K_XL")
    assert done.code == 130
    assert "→ run the same command again to continue the download\n" in done.err


def test_a_whole_repository_can_still_be_had(hub, dsv4, tmp_path, files):
    hub.add(NAME, files)
    done = dsv4("download", NAME, "--only", "other")
    assert cached(tmp_path) == {*files}
    assert done.code == 0
