"""What a user may name as a model; the Hugging Face cache is a folder made here."""

import re
import socket
from pathlib import Path

import pytest

from dsv4cli.engine.checkpoint.names import ALIASES
from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource, resolve_model
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.inspection.sources import resolve_inspectable
from dsv4cli.errors import CheckpointError, ModelNotFound, UsageError
from tests.support.damage import GOLDEN

COMMIT = "60d8d70770c6776ff598c94bb586a859a38244f1"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and no network."""
    from huggingface_hub import constants

    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("the network was used"))
    return folder


def fill(cache: Path, repository: str) -> Path:
    store = cache / f"models--{repository.replace('/', '--')}"
    snapshot = store / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text(COMMIT)
    return snapshot


def test_a_folder_is_itself():
    assert resolve_model(str(GOLDEN / "tiny-pro")) == FolderSource(str(GOLDEN / "tiny-pro"), GOLDEN / "tiny-pro")


def test_a_folder_in_the_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "flash").mkdir()
    assert resolve_model("~/flash") == FolderSource("~/flash", tmp_path / "flash")


@pytest.mark.parametrize("text", [*ALIASES, *ALIASES.values(), f"deepseek-ai/DeepSeek-V4-Pro@{COMMIT}"])
def test_a_cached_repository_is_found(cache, text):
    repository = ALIASES.get(text, text.partition("@")[0])
    snapshot = fill(cache, repository)
    assert resolve_model(text) == FolderSource(text, snapshot)


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("flash", "dsv4 download flash"),
        ("flash-0731", "dsv4 download flash-0731"),
        ("someone/else@v2", "dsv4 download someone/else@v2"),
    ],
)
def test_what_is_not_in_the_cache_is_told_how_to_fetch(text, command):
    with pytest.raises(ModelNotFound, match="not in the Hugging Face cache") as caught:
        resolve_model(text)
    assert f"`{command}`" in caught.value.remedy


@pytest.mark.parametrize("text", ["./nothing", "/nothing/at/all", "~/nothing", "a/b/c", "~nobody/x"])
def test_a_path_to_nothing_is_not_found(text):
    with pytest.raises(ModelNotFound, match=f"there is no folder {text}"):
        resolve_model(text)


@pytest.mark.parametrize(
    "text",
    [
        "model.gguf",
        "model-00002-of-00003.gguf",
        "Model.GGUF",
        "model.safetensors",
        "model.safetensors.index.json",
        "here/model.gguf",
        "here/model.safetensors",
        "./model.gguf",
        "~/model.safetensors",
        "here/a/b.gguf",
        "ä.gguf",
        "a\0b.gguf",
        "x" * 300 + ".gguf",
    ],
)
def test_a_file_that_does_not_exist(text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    for resolve in (resolve_model, resolve_inspectable):
        with pytest.raises(ModelNotFound, match=f"^there is no file {re.escape(text)}$") as caught:
            resolve(text)
        assert "check the path, or use a known model: nano" in caught.value.remedy


def test_the_files_next_to_a_missing_one_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 3):
        (tmp_path / f"x-{number:05}-of-00003.gguf").touch()
    (tmp_path / "other.json").touch()
    with pytest.raises(ModelNotFound, match=r"there is no file x-00002-of-00003\.gguf") as caught:
        resolve_model("x-00002-of-00003.gguf")
    assert caught.value.remedy == "check the name: its folder has x-00001-of-00003.gguf, x-00003-of-00003.gguf"
    for name in "ab":
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(ModelNotFound) as caught:
        resolve_model(str(tmp_path / "y.gguf"))
    assert caught.value.remedy.endswith(" has a.gguf, b.gguf, x-00001-of-00003.gguf and 1 more")


def test_a_repository_may_be_named_as_a_file_is(cache):
    with pytest.raises(ModelNotFound, match=r"not in the Hugging Face cache and there is no file some/model\.gguf"):
        resolve_model("some/model.gguf")
    snapshot = fill(cache, "some/model.gguf")
    assert resolve_model("some/model.gguf") == FolderSource("some/model.gguf", snapshot)


@pytest.mark.parametrize("text", ["", " ", "nothing", "a b", "flash,layers=3", "a\0b", "x" * 300, "é/b", "a--b/c..d"])
def test_what_cannot_be_a_model_is_refused(text):
    with pytest.raises((UsageError, ModelNotFound)) as caught:
        resolve_model(text)
    assert "flash" in caught.value.remedy


def test_a_file_is_not_a_folder(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UsageError, match="is a file") as caught:
        resolve_model(str(tmp_path / "model.safetensors"))
    assert str(tmp_path) in caught.value.remedy
    (tmp_path / "model.gguf").write_bytes(b"")
    source = resolve_model(str(tmp_path / "model.gguf"))
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a GGUF file"):
        _ = source.identity


@pytest.mark.parametrize("name", PRESETS)
def test_random_weights_have_the_shapes_of_the_preset(name):
    source = resolve_model(f"random:{name}")
    assert source == RandomSource(f"random:{name}", parse_config(PRESETS[name], name), 0)


def test_random_weights_can_be_cut_down():
    source = resolve_model("random:flash-0731,layers=4,experts=16,seed=7")
    assert isinstance(source, RandomSource)
    assert (source.config.layer_ratios, source.config.n_routed_experts, source.seed) == ((0, 0, 4, 128), 16, 7)
    assert (source.config.drafter, source.config.draft_stages) == ("dspark", 3)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("random:", "no preset ''"),
        ("random:huge", "no preset 'huge'"),
        ("random:flash,", "invalid part ''"),
        ("random:flash,layers", "invalid part 'layers'"),
        ("random:flash,layers=", "invalid part 'layers='"),
        ("random:flash,layers=four", "invalid part 'layers=four'"),
        ("random:flash,layers=-1", "invalid part 'layers=-1'"),
        ("random:flash,layers=٣", "invalid part 'layers=٣'"),
        ("random:flash,layers=2,layers=3", "invalid part 'layers=3'"),
        ("random:flash,width=2", "invalid part 'width=2'"),
        ("random:flash layers=2", "no preset 'flash layers=2'"),
        ("random:flash,layers=0", "layers=0 is out of range"),
        ("random:flash,layers=44", "layers=44 is out of range"),
        ("random:flash,experts=5", "experts=5 is out of range"),
        ("random:pro,experts=385", "experts=385 is out of range"),
        ("random:tiny,seed=9223372036854775808", "out of range"),
    ],
)
def test_a_wrong_part_is_named_with_what_is_allowed(text, words):
    with pytest.raises(UsageError, match=words) as caught:
        resolve_model(text)
    assert "random:PRESET[,layers=N]" in caught.value.remedy or " from " in caught.value.remedy
