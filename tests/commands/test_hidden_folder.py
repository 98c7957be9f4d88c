"""Folders that have the name of a known model: how commands name them, and that they say so."""

import shutil
from pathlib import Path

import pytest
from huggingface_hub import constants

from dsv4cli.commands.convert.join import next_step
from dsv4cli.engine.checkpoint.names import ALIASES, IN_PACKAGE, folder_word, hidden_folder
from dsv4cli.engine.checkpoint.remedies import look
from tests.support import damage

LINE = "nano means the known model; to use the folder of that name, write ./nano"


@pytest.fixture
def dsv4(dsv4, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return dsv4


@pytest.mark.parametrize("name", [*ALIASES, *IN_PACKAGE, "random:tiny"])
def test_a_folder_with_the_name_of_a_model_is_named_with_a_path(name):
    word = f"./{name}"
    assert folder_word(Path(name)) == folder_word(Path(word)) == word
    assert look(Path(name), "--tree") == f"`dsv4 inspect {word} --tree`"
    for target in ("official", "nvfp4", "gguf"):
        step = next_step(Path(name), target)
        assert f"`dsv4 inspect {word}" in step
        assert (f"`dsv4 run --model {word}`" in step) is (target != "official")


@pytest.mark.parametrize(
    ("name", "word"), [("OUT", "OUT"), ("a/nano", "a/nano"), ("/nano", "/nano"), ("~x", "'./~x'"), ("a b", "'a b'")]
)
def test_other_folders_are_named_as_they_are(name, word):
    assert folder_word(Path(name)) == word


def test_a_folder_hides_behind_a_known_name_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("nano", "flash", "mine"):
        (tmp_path / name).mkdir()
    found = [hidden_folder(name) for name in ("nano", "flash", "pro", "mine", "./nano")]
    assert found == ["./nano", "./flash", "", "", ""]


def test_what_convert_writes_can_be_inspected_as_it_says(dsv4):
    done = dsv4("convert", "nano", "nano", "--to", "official", "--verify", "off")
    assert done.code == 0
    assert done.err.endswith("→ look at it with `dsv4 inspect ./nano`\n")
    built_in, written = dsv4("inspect", "nano"), dsv4("inspect", "./nano")
    assert built_in.err == LINE + "\n"
    assert written.err == ""
    assert "\nfolder " not in written.out
    again = dsv4("convert", "nano", "other", "--to", "bf16", "--dry-run")
    assert LINE in again.err.splitlines()
    run = dsv4("run", "hi", "--max-tokens", "1", "--model", "nano")
    assert LINE in run.err.splitlines()


def test_an_alias_whose_model_is_not_here_does_not_hide_the_folder(dsv4):
    Path("flash").mkdir()
    for command in (("inspect", "flash"), ("run", "hi", "--model", "flash")):
        done = dsv4(*command)
        assert done.code != 0
        assert "→ fetch it with `dsv4 download flash`, or write the folder here as ./flash\n" in done.err


def test_remedies_for_a_broken_folder_name_it(dsv4):
    copy = damage.copy_checkpoint(Path("flash"))
    shutil.move(copy, "nano")
    damage.drop_tensor(Path("nano"), damage.WEIGHT)
    Path("ids.jsonl").write_text('{"ids": [5, 6]}')
    done = dsv4("run", "--score", "ids.jsonl", "--model", "./nano")
    assert "`dsv4 inspect ./nano` shows all that is wrong" in done.err
