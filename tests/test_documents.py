"""The documents say what is so: command lines parse, transcripts are as shown, links and paths lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from dsv4cli import cli
from tests.support.documents import FENCE, complaints, documents, lost_links, lost_paths, stages
from tests.support.program import ROOT, command
from tests.test_architecture import ENGINE

COMMANDS = {name for name, one in command(cli.app).commands.items() if not one.hidden}
PAPERS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in documents()}
# more than a second on two cores that others use too
LONG = (
    "--think high",
    "--messages weather.json",
    "| dsv4 chat",
    "dsv4 eval",
    "random:flash --fit",
    "trace bisect random:tiny",
    "trace compare A B",
)
MOST_LINES, WIDEST = 150, 120


def shown():
    """The blocks of the documents that show what `dsv4` prints, less conversations, which have a test of their own."""
    for name, text in PAPERS.items():
        for number, (_, body) in enumerate(FENCE.findall(text)):
            # ["$ command", what it shows, ...]
            steps = re.split(r"^(\$ .*)\n", body, flags=re.MULTILINE)[1:]
            if any("dsv4 " in step for step in steps[::2]) and "\n> " not in body:
                marks = [pytest.mark.slow] if any(words in body for words in LONG) else []
                yield pytest.param(list(zip(steps[::2], steps[1::2], strict=True)), id=f"{name}-{number}", marks=marks)


def pattern(text):
    """… alone on its line stands for any lines, elsewhere for any text of that line."""
    escaped = "".join(r"(?:.*\n)*" if line == "…\n" else re.escape(line) for line in text.splitlines(keepends=True))
    return escaped.replace("…", ".*")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where a reader would be: in the clone, and with a home of his own."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


def test_make_run_answers_its_own_question_to_the_end(dsv4):
    """The first words that a user reads."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    question = re.search(r"^PROMPT \?= (.*)$", makefile, re.MULTILINE)[1]
    words = re.search(r"dsv4 (run .*) --", makefile)[1].split()
    ended = dsv4(*words, "--seed", "1", "--", question)
    assert (ended.code, ended.out.splitlines()[-1]) == (0, "17 * 23 = 391.")
    assert "cut off" not in ended.err


@pytest.mark.parametrize("steps", [*shown()])
def test_a_transcript_is_what_the_program_prints(steps, dsv4, folder):
    for line, output in steps:
        *before, words = stages(line.removeprefix("$ "))
        if words[0] == "cat":
            (folder / words[1]).write_text(output, encoding="utf-8")
            continue
        typed = b""
        for stage in before:
            assert stage[0] == "printf"
            typed = stage[1].encode().decode("unicode_escape").encode()
        assert words[0] == "dsv4"
        done = dsv4(*words[1:], stdin=typed if before else None)
        assert done.code == 0, done.err
        # what a terminal shows of both streams; what is not on stderr must be all of stdout
        said = done.err.splitlines()
        rest = "".join(one for one in output.splitlines(keepends=True) if one.rstrip("\n") not in said)
        assert re.fullmatch(pattern(rest), done.out), f"{line}\n{done.out}"


@pytest.mark.parametrize("name", [*PAPERS, "CONTRIBUTING.md"])
def test_every_command_line_can_be_typed(name):
    own = Path(name).stem
    text = (ROOT / name).read_text(encoding="utf-8")
    assert complaints(text, own if own in COMMANDS else None) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('```\ndsv4 run "Hi" --temprature 0\n```', "--temprature"),
        ("```\ngit diff | dsv4 run - --modle flash > out.txt\n```", "--modle"),
        ("```\ndsv4 upload flash\n```", "no command upload"),
        ("```\nHF_HUB_OFFLINE=1 dsv4 profile layers\n```", "no command layers"),
        ("`dsv4 convert A B --to onnx`", "onnx"),
        ("`run --think hard`", "hard"),
        ("`--tempo 3`", "--tempo"),
        ("```\ndsv4 run Hi --tp two\n```", "two"),
        ("```\ndsv4 run Hi --gpu-memory 12\n```", "not a size"),
        ("```\ndsv4 convert A B --to mp --shard 3of4\n```", "not a valid part"),
        ("```\ndsv4 inspect flash --fit --gpus many\n```", "many"),
        ("```\ndsv4 download flash --only weight\n```", "weight"),
        ("```\ndsv4 run --model random:flash,depth=3\n```", "depth"),
        ("```\ndsv4 inspect\n```", "Missing parameter"),
        ("```\npython3 -m dsv4cli run Hi --wrong\n```", "--wrong"),
        ("```\ntorchrun --nproc-per-node 2 -m dsv4cli \\\n  run Hi --wrong\n```", "--wrong"),
        ("```\npython -m tests.benchmarks.decode_speed --length 9\n```", "no --length"),
        ("```\npython -m tools.forgotten\n```", "there is no tools/forgotten.py"),
        ("```\nmake tea\n```", "no target tea"),
        ("```\n→ dsv4 inspect flash --fits\n```", "--fits"),
        ("```\ndsv4 inspect flash --fit # or --gpu 24GB\n```", "--gpu"),
    ],
)
def test_a_command_line_that_cannot_be_typed_is_found(text, complaint):
    [found] = complaints(text)
    assert complaint in found


@pytest.mark.parametrize(
    "text",
    [
        "`dsv4 inspect`, `run --messages`, `convert SRC DST --to bf16`, `--host-memory SIZE`",
        "```\nprintf 'a\\n' | dsv4 chat --tp 2   # it's a comment\ndsv4 run -h\ndsv4 run …\ndsv4\n```",
        "```python\ndsv4 run --wrong\n```",
    ],
)
def test_what_can_be_typed_is_left_alone(text):
    assert complaints(text) == []


def test_nothing_is_installed_to_read_a_document(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert complaints("```\ndsv4 --install-completion\n```") == []
    assert list(tmp_path.iterdir()) == []


def test_a_document_knows_only_the_options_of_its_command():
    assert complaints("`--think-budget 9`", "chat") == []
    assert len(complaints("`--think-budget 9`", "run")) == 1


@pytest.mark.parametrize("name", [*PAPERS, "CHANGELOG.md"])
def test_links_and_paths_lead_somewhere(name):
    assert lost_links(ROOT / name) == []
    if name != "CHANGELOG.md":  # what it names was there then
        assert lost_paths((ROOT / name).read_text(encoding="utf-8")) == []


def test_links_and_paths_of_contributing_lead_somewhere():
    assert lost_links(ROOT / "CONTRIBUTING.md") == []
    assert lost_paths((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")) == []


def test_the_walk_from_a_command_to_logits_is_short():
    """Five files, under 800 lines with an argument a line in docstrings, each of which imports the next."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    files = re.findall(r"^\d\. `(\S+\.py)`", text.partition("### From a command")[2].partition("###")[0], re.MULTILINE)
    sources = [(ROOT / "dsv4cli" / file).read_text(encoding="utf-8") for file in files]
    assert len(files) == 5
    assert sum(len(source.splitlines()) for source in sources) < 800
    for source, following in zip(sources, files[1:], strict=False):
        assert f"from dsv4cli.{following.removesuffix('.py').replace('/', '.')} import" in source


def test_the_table_of_packages_is_the_order_that_is_tested():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("### Packages")[2]
    assert tuple(re.findall(r"^\| `engine/(\w+)(?:/|\.py)` \|", text, re.MULTILINE)) == ENGINE


def test_a_path_that_leads_nowhere_is_found(tmp_path):
    assert lost_paths("`engine/nothing.py`, `nothing.py`, `cli.py`, `kernels/<family>/ref.py`") == [
        "engine/nothing.py",
        "nothing.py",
    ]
    assert lost_paths("```\ndsv4 inspect tests/golden/tiny-flush\n```") == ["tests/golden/tiny-flush"]
    (tmp_path / "a.md").write_text("# One thing\n[a](#one-thing) [b](#two) [c](b.md) [d](https://x.y)", "utf-8")
    assert lost_links(tmp_path / "a.md") == ["#two", "b.md"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("run", "Hi", "--max-tokens", "1", "--logprobs", "1", "--json"),
        ("run", "--show-prompt", "Hi", "--json"),
        ("eval", "--limit", "1", "--max-tokens", "4", "--against", "nano", "--json"),
        ("inspect", "nano", "--fit", "--json"),
        ("convert", "nano", "OUT", "--to", "bf16", "--dry-run", "--json"),
        ("convert", "nano", "OUT", "--to", "bf16", "--json"),
    ],
    ids=" ".join,
)
def test_the_keys_of_a_json_document_are_listed(arguments, dsv4, folder):
    done = dsv4(*arguments)
    assert done.code == 0, done.err
    found = [json.loads(line) for line in done.out.splitlines()]
    keys = {key for one in found for part in (one, one.get("fit") or {}) for key in part}
    pages = PAPERS[f"docs/guides/{arguments[0]}.md"] + PAPERS.get("docs/reference/json.md", "")
    assert [key for key in sorted(keys) if f"`{key}`" not in pages] == []


def test_every_command_has_a_document():
    assert {Path(name).stem for name in PAPERS if name.startswith("docs/guides/")} >= COMMANDS
    assert all(f"(docs/guides/{name}.md)" in PAPERS["README.md"] for name in COMMANDS)


def test_the_readme_fits_a_page():
    lines = PAPERS["README.md"].splitlines()
    assert len(lines) <= MOST_LINES
    assert [line for line in lines if len(line) > WIDEST] == []


def test_the_changelog_has_a_line_an_entry():
    lines = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()
    assert f"## {cli.__version__} (" in "\n".join(lines)
    assert {line for line in lines if line.startswith("### ")} == {"### Added", "### Changed", "### Fixed"}
    assert [line for line in lines[3:] if len(line) > WIDEST or not re.match(r"(#+|-|\*\*.*\*\*$) ?|$", line)] == []


def test_the_list_of_commands_has_whole_sentences(dsv4):
    assert "..." not in dsv4("--help").out.partition("Commands:")[2]


def words_of_help():
    """The help of each command and of each of its options, beside the command's options."""
    for name, one in command(cli.app).commands.items():
        for part, own in {"": one, **getattr(one, "commands", {})}.items():
            options = {word for param in own.params for word in (*param.opts, *param.secondary_opts)}
            texts = [own.help or "", *(getattr(param, "help", None) or "" for param in own.params)]
            yield pytest.param(options | {"--help"}, " ".join(texts), id=f"{name} {part}".strip())


@pytest.mark.parametrize(("options", "text"), [*words_of_help()])
def test_help_names_options_of_its_own_command(options, text):
    assert set(re.findall(r"--[a-z][a-z-]+", text)) <= options
