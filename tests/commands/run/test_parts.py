"""`dsv4 run --shard`: parts of a file of prompts, also as the guide to clusters starts them."""

import json
import os
import re
import subprocess
import sys

import pytest

from dsv4cli.engine.settings import Part, parse_part
from dsv4cli.errors import UsageError
from tests.support.program import ROOT, SMALL

SHORT = ("--model", SMALL, "--max-tokens", "2", "--prefill-chunk", "8", "--draft", "off", "--seed", "3")
GUIDE = (ROOT / "docs" / "guides" / "clusters.md").read_text("utf-8")
LINES = 5


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"What is {number} + 1?"}) for number in range(LINES)))
    return path


def answers(text):
    return [json.loads(line) for line in text.splitlines()]


def test_parts_are_the_whole(dsv4, prompts):
    whole = answers(dsv4("run", "--prompts", str(prompts), *SHORT).out)
    parts = [answers(dsv4("run", "--prompts", str(prompts), "--shard", f"{one}/2", *SHORT).out) for one in (1, 2)]
    assert [[one["index"] for one in part] for part in parts] == [[0, 2, 4], [1, 3]]
    assert sorted([*parts[0], *parts[1]], key=lambda one: one["index"]) == whole


def test_a_part_goes_on_in_its_file(dsv4, prompts, tmp_path):
    command = ("run", "--prompts", str(prompts), "--shard", "2/2", "--out", str(tmp_path / "a.jsonl"), *SHORT)
    assert dsv4(*command).code == 0
    again = dsv4(*command)
    assert (again.code, "already has all 2 answers" in again.err) == (0, True)
    other = dsv4(*command[:4], "1/2", *command[5:])
    assert (other.code, "has answers of another command" in other.err) == (2, True)


def test_a_part_may_be_empty(dsv4, prompts):
    done = dsv4("run", "--prompts", str(prompts), "--shard", "7/9", *SHORT)
    assert (done.code, done.out) == (0, "")
    assert "no prompt belongs to this part" in done.err


def test_each_part_names_the_bad_lines_of_the_file(dsv4, prompts):
    prompts.write_text(prompts.read_text().replace('"What is 2 + 1?"', "2"))
    bad = dsv4("run", "--prompts", str(prompts), "--shard", "2/2", *SHORT)
    assert (bad.code, "line 3" in bad.err) == (2, True)
    skipped = dsv4("run", "--prompts", str(prompts), "--shard", "2/2", "--skip-bad", *SHORT)
    assert (skipped.code, len(answers(skipped.out))) == (0, 2)
    rest = dsv4("run", "--prompts", str(prompts), "--shard", "3/5", "--skip-bad", *SHORT)
    assert (rest.code, rest.out) == (0, "")


def test_prompts_of_a_part_are_shown(dsv4, prompts):
    done = dsv4("run", "--prompts", str(prompts), "--shard", "5/5", "--show-prompt", "--model", SMALL)
    [only] = answers(done.out)
    assert only["text"] == "<｜begin▁of▁sentence｜><｜User｜>What is 4 + 1?<｜Assistant｜></think>"


@pytest.mark.parametrize("words", [["Hi", "--shard", "1/2"], ["--prompts", "q", "--shard", "3/2"]])
def test_refusals(dsv4, words):
    assert dsv4("run", *words).code == 2


def test_the_parts_of_a_list():
    numbers = range(23)
    for count in (1, 2, 5, 40):
        parts = [[number for number in numbers if Part(index + 1, count).has(number)] for index in range(count)]
        assert sorted(number for part in parts for number in part) == [*numbers]
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert parse_part("2/8") == Part(2, 8)
    for text in ("0/2", "3/2", "1", "1/0", "-1/2", "1/2/3"):
        with pytest.raises(UsageError, match="not a valid part"):
            parse_part(text)


def block(language):
    return re.search(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL)[1]


@pytest.fixture
def cluster(prompts, tmp_path, monkeypatch):
    """A folder with `dsv4` on PATH and a stand-in for Ray, where the guide's examples run on this machine."""
    (tmp_path / "dsv4").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m dsv4cli "$@"\n', "utf-8")
    (tmp_path / "dsv4").chmod(0o755)
    (tmp_path / "ray.py").write_text(
        "def remote(**_):\n    return lambda task: setattr(task, 'remote', task) or task\n\n\n"
        "def get(results):\n    return results\n",
        "utf-8",
    )
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{tmp_path}", "MODEL": "nano"}
    return os.environ | variables


@pytest.mark.slow
def test_the_example_for_slurm_runs(cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(block("bash"), "utf-8")
    [count] = map(int, re.findall(r"--array=1-(\d+)", block("bash")))
    for task in range(1, count + 1):
        environment = cluster | {"SLURM_ARRAY_TASK_ID": str(task)}
        subprocess.run(["bash", script], cwd=tmp_path, env=environment, check=True, capture_output=True)
    _check(tmp_path, count)


@pytest.mark.slow
def test_the_example_for_ray_runs(cluster, tmp_path):
    script = tmp_path / "job.py"
    script.write_text(block("python"), "utf-8")
    subprocess.run([sys.executable, script], cwd=tmp_path, env=cluster, check=True, capture_output=True)
    _check(tmp_path, 4)


def _check(folder, count):
    files = sorted(folder.glob("answers.*.jsonl"))
    found = [one["index"] for file in files for one in answers(file.read_text("utf-8"))]
    assert (len(files), sorted(found)) == (count, [*range(LINES)])
