"""GGUF models on the hub: listed, and inspected one at a time, from their headers alone."""

import functools
import json
import struct
import tempfile

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import close_session

from dsv4cli.engine.hub import gguf, retry
from tests.support.gguf_models import DS4, LLAMA, write_nano
from tests.support.hub_server import HubServer, point_at

NAME = "org/nano-GGUF"
LIST = f"write it as {NAME}:NAME with NAME one of IQ2_XXS, Q4_K_M"
Q4, Q2 = ["Q4_K_M/nano-Q4_K_M-00001-of-00003.gguf"], "nano-IQ2_XXS.gguf"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The server, in front of an empty cache; failures cost milliseconds."""
    server = HubServer()
    point_at(server, tmp_path / "home", monkeypatch)
    hasty = functools.partial(retry.RetryPolicy, first_wait=0.002, longest_wait=0.01, stall=0.4)
    monkeypatch.setattr(retry, "RetryPolicy", hasty)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield server
    close_session()
    server.close()


def two_models(folder) -> dict[str, bytes]:
    """A split model in a folder of its own, and one file, as unsloth has them; with a drafter's file."""
    first, _ = write_nano(folder / "q4", LLAMA, parts=3)
    split = {path.name.replace("nano-", "Q4_K_M/nano-Q4_K_M-"): path.read_bytes() for path in first.parent.iterdir()}
    whole, _ = write_nano(folder / "q2", DS4)
    return split | {Q2: whole.read_bytes(), "nano-DSpark.gguf": b"GGUF", "README.md": b"# nano"}


def test_models_are_listed_by_their_headers(hub, dsv4, tmp_path):
    files = two_models(tmp_path)
    hub.add(NAME, files)
    done = dsv4("inspect", NAME)
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0] == f"{NAME} has 2 GGUF models"
    # the smaller one first
    assert lines[3].split()[:2] == ["IQ2_XXS", "1"]
    assert "IQ2_XXS, Q2_K" in lines[3]
    assert lines[4].split()[:2] == ["Q4_K_M", "3"]
    assert "Q4_K, Q6_K" in lines[4]
    assert done.err.endswith(f"→ dsv4 inspect {NAME}:IQ2_XXS --fit\n→ dsv4 run -m {NAME}:IQ2_XXS 'What is 17 + 25?'\n")
    found = json.loads(dsv4("inspect", NAME, "--json").out)
    assert (found["schema"], found["repository"]) == ("dsv4.variants/1", NAME)
    two, four = found["variants"]
    assert two["nbytes"] == len(files[Q2])
    assert four["nbytes"] == sum(len(content) for name, content in files.items() if name.startswith("Q4_K_M/"))
    assert four["files"][0] == Q4[0]
    # all weights are on the GPU, and more
    assert two["needed"] > sum(two["experts"].values()) + sum(two["others"].values()) > 0
    assert (two["problem"], two["drafter"]) == (None, False)


def test_only_headers_come_over_the_network(hub, dsv4, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "FIRST", 4096)
    files = two_models(tmp_path)
    hub.add(NAME, files)
    assert dsv4("inspect", NAME).code == 0
    # the vocabulary is in the header of the first file of each; requests grow
    assert hub.sent < sum(map(len, files.values())) / 2
    assert len(hub.asked("api/models")) == 1
    assert max(request.begin for request in hub.asked("storage")) > 0
    assert not (tmp_path / "home" / "hub").exists()


def test_one_model_is_described_as_if_it_were_here(hub, dsv4, tmp_path):
    hub.add(NAME, two_models(tmp_path))
    there = json.loads(dsv4("inspect", f"{NAME}:q4_k_m", "--json").out)
    here = json.loads(dsv4("inspect", str(tmp_path / "q4" / "nano-00001-of-00003.gguf"), "--json").out)
    assert there["loads"] is True
    for key in ("identity", "sizes", "notes"):
        assert there[key] == here[key], key
    assert there["coverage"] == here["coverage"] | {"folder": f"{NAME}/{Q4[0]}"}
    assert there["gguf"]["files"][0] == "nano-Q4_K_M-00001-of-00003.gguf"
    assert there["gguf"]["metadata"] == here["gguf"]["metadata"]
    fits = dsv4("inspect", f"{NAME}:Q4_K_M", "--fit", "--gpus", "1x24GB")
    assert fits.code == 0
    assert f"dsv4 run --model {NAME}:Q4_K_M " in fits.out


@pytest.mark.parametrize(
    ("consumer", "command"),
    [
        ("llama.cpp", f"→ llama-server -hf {NAME}:IQ2_XXS\n"),
        ("dsv4", f"→ dsv4 run --model {NAME}:IQ2_XXS 'What is 17 + 25?'\n"),
    ],
)
def test_a_program_gets_the_model_by_its_name(hub, dsv4, tmp_path, consumer, command):
    hub.add(NAME, two_models(tmp_path))
    done = dsv4("inspect", f"{NAME}:IQ2_XXS", "--for", consumer)
    assert done.code == 0
    assert command in done.out


def test_a_repository_with_one_model_needs_no_name(hub, dsv4, tmp_path):
    path, _ = write_nano(tmp_path / "q2", DS4)
    hub.add(NAME, {"deep/nano-Q2_K.gguf": path.read_bytes(), "config.json": b"{}", "mmproj-nano-F16.gguf": b"GGUF"})
    done = dsv4("inspect", NAME)
    assert done.code == 0
    assert done.out.startswith(f"{NAME} would load: all ")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([f"{NAME}:Q8_0"], f"error: 'Q8_0' names no GGUF model of {NAME}\n→ {LIST}\n"),
        ([NAME, "--fit"], f"error: {NAME} has 2 GGUF models\n→ {LIST}\n"),
        ([NAME, "--for", "llama.cpp"], f"error: {NAME} has 2 GGUF models\n→ {LIST}\n"),
    ],
)
def test_a_choice_that_is_none_is_refused(hub, dsv4, tmp_path, words, problem):
    hub.add(NAME, dict.fromkeys([*Q4, Q4[0].replace("1-", "2-"), Q4[0].replace("1-", "3-"), Q2], b"GGUF"))
    done = dsv4("inspect", *words)
    assert done.code == 2
    assert done.err.endswith(problem)


def test_a_damaged_model_is_named_in_the_list(hub, dsv4, tmp_path):
    path, _ = write_nano(tmp_path / "q2", DS4)
    content = path.read_bytes()
    tensors = struct.pack("<Q", 1 << 40)
    files = {
        "nano-IQ2_XXS.gguf": content,
        "nano-Q3_K.gguf": content[:-1],
        "nano-Q4_K.gguf": content[:8] + tensors + content[16:],
        "nano-Q5_K.gguf": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "nano-Q6_K-00001-of-00002.gguf": content,
    }
    hub.add(NAME, files)
    done = dsv4("inspect", NAME)
    assert done.code == 0
    assert "Q3_K: org/nano-GGUF/nano-Q3_K.gguf is truncated" in done.out
    assert "Q4_K: org/nano-GGUF/nano-Q4_K.gguf has a corrupt header" in done.out
    assert "Q5_K: org/nano-GGUF/nano-Q5_K.gguf is a git-lfs pointer" in done.out
    assert "Q6_K: org/nano-GGUF/nano-Q6_K-00002-of-00002.gguf is missing" in done.out
    assert done.out.count("does not run") == 4
    assert json.loads(dsv4("inspect", f"{NAME}:Q3_K", "--json").out)["problem"]["kind"] == "damaged"


def test_connections_that_break_are_tried_again(hub, dsv4, tmp_path):
    path, _ = write_nano(tmp_path / "q2", DS4)
    hub.add(NAME, {Q2: path.read_bytes()})
    for fault in ({"status": 503}, {"cut": 500}, {"ignore_range": True}):
        hub.fail("storage", **fault)
    assert dsv4("inspect", NAME).code == 0


def test_offline_nothing_is_asked(hub, dsv4, monkeypatch):
    hub.add(NAME, {Q2: b"GGUF"})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    done = dsv4("inspect", f"{NAME}:IQ2_XXS")
    assert (done.code, hub.requests) == (1, [])
    assert "is not in the Hugging Face cache" in done.err
