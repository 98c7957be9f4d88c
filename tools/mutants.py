"""Mutation tests: `python -m tools.mutants` applies the mutations of mutations.toml one by one.

Each mutation is applied to a copy of the working tree, where the tests that should fail run until the first failure.
Arguments select the mutations whose file, text or tests contain one of them. The exit status is 1 if a mutation
survives, and 2 if the table does not match the sources or the tests fail without a mutation.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).with_suffix("").with_name("mutations.toml")
# seconds; tests that run longer count as failed
LIMIT = 600
# pytest's exit codes
PASSED, FAILED = 0, 1
VERDICTS = {PASSED: "survived", FAILED: "killed"}


@dataclass(frozen=True)
class Mutation:
    """A replacement of `old` by `new`, which must occur once in the files that match the pattern `file`."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def place(self, root: Path) -> Path:
        """Return the file that contains the text. Raises ValueError unless it occurs exactly once."""
        found = {path: path.read_text(encoding="utf-8").count(self.old) for path in sorted(root.glob(self.file))}
        if sum(found.values()) != 1:
            raise ValueError(f"{self.file} has {self.old!r} {sum(found.values())} times instead of once")
        return next(path for path, count in found.items() if count)

    def __str__(self) -> str:
        return f"{self.file.removeprefix('dsv4cli/')}: {_short(self.old)} → {_short(self.new)}"


def _short(text: str) -> str:
    return " ".join(text.split()) or "nothing"


def read_table(path: Path) -> list[Mutation]:
    """Read the mutations from a file."""
    entries = tomllib.loads(path.read_text(encoding="utf-8"))["mutation"]
    return [Mutation(**(entry | {"tests": tuple(entry["tests"])})) for entry in entries]


def faults(mutations: Iterable[Mutation], root: Path) -> list[str]:
    """Return the errors in the table: texts or tests that do not exist."""
    found = []
    for one in mutations:
        try:
            one.place(root)
        except ValueError as error:
            found.append(str(error))
        found += [f"{one}: there is no {test}" for test in one.tests if not (root / test.partition("::")[0]).is_file()]
    return found


def copy_tree(root: Path, to: Path) -> None:
    """Copy the files that git tracks or would add."""
    listed = subprocess.check_output(["git", "ls-files", "-coz", "--exclude-standard"], cwd=root).decode()
    for name in filter(None, listed.split("\0")):
        if (root / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, to / name)


def run_tests(tests: Sequence[str], tree: Path, limit: int = LIMIT) -> tuple[int | None, str]:
    """Run pytest. Return its exit code, or None on a timeout, and its output."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *tests]
    # bytecode is cached by file time, and a file may change twice within a second
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        try:
            code = subprocess.run(
                command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=limit
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
        output.seek(0)
        return code, output.read()


def verdict(mutation: Mutation, tree: Path) -> str:
    """Return "killed", "survived", or "broken" if the tests cannot start."""
    path = mutation.place(tree)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        code, said = run_tests(mutation.tests, tree)
    finally:
        path.write_text(text, encoding="utf-8")
    if code is None or code < 0:  # a crash counts as a failed test
        return "killed"
    if code not in VERDICTS:
        print(said, file=sys.stderr)
    return VERDICTS.get(code, "broken")


def passes(mutations: Iterable[Mutation], tree: Path) -> bool:
    """Return whether the tests pass without a mutation."""
    code, said = run_tests(sorted({test for one in mutations for test in one.tests}), tree, 4 * LIMIT)
    if code != PASSED:
        print(f"{said}\nthe tests fail, or do not end, without any mutation", file=sys.stderr)
    return code == PASSED


def main(words: Sequence[str]) -> int:
    """Apply the selected mutations and print the verdicts."""
    every = read_table(TABLE)
    chosen = [one for one in every if not words or any(word in f"{one} {' '.join(one.tests)}" for word in words)]
    wrong = faults(every, ROOT)
    if wrong or not chosen:
        print("\n".join(wrong) or "no mutation has these words", file=sys.stderr)
        return 2
    # a shell ignores SIGINT for background jobs, and programs that tests interrupt would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        copy_tree(ROOT, tree)
        if not passes(chosen, tree):
            return 2
        verdicts = []
        for number, one in enumerate(chosen, 1):
            begin = time.monotonic()
            verdicts.append(verdict(one, tree))
            print(f"{number:3} {verdicts[-1]:8} {time.monotonic() - begin:5.1f} s  {one}", flush=True)
    killed = verdicts.count("killed")
    print(f"{killed} of {len(chosen)} killed: {100 * killed / len(chosen):.1f} %")
    return int(killed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
