"""The process that compiles ahead, played by a script."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import triton

Says = Callable[..., None]


def compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Says:
    """What has the process be a script that says these lines, waits and ends with a code. Triton's cache is in the
    folder."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder / "cache"))

    def use(*lines: dict[str, object], code: int = 0, seconds: float = 0) -> None:
        text = "\n".join(json.dumps(line) for line in lines)
        script = folder / "python"
        given = f'#!/bin/sh\necho "$@" > {folder}/arguments\ncat > {folder}/given\n'
        script.write_text(f"{given}cat <<END\n{text}\nEND\nsleep {seconds}\nexit {code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return use
