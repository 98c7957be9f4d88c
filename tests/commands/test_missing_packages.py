"""What `python3 -m dsv4cli` says where the Python is too old, or a package is missing: a sentence, not a traceback."""

import sys

import pytest

from dsv4cli import __main__ as entry
from dsv4cli.errors import missing_package

REMEDY = "→ in a clone of dsv4, `make run` installs all packages into .venv; then use .venv/bin/dsv4\n"


def test_a_package_that_a_command_imports_is_named(dsv4, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    done = dsv4("run", "hi", "--show-prompt")
    words = f"error: dsv4 needs the package tokenizers, which is not installed for {sys.executable}\n"
    assert (done.code, done.out, done.err) == (1, "", words + REMEDY)


def test_a_package_that_the_program_imports_is_named(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "dsv4cli.cli")
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as left:
        entry._carry_out()
    words = f"error: dsv4 needs the package typer, which is not installed for {sys.executable}\n"
    assert (left.value.code, capsys.readouterr().err) == (1, words + REMEDY)


def test_an_older_python_is_refused_before_it_meets_newer_code(monkeypatch):
    monkeypatch.setattr(entry, "OLDEST", (99, 1))
    with pytest.raises(SystemExit, match=r"dsv4 needs Python 99\.1 or newer"):
        entry._carry_out()


@pytest.mark.parametrize("name", [None, "dsv4cli.engine.nothing", "json.nothing"])
def test_a_module_of_our_own_or_of_python_is_a_bug(name):
    assert missing_package(ModuleNotFoundError("it is missing", name=name)) is None
