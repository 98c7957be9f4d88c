"""`.ci/run` and the Makefile's test commands: what they run, and what they say that they did not."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.forked import output_of

ROOT = Path(__file__).parents[2]
STUB = "#!/bin/sh\necho {name} $*\n{then}\n"


@pytest.fixture
def ci(tmp_path):
    """Runs a copy of `.ci/run` among programs that print what they are asked for; `python` ends as it is told."""
    programs = tmp_path / "bin"
    for folder in (programs, tmp_path / ".ci", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")

    def stub(path: Path, then: str = "") -> None:
        path.write_text(STUB.format(name=path.name, then=then))
        path.chmod(0o755)

    def run(python: str = "", minutes: str = "12", found: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        stub(tmp_path / ".venv" / "bin" / "python", python)
        for path in (programs / "make", tmp_path / ".ci" / "resolve", *(programs / name for name in found)):
            stub(path)
        for name in ("bash", "dirname", "timeout"):
            if not (programs / name).exists():
                (programs / name).symlink_to(shutil.which(name))
        environment = {"PATH": str(programs), "CI_MINUTES": minutes}
        return subprocess.run(["bash", tmp_path / ".ci" / "run"], env=environment, capture_output=True, text=True)

    return run


def test_all_that_fits_is_run_and_the_rest_is_named(ci):
    done = ci(found=("chromium",))
    lines = done.stdout.splitlines()
    assert done.returncode == 0
    assert lines[:3] == ["make test", "make quality", "resolve"]
    assert [line.split(" -m slow and not gpu ")[1] for line in lines if "pytest" in line] == [
        "tests/engine/server/test_page.py",
        "tests/engine/server/test_clients.py tests/engine/server/test_own_clients.py"
        " tests/engine/server/test_responses_clients.py tests/engine/server/test_responses_contract.py",
        "-k kill or interrupt or signal",
    ]
    assert [line.split(":")[1] for line in lines if line.startswith("not run")] == [
        " tests marked gpu",
        " the rest of the slow tier",
    ]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "not run: the page in Chromium: there is no chromium or google-chrome"),
        ({"minutes": "0", "found": ("chromium",)}, "not run: kills and signals: the 0 minutes are over"),
        ({"python": 'test "$2" != pip'}, "not run: clients of the server: their packages cannot be installed"),
        ({"python": 'test "$2" != pytest || exit 124'}, "not run: kills and signals: cut off after "),
    ],
)
def test_what_is_not_run_is_said_and_no_failure(ci, given, said):
    done = ci(**given)
    assert done.returncode == 0
    assert said in done.stdout


def test_a_slow_test_that_fails_fails_ci(ci):
    done = ci('test "$2" != pytest || exit 1', found=("chromium",))
    assert done.returncode == 1
    assert done.stdout.splitlines()[-3:] == [
        "failed: the page in Chromium",
        "failed: clients of the server",
        "failed: kills and signals",
    ]


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("test-all", ['-m "not gpu"', "-n 2"]),
        ("test-gpu", ["python3 -m pytest", "-m gpu", "-n "]),
    ],
)
def test_make_runs_tests_in_parallel(target, words):
    command = ["make", "--dry-run", "--old-file", ".venv/.ready", target]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    assert all(word in shown for word in words)


def test_pytest_benchmark_is_left_out(request):
    """Beside xdist it warns, which is an error here and ends the run."""
    assert request.config.pluginmanager.is_blocked("benchmark")


IN_THE_BACKGROUND = """\
import signal, sys
numbers = signal.SIGHUP, signal.SIGINT, signal.SIGQUIT
for number in numbers:
    signal.signal(number, signal.SIG_IGN)
sys.modules.pop("tests.support.every_test", None)
import tests.support.every_test
print([number.name for number in numbers if signal.getsignal(number) == signal.SIG_IGN])
"""


def test_tests_run_in_the_background_ignore_no_signal():
    """A shell ignores SIGINT and SIGQUIT for such a job, nohup SIGHUP, and programs of tests would inherit that."""
    assert output_of("-c", IN_THE_BACKGROUND) == "[]\n"
