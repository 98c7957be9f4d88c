"""What README.md and docs/ claim, read from their text: command lines, transcripts, links and paths."""

import ast
import fnmatch
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import typer

from dsv4cli import cli
from dsv4cli.engine.checkpoint.source import resolve_model
from dsv4cli.engine.conversion.selection import parse_layers
from dsv4cli.engine.hub.selection import parse_kinds
from dsv4cli.engine.inspection.fit.cluster import NODES, parse_cluster
from dsv4cli.engine.inspection.fit.machine import parse_machine
from dsv4cli.engine.settings import parse_part, parse_size
from dsv4cli.errors import Dsv4Error
from tests.support.program import ROOT, command

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# programs whose options are known here; a command may stand behind a pipe, after variables, or after an arrow
PROGRAM = re.compile(r"(?:.*\| *)?(?:\w+=\S+ )*(?:dsv4|make|python3?|torchrun|\S+/dsv4|\S+/python)(?: |$)")
TOP = ("dsv4cli", "tests", "tools", "docs", "completions", ".ci")
PATH = re.compile(r"(?:[\w.*-]|<\w+>|\{\w+\})+(?:/(?:[\w.*-]|<\w+>|\{\w+\})+)*/?")
INNER = (*TOP, "engine", "commands", "kernels")
# what the value of an option must look like, by the name that the help gives it; each raises Dsv4Error
FORMS = {
    "SIZE": lambda value: parse_size("", value),
    "A-B": parse_layers,
    "I/N": parse_part,
    "KINDS": parse_kinds,
    "NxSIZE": lambda value: parse_cluster(value) if NODES.fullmatch(value) else parse_machine(value, None),
    "NxGPUS": parse_cluster,
}


def documents() -> list[Path]:
    """README, the documents and the cards of the built-in models."""
    return [
        ROOT / "README.md",
        *sorted((ROOT / "docs").rglob("*.md")),
        *sorted((ROOT / "dsv4cli").glob("nano*/README.md")),
    ]


class Line(NamedTuple):
    """A line of a block, complete; or a span of inline code, which may leave things out."""

    text: str
    complete: bool


def lines(text: str) -> Iterator[Line]:
    """Lines of the blocks that are no program text, continued lines as one; then the inline code."""
    for language, body in FENCE.findall(text):
        if not language:
            yield from (Line(line, True) for line in body.replace("\\\n", " ").splitlines())
    yield from (Line(span.replace("\n", " "), False) for span in SPAN.findall(FENCE.sub("", text)))


def stages(line: str) -> Iterator[list[str]]:
    """The words of each command of a pipeline, without variables, redirections and the comment."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
    lexer.whitespace_split = True
    stage: list[str] = []
    words = iter(lexer)
    for word in words:
        if set(word) <= set("<>"):
            next(words)
        elif set(word) <= set("|&;"):
            yield stage
            stage = []
        elif stage or not re.match(r"\w+=", word):
            stage.append(word)
    yield stage


def complaints(text: str, own: str | None = None) -> list[str]:
    """What is wrong about the command lines and options of a text. own: the command whose document it is."""
    found = []
    for line in lines(text):
        start = line.text.removeprefix("$ ").removeprefix("→ ")
        inline = not line.complete and start.split(" ")[0] in command(cli.app).commands and " -" in start
        if PROGRAM.match(start) or inline:
            for stage in stages(f"dsv4 {start}" if inline else start):
                found += [f"{line.text}: {wrong}" for wrong in wrong_about(stage, line.complete)]
            remark = re.findall(r"--\w[\w-]*", start.partition(" # ")[2])
            found += [f"{option} in a remark" for option in remark if option not in known_options(None)]
        elif not line.complete and re.match(r"--\w", start):
            option = re.split(r"[ =]", start)[0]
            found += [] if option in known_options(own) else [f"{option}: no such option of {own or 'any command'}"]
    return found


def wrong_about(words: list[str], complete: bool) -> Iterator[str]:
    """What is wrong about one command."""
    if not words:
        return
    program = words[0].rpartition("/")[2]
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
        yield from (f"no target {word}" for word in words[1:] if re.fullmatch(r"[\w-]+", word) and word not in targets)
    elif program == "dsv4":
        yield from wrong_about_ours(words[1:], complete)
    elif program in ("python", "python3", "torchrun"):
        at = next((at for at, word in enumerate(words) if word == "-m" or word.endswith(".py")), 0)
        name = words[at + 1] if words[at] == "-m" and at + 1 < len(words) else words[at]
        if name == "dsv4cli":
            yield from wrong_about_ours(words[at + 2 :], complete)
        elif name.split(".")[0] in TOP or name.endswith(".py"):
            yield from wrong_about_a_script(script(name), words[at + 1 :])


@cache
def _commands() -> Any:
    """Those of the program, apart from others: a command keeps the names of its option for help. Installing nothing."""
    group: Any = command.__wrapped__(cli.app)
    for option in group.params:
        if {"--install-completion", "--show-completion"} & {*option.opts}:
            option.callback = lambda *_: None
    return group


def wrong_about_ours(words: list[str], complete: bool) -> Iterator[str]:
    """What `dsv4` says against these arguments, without running anything."""
    words = [word for word in words if word != "…"]
    group: Any = _commands()
    while words and not words[0].startswith("-") and hasattr(group, "commands"):
        if words[0] not in group.commands:
            yield f"no command {words[0]}"
            return
        group = group.commands[words.pop(0)]
    try:
        context = group.make_context(group.name, list(words), help_option_names=["-h", "--help"])
        for parameter in group.params:
            check_form(parameter, context.params.get(parameter.name))
    except typer.Exit:  # it showed its version or its help
        return
    except cli.WRONG_ARGUMENT as error:
        # what is left out of a name in running text is no mistake
        absent = str(error).startswith("Missing parameter") or "requires an argument" in str(error)
        if (complete or not absent) and type(error).__name__ != "NoArgsIsHelpError":
            yield str(error)
    except Dsv4Error as error:
        yield error.message


def check_form(parameter: Any, value: Any) -> None:
    """Raises Dsv4Error for a value that the program refuses without looking at any file."""
    if isinstance(value, str) and value != parameter.metavar:
        if parameter.metavar in FORMS:
            FORMS[parameter.metavar](value)
        elif value.startswith("random:") and value != "random:PRESET,…":
            resolve_model(value)


def wrong_about_a_script(path: Path, words: list[str]) -> Iterator[str]:
    """Options that a script of the repository does not declare."""
    if not path.is_file():
        yield f"there is no {path.relative_to(ROOT)}"
        return
    options = {word.split("=")[0] for word in words if word.startswith("--")}
    yield from (f"{path.name} has no {option}" for option in sorted(options - declared(path)))


def script(name: str) -> Path:
    return ROOT / (name if name.endswith(".py") else f"{name.replace('.', '/')}.py")


@cache
def declared(path: Path) -> set[str]:
    """The options that a script gives to argparse."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    adds = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"]
    return {word.value for call in adds for word in call.args if isinstance(word, ast.Constant)}


@cache
def known_options(own: str | None) -> set[str]:
    """The options of a command, or of all of them."""
    groups = [command(cli.app).commands[own]] if own else list(command(cli.app).commands.values())
    commands = [one for group in groups for one in (group, *getattr(group, "commands", {}).values())]
    return {"--help", *(option for one in commands for parameter in one.params for option in parameter.opts)}


@cache
def files() -> list[str]:
    """Every file and folder of the repository's own folders, from its root on."""
    found = [path for top in TOP for path in (ROOT / top, *(ROOT / top).rglob("*")) if "__pycache__" not in path.parts]
    return [f"/{path.relative_to(ROOT).as_posix()}" for path in found]


def lost_paths(text: str) -> list[str]:
    """Paths of the repository that a text names and that are not there; * and <name> stand for any name."""
    named = {word for line in lines(text) for word in (line.text.split() if line.complete else [line.text])}
    paths = {
        word.rstrip("/")
        for word in named
        if PATH.fullmatch(word) and word.split("/")[0] in INNER and "/" in word and not word.startswith("docs/kernels-")
    }
    # a file of Python in running text may be named by its end: `layout.py`
    paths |= {line.text for line in lines(text) if not line.complete and re.fullmatch(r"[\w/*<>-]+\.py", line.text)}
    return sorted(path for path in paths if not fnmatch.filter(files(), f"*/{re.sub(r'<.*?>|{.*?}', '*', path)}"))


def lost_links(path: Path) -> list[str]:
    """Relative links of a document whose file or heading is not there."""
    lost = []
    for link in LINK.findall(FENCE.sub("", path.read_text(encoding="utf-8"))):
        name, _, heading = link.partition("#")
        target = path.parent / name if name else path
        if not re.match(r"\w+:", link) and not (target.exists() and (not heading or heading in headings(target))):
            lost.append(link)
    return lost


@cache
def headings(path: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
