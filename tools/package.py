"""Builds the sdist and the wheel of the current commit and proves that they are reproducible; `make wheel` calls it.

Each is built twice, in other folders, and compared byte by byte. Dates are those of the commit (SOURCE_DATE_EPOCH),
owners and modes are fixed, and the wheel is built from the sdist, so that nothing can be missing there.
"""

import gzip
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# calls a hook of the build backend in the folder of the source; its last output line is the name of the result
HOOK = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
FILE_MODE, EXECUTABLE_MODE = 0o644, 0o755


def git(*words: str) -> str:
    """Return what git prints in the repository."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build(commit: str, output: Path) -> list[Path]:
    """Build the sdist of a commit and the wheel of that sdist, and return their paths."""
    date = int(git("show", "-s", "--format=%ct", commit))
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder) / "source.tar"
        git("archive", "--prefix=source/", "--output", str(archive), commit)
        sdist = run_hook("build_sdist", unpacked(archive), output, date)
        settle(sdist, date)
        wheel = run_hook("build_wheel", unpacked(sdist, Path(folder)), output, date)
    return [sdist, wheel]


def run_hook(hook: str, source: Path, output: Path, date: int) -> Path:
    """Run a hook of the build backend on a source tree, and return the path of what it made."""
    done = subprocess.run(
        [sys.executable, "-c", HOOK, hook, str(output)],
        cwd=source, env={**os.environ, "SOURCE_DATE_EPOCH": str(date)}, umask=0o022, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        sys.exit(f"{hook} failed:\n{done.stdout}{done.stderr}")
    return output / done.stdout.splitlines()[-1]


def unpacked(archive: Path, folder: Path | None = None) -> Path:
    """Unpack a tar file, with modes that do not depend on the umask, and return its only folder."""
    folder = folder or archive.parent
    with tarfile.open(archive) as tar:
        for member in tar:
            member.mode = mode_of(member)
            tar.extract(member, folder, filter="fully_trusted")
        return folder / Path(tar.getnames()[0]).parts[0]


def settle(sdist: Path, date: int) -> None:
    """Rewrite an sdist with one date, no owners and sorted members: setuptools takes these from the file system."""
    rewritten = sdist.with_suffix(".tmp")
    with (
        tarfile.open(sdist) as old,
        rewritten.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=date) as compressed,
        tarfile.open(fileobj=compressed, mode="w") as new,
    ):
        for member in sorted(old, key=lambda one: one.name):
            member.mtime, member.mode, member.pax_headers = date, mode_of(member), {}
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    rewritten.replace(sdist)


def mode_of(member: tarfile.TarInfo) -> int:
    """Return the mode of a file or folder: executable if its owner may execute it."""
    return EXECUTABLE_MODE if member.isdir() or member.mode & 0o100 else FILE_MODE


def main(output: Path = ROOT / "dist") -> int:
    """Build both twice, compare, and leave them in the output folder. Return the exit status."""
    if git("status", "--porcelain", "--untracked-files=no"):
        sys.stderr.write("uncommitted changes are left out: the packages are those of the last commit\n")
    commit = git("rev-parse", "HEAD")
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        for first, second in zip(build(commit, Path(one)), build(commit, Path(other)), strict=True):
            if first.read_bytes() != second.read_bytes():
                sys.stderr.write(f"{first.name} is not reproducible: two builds of {commit} differ\n")
                return 1
            output.mkdir(exist_ok=True)
            made = Path(shutil.copy(first, output))
            sys.stdout.write(f"{hashlib.sha256(made.read_bytes()).hexdigest()}  {made}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
