"""The project uses the field's terms: phrases and names of a private grammar are banned; commit subjects are short."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache

import pytest
import typer.main

from dsv4cli import cli
from tests import test_architecture
from tests.support.program import ROOT
from tools.house import parsed

# phrases that a first reader had to read twice, and what to write in their place
BANNED = {
    r"\bbut for\b": "except",
    r"\b(go|goes|gone|going|went) on (with|from)\b": "continue",
    r"\bso many\b(?! \w+( \([^)]*\))? that)": "the number, or this many",
    r"\bgives? way\b": "is evicted, is preempted",
    r"\bgiving way\b": "evicting",
    r"\bwhose step (it )?is\b": "scheduled",
    r"\bkept states?\b": "prefix cache",
    r"\bguess(es)? ahead\b": "draft tokens",
    r"\bdo(es)? not see each other\b": "independent, batch-invariant",
    r"\b(is|are) told\b": "is reported, receives",
    r"\bin whichever\b": "in any",
    r"\b(has|have) (no )?room (for|left)\b": "fits, the context limit",
    r"\bon the average\b": "on average",
    r"\bin its stead\b": "instead",
    r"\banew\b": "again",
    r"(?<!`)\bwiden(s|ed|ing)?\b(?!`)": "dequantize, convert to fp32",
    r"\ba line a\b": "one line per",
    r"\bto be had\b": "available",
    r"\bwhat was kept\b": "the cached prefix",
    r"\bof an own\b": "its own",
    r"\b(is|are) led (with|by)\b": "uses",
    r"\bwhat (was|is) asked\b": "the prompt, the request",
    r"\b(stands?|goes|comes) (behind|beside)\b": "after, next to",
    r"\b(tokens|those|prompts|what|chunks|rows|words) behind\b": "after",
    r"\bwhat (is|was) (there|not there)\b": "existing, missing",
    r"\ball that there (is|are)\b": "all available",
    r"\bequally many\b": "the same number of",
}
NAMES = {"Pick", "Ran", "Offer", "Usual", "Meanwhile", "Posed", "Asked", "Apart"}
DEFINED = {"drawn", "drawable", "drawn_of", "give_way", "hear", "posed", "pose", "told_apart", "WAYS"}
FILES = {"ways", "gate", "pace", "ahead", "drawable", "drawing", "prepare", "preparing"}
SINCE = "2026-11-29T00:00:00Z"  # 34 subjects before this rule are longer
LONGEST_SUBJECT = 72  # characters


@cache
def trees() -> dict[str, ast.Module]:
    """The package's files and those of tools, parsed, by their path from the repository's root."""
    tools = sorted((ROOT / "tools").rglob("*.py"))
    return test_architecture.trees() | {path.relative_to(ROOT).as_posix(): parsed(path) for path in tools}


def pages() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{path.relative_to(ROOT).as_posix()}:{number}", line


def texts() -> Iterator[tuple[str, str]]:
    """Docstrings, help, errors and everything else that is a text of three words or more."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
                yield f"{file}:{node.lineno}", node.value


def defined(tree: ast.Module) -> Iterator[str]:
    """The names of functions, arguments, fields and constants, without leading underscores."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name.lstrip("_")
            yield from (one.arg for one in (*node.args.args, *node.args.kwonlyargs))
        elif isinstance(node, ast.ClassDef | ast.Module):
            for one in node.body:
                targets = one.targets if isinstance(one, ast.Assign) else [getattr(one, "target", None)]
                yield from (target.id for target in targets if isinstance(target, ast.Name))


def helps() -> Iterator[tuple[str, str]]:
    for name, one in typer.main.get_command(cli.app).commands.items():
        yield f"dsv4 {name} --help", one.help or ""
        for option in one.params:
            yield f"dsv4 {name} {option.name}", getattr(option, "help", None) or ""


def banned(places: Iterator[tuple[str, str]]) -> list[str]:
    given = [*places]
    # one text of all places, in which most phrases are not found at once
    every = "\n\n".join(text for _, text in given)
    suspects = {pattern: better for pattern, better in BANNED.items() if re.search(pattern, every, re.IGNORECASE)}
    return [
        f"{place}: {found[0]!r}: write {better}"
        for place, text in given
        for pattern, better in suspects.items()
        if (found := re.search(pattern, text, re.IGNORECASE))
    ]


@pytest.mark.parametrize("places", [pages, texts, helps])
def test_no_phrase_is_banned(places):
    assert banned(places()) == []


def test_a_banned_phrase_is_found():
    assert banned(iter([("here", "All but for one.")])) == ["here: 'but for': write except"]


def test_no_name_is_banned():
    # most files have no such word at all
    word = re.compile("|".join(NAMES | DEFINED))
    suspects = {file: tree for file, tree in trees().items() if word.search((ROOT / file).read_text("utf-8"))}
    classes = {
        f"{file}: {node.name}"
        for file, tree in suspects.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_") in NAMES
    }
    assert classes == set()
    assert {f"{file}: {name}" for file, tree in suspects.items() for name in defined(tree) if name in DEFINED} == set()
    assert [file for file in trees() if file.rsplit("/", 1)[-1].removesuffix(".py") in FILES] == []


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a clone")
def test_subjects_of_commits_are_short():
    log = ["git", "-C", str(ROOT), "log", f"--since={SINCE}", "--format=%h %s"]
    subjects = subprocess.run(log, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line for line in subjects if len(line.partition(" ")[2]) > LONGEST_SUBJECT] == []
