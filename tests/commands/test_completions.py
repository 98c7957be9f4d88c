"""The committed completion scripts are the ones that the program prints; `make style` regenerates them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {"bash": "dsv4.bash", "zsh": "_dsv4", "fish": "dsv4.fish"}


@pytest.mark.parametrize("shell", FILES)
def test_completion_script_is_current(shell):
    printed = subprocess.run(
        [sys.executable, "-m", "dsv4cli"],
        cwd=ROOT,
        env={**os.environ, "_DSV4_COMPLETE": f"source_{shell}"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    committed = (ROOT / "completions" / FILES[shell]).read_text(encoding="utf-8")
    assert committed == printed.lstrip("\n"), "run `make style`, which regenerates completions/"


def test_zsh_finds_its_directive_on_the_first_line():
    assert (ROOT / "completions" / FILES["zsh"]).read_text(encoding="utf-8").startswith("#compdef dsv4\n")
