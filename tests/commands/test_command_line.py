"""What all commands have in common: how a model is named, -q and --json, old option names, help pages, completion."""

import re

import pytest
import typer.testing

from dsv4cli import cli
from dsv4cli.command import MOST_IN_A_LIST, OTHER, PANELS, SPELLINGS
from tests.support.program import SMALL, command, inside
from tests.support.shared_models import share_models


def commands():
    """Every visible command, by the words that call it."""
    for name, one in command(cli.app).commands.items():
        for part, own in {"": one, **getattr(one, "commands", {})}.items():
            if not own.hidden:
                yield f"{name} {part}".strip(), own


PAGES = ["", *(words for words, _ in commands())]
COMMANDS = {words: one for words, one in commands() if not hasattr(one, "commands")}
REPORTS = {*COMMANDS} - {"chat", "serve"}
# what a command needs beside the model
REST = {"convert": ("OUT", "--to", "bf16"), "trace record": ("--out", "A"), "verify": ("http://localhost:8000",)}
# their first argument, if they have one, is not the model
TALKS = ("run", "chat", "eval", "verify")


def parsed(words, *arguments):
    """The values of a command's parameters."""
    return COMMANDS[words].make_context(words, [*arguments], help_option_names=["-h", "--help"]).params


def completed(words, **environment):
    """What bash offers for the last word."""
    request = {
        "_DSV4_COMPLETE": "complete_bash",
        "COMP_WORDS": f"dsv4 {words}",
        "COMP_CWORD": str(words.count(" ") + 1),
    }
    done = typer.testing.CliRunner(env=request | environment).invoke(cli.app, prog_name="dsv4")
    assert (done.exit_code, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize("words", sorted({*COMMANDS} - {"trace compare"}))
def test_every_command_takes_its_model_by_option(words):
    named = parsed(words, "-m", "flash", *REST.get(words, ()))
    assert parsed(words, "--model", "flash", *REST.get(words, ())) == named
    assert parsed(words, *REST.get(words, ()), "--model=flash") == named
    assert named["source" if words == "convert" else "model"] == "flash"
    if words not in TALKS:
        assert parsed(words, "flash", *REST.get(words, ())) == named


def test_a_model_is_named_once():
    with pytest.raises(cli.WRONG_ARGUMENT) as caught:
        parsed("inspect", "flash", "-m", "pro")
    assert caught.value.message.endswith("(flash). Name the model once: with --model, or without.")


@pytest.mark.parametrize("words", ["run", "chat"])
def test_a_text_without_quotes_is_an_error_that_says_so(words):
    with pytest.raises(cli.WRONG_ARGUMENT) as caught:
        parsed(words, "What", "is", "17", "+", "25?")
    assert caught.value.message.endswith(f'(is 17 + 25?). Put a text with spaces in quotes: {words} "What is 17 + 25?"')


def test_a_required_argument_has_no_braces():
    for words in ("inspect", "trace compare", "verify"):
        page = inside(*words.split(), "--help").stdout
        assert re.search(r"^Usage: dsv4 [a-z ]+\[OPTIONS\] [A-Z ]+$", page, re.M), words
    assert "[OPTIONS] MODEL\n" in inside("inspect").stderr


def test_other_arguments_too_many_get_no_advice():
    with pytest.raises(cli.WRONG_ARGUMENT, match=r"\(C\)$"):
        parsed("trace compare", "A", "B", "C")
    with pytest.raises(cli.WRONG_ARGUMENT, match="Missing"):
        parsed("inspect")


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_can_be_quiet_and_every_report_is_json(words):
    options = {name for param in COMMANDS[words].params for name in param.opts}
    assert {"-q", "--quiet"} <= options
    assert ("--json" in options) == (words in REPORTS)


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (("inspect", SMALL), "layers"),
        (("chat", "Hi", "-m", SMALL, "--seed", "1", "--max-tokens", "3", "--no-history"), "\n"),
    ],
    ids=lambda given: given[0],
)
def test_a_quiet_command_leaves_stderr_empty(arguments, shown, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    share_models(monkeypatch)
    done = inside(*arguments, "-q")
    assert (done.exit_code, done.stderr) == (0, "")
    assert shown in done.stdout


@pytest.mark.parametrize(("name", "other"), [*SPELLINGS, *(pair[::-1] for pair in SPELLINGS)])
def test_the_other_spelling_of_an_option_is_accepted_and_hidden(name, other):
    have = [words for words, one in COMMANDS.items() if any(name in param.opts for param in one.params)]
    for words in have:
        rest = ("flash", *REST.get(words, ())) if words not in TALKS else ()
        assert parsed(words, *rest, other, "7") == parsed(words, *rest, name, "7")
        assert not re.search(rf"{other}\b", inside(*words.split(), "--help").stdout)
        assert completed(f"{words} {name}") == [name]
        assert other not in completed(f"{words} --")


def words_of(page):
    """The words of a page; a command that goes on behind a backslash is one line."""
    return page.replace(" \\\n", " ").split()


@pytest.mark.parametrize("words", PAGES)
def test_help_breaks_no_word_at_any_width(words):
    whole = words_of(inside(*words.split(), "--help", columns=80).stdout)
    for columns in (40, 60, 100):
        page = inside(*words.split(), "--help", columns=columns).stdout
        # a word that is longer than the page stays whole
        assert [line for line in page.splitlines() if len(line) > columns and " " in line.strip()] == []
        assert words_of(page) == whole


def test_examples_can_be_pasted_at_any_width():
    wide, narrow = (inside("chat", "--help", columns=columns).stdout for columns in (80, 40))
    assert "'Answer in one sentence.'" in narrow
    examples = [re.sub(r" \\\n +", " ", page.partition("Examples:")[2]) for page in (wide, narrow)]
    assert examples[0] == examples[1]


@pytest.mark.parametrize("words", COMMANDS)
def test_many_options_are_listed_by_panel(words):
    page = inside(*words.split(), "--help").stdout
    titles = re.findall(r"^(\w[\w ]*):$", page, re.MULTILINE)
    options = [param for param in COMMANDS[words].params if param.param_type_name == "option"]
    if len(options) + 1 <= MOST_IN_A_LIST:  # and --help
        assert titles in (["Options"], ["Arguments", "Options"])
    else:
        assert len(titles) > 3
        assert [title for title in titles if title not in ({"Arguments", *PANELS} - {OTHER})] == []
        shown = {name for line in page.splitlines() for name in re.findall(r"^  (?:-\w, )?(--[\w-]+)", line)}
        assert shown == {param.opts[-1] if param.opts[-1][:2] == "--" else param.opts[0] for param in options} | {
            "--help"
        }


@pytest.mark.parametrize("words", [(), ("profile",), ("trace",)])
def test_a_group_alone_shows_its_help(words):
    done = inside(*words)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == inside(*words, "--help").stdout


NAMES = ["nano", "nano-0731", "flash", "pro", "flash-0731", "random:tiny"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with models and other things in it, and a cache."""
    monkeypatch.chdir(tmp_path)
    cache = tmp_path / ".cache"
    for name in ("models--org--some-model", "models--gpt2", "datasets--org--set", ".locks"):
        (cache / name).mkdir(parents=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").touch()
    (tmp_path / "models" / "one").mkdir(parents=True)
    (tmp_path / "models" / "two.gguf").touch()
    (tmp_path / "a b").mkdir()
    (tmp_path / "$(touch x)").mkdir()
    (tmp_path / "notes.txt").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    return tmp_path


@pytest.mark.parametrize(
    "words", ["run --model ", "run -m ", "serve ", "inspect ", "inspect -m ", "eval --against ", "inspect nano --diff "]
)
def test_models_are_completed(here, words):
    assert completed(words) == [*NAMES, "org/some-model", "mine", "models/"]


@pytest.mark.parametrize(
    ("start", "found"),
    [
        ("f", ["flash", "flash-0731"]),
        ("org", ["org/some-model"]),
        # one folder comes with what is in it, or a shell would put a space behind it
        ("mo", ["models/", "models/one/", "models/two.gguf"]),
        ("models/t", ["models/two.gguf"]),
        ("mine", ["mine"]),
        (".c", [".cache/", ".cache/datasets--org--set/", ".cache/models--gpt2/", ".cache/models--org--some-model/"]),
        ("nothing/at/all", []),
        ("notes", []),
    ],
)
def test_model_names_are_completed_from_their_start(here, start, found):
    assert completed(f"run -m {start}") == found


def test_downloads_are_completed_with_repositories(here):
    assert completed("download ") == ["flash", "pro", "flash-0731", "org/some-model"]


@pytest.mark.parametrize(
    ("environment", "cache"),
    [
        ({"HF_HOME": "H"}, "H/hub"),
        ({"XDG_CACHE_HOME": "X"}, "X/huggingface/hub"),
        ({"HOME": "U"}, "U/.cache/huggingface/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "C", "HF_HOME": "H"}, "C"),
        ({"HOME": "U", "HF_HUB_CACHE": "~/C"}, "U/C"),
    ],
)
def test_the_cache_is_found_where_huggingface_hub_has_it(tmp_path, monkeypatch, environment, cache):
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / cache / "models--org--name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert completed("run -m o", **environment) == ["org/name"]


def test_a_cache_that_cannot_be_read_is_no_error(tmp_path):
    assert completed("run -m o", HF_HUB_CACHE=str(tmp_path / "nothing")) == []
