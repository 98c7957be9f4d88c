"""The process that compiles ahead, played by a script."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import triton

Says = Callable[..., None]


def compiler(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Says:
    """What has the process be a script that says these kernels and counts, waits, says that it is done, unless it ends
    with another code than 0, and is still there for so many seconds. It makes the file `done` before it says that it is
    done. Triton's cache is in the folder."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(folder / "cache"))

    def use(*lines: dict[str, object], code: int = 0, seconds: float = 0, ending: float = 0) -> None:
        text = "\n".join(json.dumps(line if "ready" in line else {"counts": line}) for line in lines)
        done = "" if code else f"touch {folder}/done\necho '{json.dumps({'done': True})}'\n"
        waits = f"exec sleep {ending}\n" if ending else ""
        script = folder / "python"
        given = f'#!/bin/sh\necho "$@" > {folder}/arguments\ncat > {folder}/given\n'
        script.write_text(f"{given}cat <<END\n{text}\nEND\nsleep {seconds}\n{done}{waits}exit {code}\n")
        script.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(script))

    return use
