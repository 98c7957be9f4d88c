"""The tool that makes mistakes and sees whether tests notice them; and that its table fits the sources."""

import subprocess

import pytest

from tests.support.slow import slow_rows
from tools import mutants

SOURCE = "def double(x):\n    return 2 * x\n"
TEST = "from double import double\n\ndef test_double():\n    assert double(2) == 4\n"


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "double.py").write_text(SOURCE)
    (tmp_path / "test_double.py").write_text(TEST)
    return tmp_path


def mutation(old, new, file="double.py", test="test_double.py::test_double"):
    return mutants.Mutation(file, old, new, (test,))


@pytest.mark.parametrize(
    ("new", "verdict"),
    [("3 * x", "killed"), *slow_rows(("x * 2", "survived"), ("2 *", "broken"))],
    ids=lambda text: text,
)
def test_a_mistake_is_killed_or_survives_and_what_python_cannot_read_is_neither(tree, new, verdict, capfd):
    assert mutants.verdict(mutation("2 * x", new), tree) == verdict
    assert (tree / "double.py").read_text() == SOURCE
    assert ("SyntaxError" in capfd.readouterr().err) == (verdict == "broken")


def test_tests_that_do_not_end_have_noticed(tree, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    assert mutants.verdict(mutation("2 * x", "3 * x"), tree) == "killed"


def test_the_place_is_the_one_that_a_pattern_finds(tree):
    assert mutation("2 * x", "x", "d*.py").place(tree) == tree / "double.py"
    found = mutants.faults(
        [mutation("3 * x", "x"), mutation("double", "x", "*.py"), mutation("2", "3", test="a")], tree
    )
    assert [line.partition(" has ")[2] for line in found[:2]] == [
        "'3 * x' 0 times instead of once",
        "'double' 5 times instead of once",
    ]
    assert found[2] == "double.py: 2 → 3: there is no a"


def test_a_copy_has_what_git_would_take(tree):
    (tree / ".gitignore").write_text("*.log\n")
    (tree / "a.log").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    mutants.copy_tree(tree, tree / "copy")
    assert sorted(path.name for path in (tree / "copy").iterdir()) == [".gitignore", "double.py", "test_double.py"]


def test_the_table_fits_the_sources():
    table = mutants.read_table(mutants.TABLE)
    assert mutants.faults(table, mutants.ROOT) == []
    assert len({(one.file, one.old, one.new) for one in table}) == len(table) >= 60
    assert all(one.old != one.new for one in table)
