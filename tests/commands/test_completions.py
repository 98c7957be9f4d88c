"""The committed completion scripts are the ones that the program prints; `make style` regenerates them."""

from pathlib import Path

import pytest
import typer.testing

from dsv4cli import cli

ROOT = Path(__file__).resolve().parents[2]
FILES = {"bash": "dsv4.bash", "zsh": "_dsv4", "fish": "dsv4.fish"}


@pytest.mark.parametrize("shell", FILES)
def test_completion_script_is_current(shell):
    runner = typer.testing.CliRunner(env={"_DSV4_COMPLETE": f"source_{shell}"})
    printed = runner.invoke(cli.app, prog_name="dsv4").stdout
    committed = (ROOT / "completions" / FILES[shell]).read_text(encoding="utf-8")
    assert committed == printed.lstrip("\n"), "run `make style`, which regenerates completions/"


def test_zsh_finds_its_directive_on_the_first_line():
    assert (ROOT / "completions" / FILES["zsh"]).read_text(encoding="utf-8").startswith("#compdef dsv4\n")
