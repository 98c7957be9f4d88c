"""`dsv4 inspect --template`, and the same template in what `dsv4 convert` writes."""

import json
import shutil

import pytest

from dsv4cli.engine.checkpoint.gguf.header import read_gguf
from dsv4cli.engine.text.chat_template import chat_template
from tests.support.conversions import convert, run

NANO = "dsv4cli/nano"


def section(*arguments):
    code, out, err = run("inspect", *arguments, "--template", "--json")
    assert (code, err) == (0, "")
    return json.loads(out)["template"]


@pytest.mark.parametrize(("model", "release"), [("nano", "v4"), ("nano-0731", "0731"), ("random:tiny", "v4")])
def test_it_prints_the_template_of_the_release_and_nothing_else(model, release):
    code, out, err = run("inspect", model, "--template")
    assert (code, out, err) == (0, chat_template(release), "")
    assert section(model) == {"release": release, "text": out, "own": None}


def test_a_model_without_configuration_has_none(tmp_path):
    shutil.copy(f"{NANO}/model.safetensors", tmp_path)
    code, out, err = run("inspect", tmp_path / "model.safetensors", "--template")
    assert code != 0
    assert "macro" not in out
    assert "config.json" in out + err


def test_a_damaged_model_still_has_one(tmp_path):
    shutil.copytree(NANO, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"n_routed_experts": values["n_routed_experts"] + 1}))
    assert run("inspect", tmp_path)[0] == 3
    code, out, err = run("inspect", tmp_path, "--template")
    assert (code, out, err) == (0, chat_template("v4"), "")


def test_a_template_of_the_models_own_is_noted_and_kept(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(NANO, source)
    (source / "chat_template.jinja").write_text("mine")
    code, out, err = run("inspect", source, "--template")
    assert (code, out) == (0, chat_template("v4"))
    assert err == f"note: {source} has a chat template of its own, which differs from this one\n"
    assert run("inspect", source, "--template", "--quiet")[2] == ""
    assert section(source)["own"] == "different"
    convert(source, tmp_path / "out", "--to", "transformers", "--verify", "off")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "mine"


def test_conversions_have_the_template(tmp_path):
    convert("nano-0731", tmp_path / "a", "--to", "transformers", "--verify", "off")
    assert (tmp_path / "a" / "chat_template.jinja").read_text(encoding="utf-8") == chat_template("0731")
    assert section(tmp_path / "a")["own"] == "equal"
    convert(NANO, tmp_path / "b", "--to", "gguf", "--verify", "off")
    [file] = (tmp_path / "b").glob("*.gguf")
    assert read_gguf(file).metadata["tokenizer.chat_template"] == chat_template("v4")
    assert section(file)["own"] == "equal"
    # the official encoder goes with the official layout
    convert(tmp_path / "b", tmp_path / "c", "--to", "official", "--verify", "off")
    assert not (tmp_path / "c" / "chat_template.jinja").exists()


def test_settings_with_a_template_need_no_file(tmp_path):
    source = tmp_path / "source"
    shutil.copytree(NANO, source)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "mine"}))
    convert(source, tmp_path / "out", "--to", "transformers", "--verify", "off")
    assert not (tmp_path / "out" / "chat_template.jinja").exists()
