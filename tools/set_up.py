"""Makes `.venv` for `make run` and `make test`, with a line for each large file that comes; `make` calls it.

Called off or failed half way, it begins anew the next time.
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

# of a set-up that is whole: make compares its date; of one that has begun: what lies there may be half
READY, UNFINISHED = ".ready", ".unfinished"
WHAT = ("--constraint", "constraints.txt", "--editable", ".[test,dev]")
LARGE_MB = 5.0
SILENCE_SECONDS = 15.0
FETCHED = re.compile(r"\s*(Downloading|Using cached) ([^/\s]+?)-(\d[^-\s]*)-\S+ \(([\d.]+) MB\)")
FOUND = re.compile(r"Processing ((/\S+)/([^/\s]+?)-(\d[^-\s]*)-[^/\s]+\.whl)")
INSTALLING = "Installing collected packages:"


class Report:
    """The stages of an installation for people: a line where one begins, and a sign of life in each long one."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self.write = write
        self.start = self.last = time.monotonic()
        self.stage = ""
        self.ended = threading.Event()

    def begin(self, stage: str) -> None:
        """A new stage, with the time since the start."""
        self.stage = stage
        self._line(stage)

    def read(self, line: str) -> None:
        """Takes a line of pip's, of which most are left out."""
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
        """Says, until the end, that it still lives."""
        while not self.ended.wait(SILENCE_SECONDS / 10):
            if time.monotonic() - self.last >= SILENCE_SECONDS:
                self._line(f"still: {self.stage}")

    def _line(self, text: str) -> None:
        self.last = time.monotonic()
        minutes, seconds = divmod(int(self.last - self.start), 60)
        self.write(f"{minutes:3}:{seconds:02} {text}\n")


def make_venv(folder: Path) -> None:
    """A venv, from nothing where an earlier set-up has not come to its end."""
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
    """Runs pip in the venv; its exit status. Where it fails, its last words are shown."""
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check"]
    last: deque[str] = deque(maxlen=15)
    command = [*pip, "--progress-bar", "off", *what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            if line.startswith(INSTALLING):  # from here on an interruption leaves something half
                (folder / UNFINISHED).touch()
            report.read(line)
            last.append(line)
    if running.returncode != 0:
        report.write("".join(last))
    return running.returncode


def main(folder: Path = Path(".venv"), write: Callable[[str], object] = sys.stderr.write) -> int:
    """Sets up; the exit status."""
    report = Report(write)
    write('Setting up .venv, once; it takes minutes and gigabytes, for PyTorch ("Install" in README.md has numbers)\n')
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
