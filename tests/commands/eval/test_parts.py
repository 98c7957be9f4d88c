"""`dsv4 eval --shard`: parts of the questions, whose results are joined with `cat`."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.program import ROOT, SMALL

FAST = ("--model", SMALL, "--max-tokens", "3", "--draft", "off")
QUESTIONS = 5


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "q.jsonl"
    lines = [
        {"prompt": f"What is {n} + 1?", "score": "choice", "choices": ["y", "z"], "answer": "y"}
        for n in range(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def results(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_joined_parts_are_the_whole(dsv4, file, tmp_path):
    whole, joined = tmp_path / "whole.jsonl", tmp_path / "all.jsonl"
    assert dsv4("eval", file, "--out", str(whole), *FAST).code == 0
    parts = [tmp_path / f"results.{part}.jsonl" for part in (1, 2)]
    for part, path in enumerate(parts, 1):
        done = dsv4("eval", file, "--shard", f"{part}/2", "--out", str(path), *FAST)
        assert (done.code, f"part {part} of 2 has {4 - part}" in done.err) == (0, True)
    assert [[one["index"] for one in results(path)[1:]] for path in parts] == [[0, 2, 4], [1, 3]]
    joined.write_text("".join(path.read_text() for path in parts))
    done = dsv4("eval", file, "--out", str(joined), *FAST)
    assert (done.code, "already had 5 results" in done.err) == (0, True)
    assert joined.read_text() == whole.read_text()


def test_a_part_has_its_own_score_and_may_be_empty(dsv4, file):
    found = json.loads(dsv4("eval", file, "--shard", "2/2", "--json", *FAST).out)
    assert (found["items"], found["asked"]) == (2, 2)
    done = dsv4("eval", file, "--shard", "7/9", "--json", *FAST)
    assert (done.code, json.loads(done.out)["items"], json.loads(done.out)["score"]) == (0, 0, None)
    assert dsv4("eval", file, "--shard", "7/9", *FAST).code == 0


def test_parts_of_other_evaluations_do_not_join(dsv4, file, tmp_path):
    joined = tmp_path / "all.jsonl"
    for part, seed in ((1, "1"), (2, "2")):
        words = ("--shard", f"{part}/2", "--seed", seed, "--out", str(tmp_path / f"{part}.jsonl"))
        assert dsv4("eval", file, *words, *FAST).code == 0
    joined.write_text("".join((tmp_path / f"{part}.jsonl").read_text() for part in (1, 2)))
    done = dsv4("eval", file, "--out", str(joined), "--seed", "1", *FAST)
    assert done.code == 2
    assert f"{joined}, line 5 has results of other settings: seed 1, now 2" in done.err
    assert "join only parts of one evaluation" in done.err


@pytest.mark.parametrize("words", [("--shard", "3/2"), ("--shard", "1/2", "--against", SMALL)])
def test_refusals(dsv4, file, words):
    assert dsv4("eval", file, *words, *FAST).code == 2


@pytest.mark.slow
def test_the_example_of_the_guide_runs(file, tmp_path):
    guide = (ROOT / "docs" / "guides" / "clusters.md").read_text("utf-8")
    [example] = re.findall(r"```bash\n(dsv4 eval .*?)```", guide, re.DOTALL)
    (tmp_path / "dsv4").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dsv4cli "$@"\n', "utf-8")
    (tmp_path / "dsv4").chmod(0o755)
    (tmp_path / "q.jsonl").rename(tmp_path / "questions.jsonl")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "MODEL": SMALL}
    command = ["bash", "-ec", example]
    subprocess.run(command, cwd=tmp_path, env=os.environ | variables, check=True, capture_output=True)
    assert [one["index"] for one in results(tmp_path / "all.jsonl")[1:]] == [*range(QUESTIONS)]
