"""`dsv4 eval --url`: the questions and rulings of `dsv4 eval`, with the answers of a server."""

import json
import subprocess
import sys

import pytest

from dsv4cli.engine.chat import remote_pool
from dsv4cli.engine.evaluation.results import read_results
from tests.support.chat_server import MODEL, ChatServer, Says
from tests.support.program import ROOT, SMALL, Program
from tests.support.serving import served

QUESTIONS = [
    {"id": "a", "prompt": "What is 1 + 2?", "answer": "3", "score": "numeric"},
    {"id": "b", "prompt": "What is 2 + 2?", "answer": "4", "score": "numeric", "think": True},
    {"id": "c", "prompt": "Say x.", "answer": "x", "score": "exact"},
]
SCORED = [
    {"id": "d", "prompt": "Which?", "choices": ["p", "q"], "answer": "q", "score": "choice"},
    {"id": "e", "prompt": "What is 3 + 4?", "answer": "3 + 4 = 7.", "score": "continuation"},
]


@pytest.fixture
def server():
    with ChatServer().running() as one:
        yield one


@pytest.fixture
def program(monkeypatch, capsys):
    monkeypatch.setattr(remote_pool, "PAUSES", (0.0,))
    return Program(monkeypatch, capsys)


@pytest.fixture
def dsv4(program, server):
    return lambda *arguments: program("eval", "--url", server.url, "--concurrency", "1", *arguments)


def written(path, questions):
    path.write_text("".join(json.dumps(one) + "\n" for one in questions))
    return str(path)


@pytest.fixture
def questions(tmp_path):
    return written(tmp_path / "questions.jsonl", QUESTIONS)


def test_answers_are_judged(dsv4, server, questions):
    server.script = [Says(["It is 3."]), Says(["5"], ["Hm."]), Says(["x"], finish="length")]
    done = dsv4(questions, "--json", "--temperature", "0", "--max-tokens", "50")
    found = json.loads(done.out)
    assert (done.code, found["model"]) == (0, MODEL)
    assert (found["correct"], found["wrong"], found["cut"]) == (1, 1, 1)
    assert (found["tokens"], found["prompt_tokens"]) == (15, 60)
    assert found["settings"]["temperature"] == 0.0
    assert [one["seed"] for one in server.bodies] == [0, 1, 2]
    assert [one["reasoning_effort"] for one in server.bodies] == ["none", "low", "none"]
    assert {one["max_tokens"] for one in server.bodies} == {50}


def test_a_results_file_is_continued_and_compared(dsv4, server, questions, tmp_path):
    out = tmp_path / "results.jsonl"
    server.script = [Says(["3"]), Says(status=503, message="full"), Says(["4"]), Says(status=500, message="broken")]
    done = dsv4(questions, "--out", str(out))
    assert done.code == 6
    assert "c: " not in done.err  # the server's failure, not the question's
    assert f"2 of 3 results are in {out}; run the same command again to continue" in done.err
    server.script = [Says(["x"])]
    assert "3" in dsv4(questions, "--out", str(out)).out
    assert len(server.bodies) == 5
    header, outcomes = read_results(out)
    assert (header["model"], header["weights"]) == (MODEL, f"server:{MODEL}")
    assert [one.ruling for one in outcomes.values()] == ["correct"] * 3
    server.script = [Says(["x"])]
    done = dsv4(questions, "--against", str(out), "--json")
    assert json.loads(done.out)["against"]["model"] == MODEL
    done = dsv4(questions, "--out", str(out), "--think", "high")
    assert done.code == 2
    assert "results of other settings: think off, now high" in done.err


def test_a_part_asks_its_questions_only(dsv4, server, questions):
    server.script = [Says(["4"])]
    done = dsv4(questions, "--shard", "2/2", "--json")
    assert (json.loads(done.out)["items"], len(server.bodies)) == (1, 1)


def test_what_a_server_cannot_do(dsv4, questions, tmp_path, server):
    for given, reason in (
        (("--tp", "2"), "--tp cannot be combined with --url"),
        (("--against", "nano"), "--against with a second model does not work with --url"),
        (("--model", "flash"), "has no model 'flash'"),
    ):
        done = dsv4(questions, *given)
        assert (done.code, reason in done.err) == (2, True)
    assert not server.bodies
    scored = written(tmp_path / "scored.jsonl", SCORED)
    done = dsv4(scored)
    assert (done.code, "/v1/completions" in done.err) == (6, True)
    server.script = [Says(["q"])]
    found = dsv4(written(tmp_path / "choice.jsonl", SCORED[:1]), "--choices", "answer", "--json")
    assert json.loads(found.out)["correct"] == 1


def test_it_loads_no_torch(server, questions):
    for line in (["run", "Hi"], ["eval", questions]):
        command = [sys.executable, "-X", "importtime", "-m", "dsv4cli", *line, "--url", server.url]
        done = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0
        loaded = {one.rpartition("|")[2].strip().split(".")[0] for one in done.stderr.splitlines()}
        assert "dsv4cli" in loaded
        assert not loaded & {"torch", "triton", "transformers", "huggingface_hub", "tokenizers"}


def same_results(program, tmp_path, model, *arguments):
    """Evaluate in this process and through a server; the outcomes must be the same."""
    paths = [tmp_path / "local.jsonl", tmp_path / "server.jsonl"]
    assert program("eval", *arguments, "--model", model, "--out", str(paths[0])).code == 0
    with served(model) as server:
        assert program("eval", *arguments, "--url", server.url, "--out", str(paths[1])).code == 0
    (_, local), (_, remote) = map(read_results, paths)
    assert local.keys() == remote.keys()
    for index, one in local.items():
        assert (remote[index].ruling, remote[index].given) == (one.ruling, one.given), one.id
        assert remote[index].content == one.content
        assert (remote[index].tokens, remote[index].prompt_tokens) == (one.tokens, one.prompt_tokens)
        assert remote[index].common_prefix == one.common_prefix
        assert remote[index].nll == pytest.approx(one.nll, abs=1e-5)  # other batches round in another order


def test_scores_through_the_own_server(program, tmp_path):
    questions = written(tmp_path / "questions.jsonl", [*SCORED, QUESTIONS[0]])
    same_results(program, tmp_path, SMALL, questions, "--temperature", "0", "--max-tokens", "3")


@pytest.mark.slow
def test_the_built_in_questions_through_the_own_server(program, tmp_path):
    same_results(program, tmp_path, "nano")
