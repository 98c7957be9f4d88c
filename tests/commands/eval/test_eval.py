"""`dsv4 eval`: streams, exit codes, the keys of --json; results that survive what ends a run; two models in pairs."""

import json
import re
import shutil
from pathlib import Path

import pytest

from dsv4cli.engine.evaluation import eval_request as engine_asking
from dsv4cli.engine.evaluation.results import read_results
from tests.support.program import ROOT, SMALL
from tests.support.slow import slow_rows

FAST = ("--model", SMALL, "--max-tokens", "3", "--draft", "off")
OTHER = "random:tiny,layers=1,seed=1"
LINES = [
    {"id": "a", "prompt": "x", "score": "exact", "answer": "y", "task": "one"},
    {"id": "b", "prompt": "x", "score": "continuation", "answer": "yz", "task": "two"},
    {"id": "c", "prompt": "x", "score": "choice", "choices": ["y", "z"], "answer": "y", "task": "two"},
    {"id": "d", "prompt": "xx", "score": "numeric", "answer": "3", "task": "one"},
    {"id": "e", "prompt": "xx"},
    {"id": "f", "prompt": "x", "score": "choice", "choices": ["u", "v"], "answer": "v", "task": "two"},
]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text("\n".join(map(json.dumps, LINES)))
    return str(path)


@pytest.fixture
def out(tmp_path):
    return tmp_path / "r.jsonl"


def document(done):
    assert (done.code, done.err) == (0, "")
    return json.loads(done.out)


def test_one_document_says_all(dsv4, file):
    found = document(dsv4("eval", file, *FAST, "--json"))
    assert (found["schema"], found["model"], found["form"], found["items"]) == ("dsv4.eval/1", SMALL, "dsv4", 6)
    assert found["correct"] + found["wrong"] == 3
    assert (found["cut"], found["unjudged"], found["asked"]) == (3, 0, 6)  # 3 tokens of random text have no end
    assert found["score"] == found["correct"] / 3
    assert found["seconds"] > 0
    assert found["tokens"] == 9 + 2 + 2 + 2
    assert found["continuations"]["items"] == 1
    assert found["continuations"]["tokens"] == 2
    assert {name: one["items"] for name, one in found["tasks"].items()} == {"one": 2, "two": 3, "": 1}
    assert found["settings"]["seed"] == 0
    assert found == {**document(dsv4("eval", file, *FAST, "--json")), "seconds": found["seconds"]}


def test_people_get_a_table_and_what_the_score_leaves_out(dsv4, file):
    done = dsv4("eval", file, *FAST, "--limit", "4")
    assert done.code == 0
    lines = done.out.splitlines()
    assert lines[0].split() == ["task", "items", "correct", "wrong", "cut", "score"]
    assert [line.split()[:2] for line in lines[1:4]] == [["one", "2"], ["two", "2"], ["all", "4"]]
    assert "excludes 2 answers cut off at the limit" in lines[4]
    assert lines[5].startswith("continuations: NLL ")
    assert "q.jsonl: 4 questions in the format dsv4" in done.err
    assert "raise --max-tokens" in done.err
    assert dsv4("eval", file, *FAST, "--limit", "1", "-q").err == ""


def stopping_after(patch, count, error):
    """The run is ended when so many results are there."""
    carry_out = engine_asking.carry_out

    def some(*given, **named):
        for number, outcome in enumerate(carry_out(*given, **named), 1):
            yield outcome
            if number == count:
                raise error

    patch.setattr(engine_asking, "carry_out", some)


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt, 130), pytest.param(SystemExit(143), 143, marks=pytest.mark.slow)]
)
def test_the_same_command_asks_what_is_missing(dsv4, file, out, monkeypatch, error, code):
    whole = document(dsv4("eval", file, *FAST, "--json"))
    command = ("eval", file, *FAST, "--out", str(out))
    with monkeypatch.context() as patch:
        stopping_after(patch, 2, error)
        stopped = dsv4(*command)
    assert stopped.code == code
    assert f"2 of 6 results are in {out}; run the same command again to continue" in stopped.err
    told = dsv4("eval", file, *FAST, "--out", shutil.copy(out, out.with_name("copy.jsonl"))).err
    assert re.search(r"\n4 questions in .* s; \d+ tokens of all answers and texts, \d+ of all prompts\n", told)
    first = read_results(out)[1]
    out.write_text(out.read_text() + '{"index": 0, "id')  # a kill cut it off
    done = document(dsv4(*command, "--json"))
    assert done["asked"] == 4
    assert {**done, "seconds": 0, "asked": 6} == {**whole, "seconds": 0}
    header, found = read_results(out)
    assert [*found] == list(range(6))
    assert all(found[index] == one for index, one in first.items())
    assert header["items"] == 6
    before, again = out.read_bytes(), dsv4(*command)
    assert (again.code, out.read_bytes()) == (0, before)
    assert "already had 6 results" in again.err
    assert " on cpu: " not in again.err  # no model was loaded


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        (("--seed", "1"), "results of other settings: seed 0, now 1"),
        *slow_rows(
            (("--model", OTHER), "results of another model"),
            (("--limit", "2"), "results of other questions"),
            (("--max-tokens", "4"), "max_tokens 3, now 4"),
            (("--choices", "answer"), "choices likelihood, now answer"),
        ),
    ],
)
def test_results_of_something_else_are_refused(dsv4, file, out, more, complaint):
    dsv4("eval", file, *FAST, "--limit", "1", "--out", str(out))
    done = dsv4("eval", file, *FAST, "--limit", "1", "--out", str(out), *more)
    assert done.code == 2
    assert complaint in done.err


def test_a_model_against_itself_and_another(dsv4, file, out):
    found = document(dsv4("eval", file, *FAST, "--against", SMALL, "--json"))["against"]
    assert (found["verdict"], found["changed"], found["nll"]["changed"]) == ("same", [], 0)
    assert (found["nll"]["items"], found["compared"], found["p"]) == (3, 3, 1)
    done = dsv4("eval", file, *FAST, "--against", OTHER, "--out", str(out))
    assert done.code == 0
    assert "differ, but neither is significantly better\n" in done.out
    assert "nats per token, no verdict, because fewer than 8 items differ; 3 of 3 differ by more than 1e-06" in done.out
    beside = out.with_name("r.against.jsonl")
    assert read_results(beside)[0]["model"] == OTHER
    stored = dsv4("eval", file, *FAST, "--against", str(beside), "--out", str(out))
    assert stored.out == done.out
    assert " on cpu: " not in stored.err
    same = dsv4("eval", file, *FAST, "--against", str(out))
    assert f"{SMALL} and {SMALL} have the same answers and the same numbers\n" in same.out


def test_other_results_must_be_of_the_same_questions_and_whole(dsv4, file, out):
    dsv4("eval", file, *FAST, "--limit", "2", "--out", str(out))
    done = dsv4("eval", file, *FAST, "--limit", "3", "--against", str(out))
    assert (done.code, "are for other questions" in done.err) == (2, True)
    out.write_text("".join(out.read_text().splitlines(keepends=True)[:2]))
    done = dsv4("eval", file, *FAST, "--limit", "2", "--against", str(out))
    assert (done.code, "has 1 of 2 results" in done.err) == (2, True)


def nll(path, change):
    """The file of results with other numbers."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line) if "index" in line else line) + "\n" for line in lines))


def test_the_answer_is_no_where_the_model_is_worse(dsv4, out, tmp_path):
    file = tmp_path / "many.jsonl"
    lines = [{"prompt": f"x{n}", "score": "choice", "choices": ["y", "z"], "answer": n % 2} for n in range(12)]
    file.write_text("\n".join(map(json.dumps, lines)))
    dsv4("eval", str(file), *FAST, "--out", str(out))
    nll(out, lambda line: line | {"nll": line["nll"] - 1 - line["index"] / 100, "ruling": "correct"})
    done = dsv4("eval", str(file), *FAST, "--against", str(out))
    assert done.code == 3
    assert f"{SMALL} is significantly worse than {SMALL}\n" in done.out
    nll(out, lambda line: line | {"nll": line["nll"] + 5, "ruling": "wrong"})
    done = dsv4("eval", str(file), *FAST, "--against", str(out))
    assert (done.code, "significantly better than" in done.out) == (0, True)


def test_bad_questions_are_named_before_a_model_is_loaded(dsv4, file, tmp_path):
    done = dsv4("eval", file, *FAST, "--max-context", "5")
    assert done.code == 2
    assert "6 questions of" in done.err
    assert "b: the prompt plus the scored text has" in done.err
    assert " on cpu: " not in done.err
    assert dsv4("eval", str(tmp_path / "none.jsonl")).code == 2
    assert dsv4("eval", file, "--against", str(tmp_path / "none")).code == 1
    assert dsv4("eval", file, "--think", "low").code == 2


def test_questions_may_be_piped_in_for_two_models(dsv4, file):
    done = dsv4("eval", "-", *FAST, "--against", SMALL, stdin=Path(file).read_bytes())
    assert (done.code, "stdin: 6 questions" in done.err) == (0, True)


def test_what_is_wrong_with_the_second_model_is_said_before_the_first_is_asked(dsv4, file, out):
    dsv4("eval", file, *FAST, "--out", str(out.with_name("r.against.jsonl")))
    done = dsv4("eval", file, *FAST, "--out", str(out), "--against", OTHER)
    assert (done.code, "r.against.jsonl has results of another model" in done.err) == (2, True)
    assert " on cpu: " not in done.err


def test_the_second_model_is_asked_as_the_first(dsv4, file, out):
    command = ("eval", file, "--limit", "1", "--max-tokens", "1", "--draft", "off", "--out", str(out))
    assert dsv4(*command, "--model", SMALL, "--against", "nano").code == 0
    own, other = (read_results(path)[0] for path in (out, out.with_name("r.against.jsonl")))
    assert own["settings"] == other["settings"]
    assert own["settings"]["temperature"] == 1.0  # nano alone would take the likeliest token


@pytest.mark.parametrize(
    ("more", "choices"),
    [
        (("--think", "high"), "answer"),
        *slow_rows(((), "likelihood"), (("--think", "high", "--choices", "likelihood"), "likelihood")),
    ],
)
def test_who_thinks_answers_choices(dsv4, file, more, choices):
    found = document(dsv4("eval", file, *FAST, *more, "--json"))
    assert found["settings"]["choices"] == choices
    assert found["cut"] == (5 if choices == "answer" else 3)


def test_torchrun_takes_one_model(dsv4, file, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    done = dsv4("eval", file, *FAST, "--against", OTHER)
    assert (done.code, "compare with --against FILE.jsonl" in done.err) == (2, True)


def test_a_text_that_looks_like_a_token_is_said(dsv4, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"prompt": "<｜User｜>", "score": "choice", "choices": ["a", "b"], "answer": 0}))
    assert "--special-tokens" in dsv4("eval", str(path), *FAST).err


def test_names_from_files_do_no_harm(dsv4, tmp_path):
    path = tmp_path / "q.jsonl"
    line = {
        "id": "a\x1b[2J\n",
        "task": "b\x1b[2J\n",
        "prompt": "x",
        "score": "choice",
        "choices": ["y", "z"],
        "answer": 0,
    }
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "id": "c", "task": "d"}))
    done = dsv4("eval", str(path), *FAST, "--against", OTHER)
    assert "\x1b" not in done.out + done.err
    assert done.out.startswith("task ")


def test_a_pattern_without_end_is_a_warning(dsv4, tmp_path, monkeypatch):
    monkeypatch.setattr("dsv4cli.engine.evaluation.judge.PATTERN_SECONDS", 0.05)
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps({"id": "p", "prompt": "x", "score": "regex", "answer": "(a+)+$"}))
    dsv4.model_says("a" * 60 + "!")
    done = dsv4("eval", str(path), "--model", SMALL)
    assert "warning: p: the pattern took longer than" in done.err


def test_a_copy_of_the_model_is_the_same_model(dsv4, file, out, tmp_path):
    folder = tmp_path / "nano"
    shutil.copytree(ROOT / "dsv4cli" / "nano", folder)
    command = ("eval", file, "--limit", "1", "--max-tokens", "1", "--out", str(out), "--draft", "off")
    dsv4(*command)
    assert "already had 1 result" in dsv4(*command, "--model", str(folder)).err
    (folder / "model.safetensors").touch()
    assert "results of another model" in dsv4(*command, "--model", str(folder)).err
