"""`dsv4 run --draft`: what is loaded, what is told of drafts, and that steps of several tokens change no answer."""

import json
import re
from dataclasses import fields

import pytest

from dsv4cli.commands.job import Job, open_job
from dsv4cli.commands.ranks import SHARED
from dsv4cli.engine.checkpoint.source import RandomSource
from dsv4cli.engine.config.presets import TINY, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.settings import Drafting
from dsv4cli.engine.weights import load
from dsv4cli.errors import UsageError
from dsv4cli.options import ModelOptions
from dsv4cli.output import Colours, Output
from tests.support.drafts import ManyTokens
from tests.support.program import SMALL
from tests.support.shared_models import load_models_anew
from tests.support.slow import slow

ASK = ("run", "What is 17 + 25?", "--model", SMALL, "--draft", "off")
KEYS = ["drafter", "steps", "drafted", "accepted", "per_position", "tokens_per_step"]
LINE = ["index", "content", "reasoning_content", "tool_calls", "ids", "finish_reason", "usage", "seed"]


@pytest.fixture
def asked(dsv4, monkeypatch):
    """What loading was asked for, and what engines were."""
    load_models_anew(monkeypatch)
    found = {"loaded": [], "engines": []}
    decide, init = load.decide, Engine.__init__

    def decided(sizes, room, beside, drafting):
        found["loaded"].append(drafting)
        return decide(sizes, room, beside, drafting)

    def made(self, model, capacity, device, followers=None, drafting=None):
        found["engines"].append(drafting)
        init(self, model, capacity, device, followers)

    monkeypatch.setattr(load, "decide", decided)
    monkeypatch.setattr(Engine, "__init__", made)
    return found


@pytest.mark.parametrize(("words", "most"), [((), None), (("--draft", "off"), 0), (("--draft", "3"), 3)])
def test_the_option_reaches_loading_and_the_engine(dsv4, asked, words, most):
    assert dsv4("run", "hi", "--model", SMALL, "--max-tokens", "1", *words).code == 0
    assert asked == {"loaded": [Drafting(most)], "engines": [Drafting(most)]}


def test_scores_load_no_drafter(dsv4, asked, tmp_path):
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"ids": [5, 6, 7]}\n', encoding="utf-8")
    assert dsv4("run", "--score", str(texts), "--model", SMALL).code == 0
    assert asked["loaded"] == [Drafting(0)]


@pytest.mark.parametrize("command", ["run", "chat"])
def test_a_number_that_cannot_be_is_refused(dsv4, command):
    done = dsv4(command, "hi", "--draft", "8")
    assert (done.code, done.out) == (2, "")
    assert done.err == "error: --draft cannot be 8\n→ use auto, off or a number from 1 to 7\n"


def test_a_model_without_a_drafter_is_refused_before_it_is_loaded():
    bare = RandomSource("bare", parse_config(shortened(TINY, 1, 8), "bare").without_drafter(), 1)
    out = Output(Colours())
    with pytest.raises(UsageError, match="bare has no drafter, and --draft 2 needs one"):
        open_job(out, ModelOptions(draft="2"), find=lambda name: bare)
    assert open_job(out, ModelOptions(), find=lambda name: bare).drafting == Drafting(None)


def test_other_ranks_are_given_all_of_a_job_that_is_not_their_own():
    own = {"out", "process", "clients"}
    assert {field.name for field in fields(Job)} - own == set(SHARED)


def test_drafts_are_told_below_the_answer_and_in_the_document(dsv4, monkeypatch):
    def ask(*options):
        dsv4.model_says("17 + 25 = 42.")
        return dsv4(*ASK, *options)

    plain, alone = ask(), json.loads(ask("--json").out)
    assert "drafts" not in plain.err
    assert alone["draft"] is None
    made = ManyTokens(monkeypatch)
    several, document = ask(), json.loads(ask("--json").out)
    assert several.out == plain.out == "17 + 25 = 42.\n"
    assert made.steps[:2] == [[1], [3]]
    assert (document["ids"], document["usage"]) == (alone["ids"], alone["usage"])
    assert list(document["draft"]) == KEYS
    draft = document["draft"]
    assert draft["steps"] + draft["accepted"] == len(document["ids"])
    assert draft["drafted"] == 2 * (draft["steps"] - 1)  # none in the step that reads the prompt
    share = round(100 * draft["accepted"] / draft["drafted"])
    line = (
        rf"drafts: {draft['tokens_per_step']:.1f} tokens per step, {share} % of {draft['drafted']} accepted \(mtp\)\n"
    )
    assert re.search(rf"^{line}\d+ tokens; first", several.err, re.MULTILINE)


def test_several_answers_have_one_report(dsv4, monkeypatch, tmp_path):
    ManyTokens(monkeypatch)
    samples = ("run", "hi", "--model", SMALL, "--max-tokens", "7", "--seed", "1", "-n", "3", "--draft", "off")
    document = json.loads(dsv4(*samples, "--json").out)
    assert document["draft"]["tokens_per_step"] == 7 / 3
    assert all("draft" not in answer for answer in document["answers"])
    assert "\ndrafts: 2.3 tokens per step, 100 % of 12 accepted (mtp)\n3 answers, 21 tokens;" in dsv4(*samples).err
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "hi"}\n{"prompt": "you"}\n', encoding="utf-8")
    many = dsv4("run", "--prompts", str(lines), *samples[2:8], "--draft", "off")
    assert "\ndrafts: 2.3 tokens per step, 100 % of 8 accepted (mtp)\n2 answers, 14 tokens;" in many.err


@pytest.mark.slow  # test_run.py has the keys of a line
def test_a_line_of_many_is_the_same_with_drafts(dsv4, tmp_path):
    """It has nothing of how it came about: neither drafts nor times."""
    file = tmp_path / "lines.jsonl"
    file.write_text('{"prompt": "What is 17 + 25?"}\n{"prompt": "Hello!"}\n', encoding="utf-8")
    ask = ("run", "--prompts", str(file), "--seed", "1")
    without, several, silent = dsv4(*ask, "--draft", "off"), dsv4(*ask, "--draft", "3"), dsv4(*ask, "--json")
    assert without.out == several.out == silent.out
    assert [list(json.loads(line)) for line in without.out.splitlines()] == [LINE, LINE]
    assert len(re.findall("^drafts: ", several.err, re.MULTILINE)) == 1
    assert ("drafts: " in without.err, silent.err) == (False, "")


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (DraftReport("dspark", 9, 0, 0, [], 9), "drafts: none (dspark)\n"),
        (DraftReport("mtp", 1000, 2500, 1605, [800, 805], 2605), "2.6 tokens per step, 64 % of 2,500 accepted (mtp)\n"),
        (DraftReport("mtp", 0, 0, 0, [], 0), ""),
    ],
)
def test_what_drafts_came_to_in_words(dsv4, monkeypatch, report, line):
    monkeypatch.setattr(Engine, "draft_report", lambda engine: report)
    done = dsv4("run", "hi", "--model", SMALL, "--max-tokens", "1")
    assert line in done.err
    assert ("drafts" in done.err) is bool(line)


@pytest.mark.parametrize("most", [3, *slow(2, 7)])
@pytest.mark.parametrize(
    ("stops", "said", "content", "tokens"),
    [
        (["STOP"], "one STO two STOP three", "one STO two ", 16),
        (["zzz", "two", "STOP"], "one STO two STOP three", "one STO ", 11),
        (["<"], "one", "one", 4),
    ],
)
def test_a_stop_string_cuts_inside_a_step(dsv4, monkeypatch, most, stops, said, content, tokens):
    ManyTokens(monkeypatch, most)
    options = [word for stop in stops for word in ("--stop", stop)]
    dsv4.model_says(said + " " * most)  # so many tokens of the step are drawn behind the stop string
    done = dsv4("run", "hi", "--model", SMALL, *options, "--json", "--draft", "off")
    document = json.loads(done.out)
    if said == "one":
        tokens += most
        content += " " * most
    assert (document["content"], document["finish_reason"], len(document["ids"])) == (content, "stop", tokens)
    assert document["usage"]["completion_tokens"] == tokens


@pytest.mark.parametrize("most", [3, *slow(2, 7)])
def test_limits_end_inside_a_step(dsv4, monkeypatch, most):
    def ask():
        options = ("--model", SMALL, "--max-tokens", "9", "--logprobs", "2", "--seed", "1", "--json", "--draft", "off")
        document = json.loads(dsv4("run", "hi", *options).out)
        return [document[key] for key in ("ids", "content", "finish_reason", "logprobs")]

    expected = ask()
    ManyTokens(monkeypatch, most)
    assert ask() == expected
    assert len(expected[0]) == 9
