"""Creates `.venv` for `make run` and `make test`, and reports each large download; `make` calls it.

If it is interrupted or fails, the next run starts over.
"""

import re
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

# marker files: of a complete set-up, whose date make compares, and of one that was started and may be incomplete
READY, UNFINISHED = ".ready", ".unfinished"
WHAT = ("--constraint", "constraints.txt", "--editable", ".[test,dev]")
LARGE_MB = 5.0
SILENCE_SECONDS = 15.0
FETCHED = re.compile(r"\s*(Downloading|Using cached) ([^/\s]+?)-(\d[^-\s]*)-\S+ \(([\d.]+) MB\)")
FOUND = re.compile(r"Processing ((/\S+)/([^/\s]+?)-(\d[^-\s]*)-[^/\s]+\.whl)")
INSTALLING = "Installing collected packages:"


class Report:
    """Progress messages of an installation: one line per stage, and a sign of life in long stages."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.start = self.last = time.monotonic()
        self.stage = ""
        self.ended = threading.Event()

    def begin(self, stage: str) -> None:
        """Print a new stage with the time since the start."""
        self.stage = stage
        self._line(stage)

    def read(self, line: str) -> None:
        """Process a line of pip's output. Most lines are not shown."""
        if (file := FETCHED.match(line)) and float(file[4]) >= LARGE_MB:
            verb = "taking from pip's cache" if file[1] == "Using cached" else "fetching"
            self.begin(f"{verb} {file[2]} {file[3]}: {float(file[4]):,.0f} MB")
        elif (file := FOUND.match(line)) and Path(file[1]).stat().st_size >= LARGE_MB * 1e6:
            self.begin(f"taking {file[3]} {file[4]} from {file[2]}")
        elif line.startswith("WARNING: Retrying"):
            self.begin("the package index does not answer, pip tries again")
        elif line.startswith(INSTALLING):
            self.begin(f"installing {line.count(',') + 1} packages")

    def breathe(self) -> None:
        """Print signs of life until the installation ends."""
        while not self.ended.wait(SILENCE_SECONDS / 10):
            if time.monotonic() - self.last >= SILENCE_SECONDS:
                self._line(f"still: {self.stage}")

    def _line(self, text: str) -> None:
        self.last = time.monotonic()
        minutes, seconds = divmod(int(self.last - self.start), 60)
        self.write(f"{minutes:3}:{seconds:02} {text}\n")


def make_venv(folder: Path) -> None:
    """Create a venv; start from scratch if an earlier set-up did not finish."""
    mark = folder / UNFINISHED
    if mark.exists():
        for old in folder.iterdir():
            if old != mark:
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
    if not (folder / READY).exists():
        folder.mkdir(exist_ok=True)
        mark.touch()
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)


def install(folder: Path, report: Report, what: Iterable[str] = WHAT) -> int:
    """Run pip in the venv and return its exit status. If it fails, print the end of its output."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    last: deque[str] = deque(maxlen=15)
    command = [*pip, "--progress-bar", "off", *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith(INSTALLING):  # from here on, an interruption leaves an incomplete venv
                (folder / UNFINISHED).touch()
            report.read(line)
            last.append(line)
    if running.returncode != 0:
        report.write("".join(last))
    return running.returncode


def main(folder: Path = Path(".venv"), write: Callable[[str], object] = sys.stderr.write) -> int:
    """Set up the venv and return the exit status."""
    report = Report(write)
    write("Setting up .venv, once; PyTorch takes minutes and gigabytes (see docs/guides/install.md)\n")
    threading.Thread(target=report.breathe, daemon=True).start()
    try:
        report.begin("making an empty environment, asking the package index")
        make_venv(folder)
        status = install(folder, report)
    except subprocess.CalledProcessError as error:
        status = error.returncode
    except KeyboardInterrupt:
        status = 130
    finally:
        report.ended.set()
    if status != 0:
        write("set-up did not come to its end; the same command tries again\n")
        return status
    (folder / READY).touch()
    (folder / UNFINISHED).unlink(missing_ok=True)
    report.begin("ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
