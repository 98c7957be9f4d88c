"""`make`'s set-up: what it shows, and that what was cut off is begun anew. A script stands for Python and for pip."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tools import set_up

ROOT = Path(__file__).resolve().parents[2]
PIP = """\
WARNING: Location '/wheels/rich' is ignored: it is neither a file nor a directory.
Looking in links: /wheels
Processing /here
  Installing build dependencies: started
Collecting triton>=3.6 (from dsv4==0.1.0)
  Downloading triton-3.7.1-cp311-cp311-manylinux_2_27_x86_64.whl (197.7 MB)
  Using cached nvidia_nccl_cu13-2.29.7-py3-none-manylinux_2_18_x86_64.whl (206.0 MB)
  Downloading rich-15.0.0-py3-none-any.whl (310 kB)
  Downloading idna-3.20-py3-none-any.whl.metadata (6.9 kB)
  Downloading tokenizers-0.23.3-cp310-abi3-manylinux_2_17_x86_64.whl (3.4 MB)
Installing collected packages: torch, triton, rich
Successfully installed rich-15.0.0
"""
RETRYING = "WARNING: Retrying (Retry(total=4, connect=None)) after connection broken by 'ReadTimeoutError'\n"
# as `python -m venv FOLDER`: makes a python in it that says what pip says and ends as told
VENV = """\
#!/bin/sh
mkdir -p "$3/bin"
ln -s pip-says-this "$3/bin/half" || exit 1
printf '#!/bin/sh\\ncat "%s"; exit %s\\n' "{said}" "{status}" > "$3/bin/python"
chmod +x "$3/bin/python"
"""


@pytest.fixture
def shown():
    return []


@pytest.fixture
def make(tmp_path, monkeypatch, shown):
    """Runs the set-up of a folder with a pip that says `said` and ends with `status`."""

    def call(said: str = PIP, status: int = 0) -> int:
        words, python = tmp_path / "said", tmp_path / "python"
        words.write_text(said)
        python.write_text(VENV.format(said=words, status=status))
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        return set_up.main(tmp_path / ".venv", shown.append)

    return call


def test_the_large_files_are_named_and_nothing_else(make, shown, tmp_path):
    wheels = [tmp_path / name for name in ("torch-2.13.0+cpu-cp311-cp311-linux.whl", "idna-3.20-py3-none-any.whl")]
    for wheel, size in zip(wheels, (6_000_000, 60_000), strict=True):
        wheel.touch()
        os.truncate(wheel, size)
    assert make("".join(f"Processing {wheel} (from dsv4==0.1.0)\n" for wheel in wheels) + RETRYING + PIP) == 0
    assert [line.strip().split(" ", 1)[1] for line in shown[1:]] == [
        "making an empty environment, asking the package index",
        f"taking torch 2.13.0+cpu from {tmp_path}",
        "the package index does not answer, pip tries again",
        "fetching triton 3.7.1: 198 MB",
        "taking from pip's cache nvidia_nccl_cu13 2.29.7: 206 MB",
        "installing 3 packages",
        "ready",
    ]
    assert {file.name for file in (tmp_path / ".venv").iterdir()} == {"bin", ".ready"}


def test_a_long_silence_is_broken(monkeypatch, shown):
    monkeypatch.setattr(set_up, "SILENCE_SECONDS", 0.02)
    report = set_up.Report(shown.append)
    report.begin("fetching")
    report.write = lambda line: (shown.append(line), report.ended.set())
    report.breathe()
    assert shown[1].endswith("still: fetching\n")


@pytest.mark.parametrize("said", [PIP, PIP.partition("Installing collected")[0]], ids=["installing", "fetching"])
def test_what_failed_is_begun_anew(make, shown, tmp_path, said):
    assert make(said, 1) == 1
    assert shown[-1] == "set-up did not come to its end; the same command tries again\n"
    assert not (tmp_path / ".venv" / ".ready").exists()
    assert make() == 0  # the link that the first left is in nobody's way
    assert (tmp_path / ".venv" / ".ready").exists()


def test_an_environment_is_kept_when_the_requirements_change(make, tmp_path):
    assert make() == 0
    mine = tmp_path / ".venv" / "mine"
    mine.touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    assert make() == 1
    assert mine.exists()  # nothing was installed: there is nothing half
    python.write_text("#!/bin/sh\necho Installing collected packages: a; exit 1\n")
    assert make() == 1
    assert make() == 0
    assert not mine.exists()


def test_why_pip_failed_is_shown(make, shown):
    assert make("The conflict is caused by:\n    torch 2.13.0 depends on triton==3.7.1\n", 1) == 1
    assert "torch 2.13.0 depends on triton==3.7.1" in "".join(shown)


def test_no_venv(monkeypatch, tmp_path, shown):
    monkeypatch.setattr(sys, "executable", "false")
    assert set_up.main(tmp_path / ".venv", shown.append) == 1
    assert shown[-1].startswith("set-up did not come to its end")


def test_what_is_pinned_lies_in_the_ranges():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {asked.name: asked.specifier for asked in map(Requirement, project["dependencies"])}
    pinned = [Requirement(line) for line in (ROOT / "constraints.txt").read_text().splitlines() if line[:1] != "#"]
    assert {pin.name for pin in pinned} == {"torch", "triton"}
    assert all(next(iter(pin.specifier)).version in ranges[pin.name] for pin in pinned)


@pytest.mark.parametrize(
    ("said", "status", "code", "word"),
    [
        ("Would install torch-2.13.0", 0, 0, "has all of it"),
        ("ERROR: ResolutionImpossible: for help", 1, 1, "a fresh machine cannot set up"),
        ("ERROR: No matching distribution found for triton==3.7.99", 1, 1, "a fresh machine cannot set up"),
        ("ERROR: Could not install packages due to an OSError", 1, 0, "not checked, pip ended with 1"),
    ],
)
def test_ci_tells_a_conflict_from_an_index_out_of_reach(tmp_path, said, status, code, word):
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ncase \"$*\" in -c*) echo Python 3.11;; *--no-deps*) ;; *) echo '{said}'; exit {status};; esac\n"
    )
    python.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "resolve", python], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, "")
    assert word in done.stderr


def test_ci_passes_where_there_is_no_index(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ntest "$1" = -c && echo Python 3.11\n')
    python.chmod(0o755)
    done = subprocess.run([ROOT / ".ci" / "resolve", python], capture_output=True, text=True)
    assert done.returncode == 0
    assert "the package index is out of reach" in done.stderr
