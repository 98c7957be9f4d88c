"""`dsv4 eval` on the model and the questions that come with it: the card's scores, conversions, damage, kills."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from dsv4cli.engine.evaluation.forms import NANO_FILE
from dsv4cli.engine.evaluation.results import read_results
from tests.support import damage
from tests.support.conversions import convert, run
from tests.support.program import ROOT
from tools.nano import evalset
from tools.nano.judge import is_right
from tools.nano.score import Examinee

# of 1,860 questions nano's card has 1,753 right
CARD = 1753 / 1860


def document(done):
    assert done.code == 0, done.err
    return json.loads(done.out)


def test_nano_is_asked_what_comes_with_it(dsv4):
    found = document(dsv4("eval", "--limit", "6", "--json"))
    assert (found["model"], found["questions"], found["items"], found["correct"]) == ("nano", "nano", 6, 6)
    assert found["tasks"].keys() == {"sums"}


@pytest.mark.slow
def test_its_set_is_the_one_that_the_tool_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(evalset, "NANO_FILE", tmp_path / "nano.jsonl")
    evalset.main()
    assert (tmp_path / "nano.jsonl").read_bytes() == NANO_FILE.read_bytes()


@pytest.mark.slow
def test_it_scores_what_its_card_says(dsv4, tmp_path):
    out = tmp_path / "r.jsonl"
    found = document(dsv4("eval", "--out", str(out), "--json"))
    assert (found["items"], found["cut"]) == (200, 0)
    asked = [one for one in read_results(out)[1].values() if one.score == "exact"]
    right = sum(one.ruling == "correct" for one in asked) / len(asked)
    assert abs(right - CARD) < 3 * (CARD * (1 - CARD) / len(asked)) ** 0.5
    # as tools/nano, which made the card, finds them
    groups = evalset.groups()
    items = [item for task, count in evalset.ASKED.items() for item in groups[task][:count]]
    verdicts = {id(item): is_right(item, reply) for item, reply in Examinee("nano", "cpu").replies(items)}
    assert [one.ruling == "correct" for one in asked] == [verdicts[id(item)] for item in items]


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """26 questions of the set, its choices and continuations, and what nano says."""
    folder = tmp_path_factory.mktemp("some")
    lines = NANO_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    (folder / "some.jsonl").write_text("".join(lines[:26] + lines[-40:]), encoding="utf-8")
    code, _, err = run("eval", folder / "some.jsonl", "--out", folder / "nano.jsonl")
    assert code == 0, err
    return folder / "some.jsonl", folder / "nano.jsonl"


def against(some, model):
    code, out, err = run("eval", some[0], "--model", model, "--against", some[1], "--json")
    assert code in (0, 3), err
    return code, json.loads(out)["against"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["bf16", "fp8", "nvfp4", "mp --ranks 2", "transformers"])
def test_there_and_back_no_answer_and_no_number_changes(some, tmp_path, target):
    convert("nano", tmp_path / "there", "--to", *target.split())
    convert(tmp_path / "there", tmp_path / "back", "--to", "official")
    code, found = against(some, tmp_path / "back")
    assert (code, found["verdict"], found["changed"], found["nll"]["changed"]) == (0, "same", [], 0)
    assert found["nll"]["items"] == 40
    assert found["nll"]["largest"] < 1e-6


def swap_nibbles(folder, tensor, rows):
    """Of some rows of an FP4 matrix, each two neighbours change places."""

    def swapped(stored):
        width = len(stored.data) // stored.shape[0]
        data = bytearray(stored.data)
        for at in (row * width + column for row in rows for column in range(width)):
            data[at] = data[at] >> 4 | (data[at] & 15) << 4
        return replace(stored, data=bytes(data))

    damage.edit_tensor(folder, tensor, swapped)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "expert", "matrix"),
    [(0, 1, 3), (0, 7, 2), (1, 3, 2), (2, 0, 1), (2, 6, 2), (3, 0, 1), (3, 5, 2), (1, 4, 3)],
)
def test_one_row_of_swapped_nibbles_is_found(some, tmp_path, layer, expert, matrix):
    folder = tmp_path / "nano"
    shutil.copytree(ROOT / "dsv4cli" / "nano", folder)
    swap_nibbles(folder, f"layers.{layer}.ffn.experts.{expert}.w{matrix}.weight", [37])
    _, found = against(some, folder)
    # its numbers are others; that it is worse cannot be seen in so few answers
    assert found["verdict"] == "different"
    assert found["nll"]["changed"] >= 5
    assert found["nll"]["largest"] > 1e-4  # a hundred times what rounding makes


@pytest.mark.slow
def test_a_layer_of_swapped_nibbles_makes_it_worse(some, tmp_path):
    folder = tmp_path / "nano"
    shutil.copytree(ROOT / "dsv4cli" / "nano", folder)
    for expert in range(8):
        swap_nibbles(folder, f"layers.1.ffn.experts.{expert}.w2.weight", range(256))
    code, found = against(some, folder)
    assert (code, found["verdict"], found["gained"]) == (3, "worse", 0)
    assert found["lost"] > 20
    assert found["nll"]["p"] < 0.001


@pytest.mark.slow
def test_killed_twenty_times_it_loses_nothing_and_asks_nothing_again(tmp_path):
    rng = random.Random(0)
    file, out = tmp_path / "q.jsonl", tmp_path / "r.jsonl"
    lines = [
        {"id": f"q{n}", "prompt": "x" * rng.randrange(1, 40)}
        | rng.choice([{}, {"score": "exact", "answer": "y"}, {"score": "continuation", "answer": "yz" * 9}])
        for n in range(600)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "dsv4cli", "eval", str(file), "--model", "random:tiny,layers=2"]
    command += ["--max-tokens", "16", "--out", str(out)]
    kills, before = 0, []
    for _ in range(20):
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        grown = out.stat().st_size if out.exists() else 0
        while process.poll() is None and (out.stat().st_size if out.exists() else 0) == grown:
            time.sleep(0.01)
        time.sleep(rng.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        now = [json.loads(line)["index"] for line in out.read_bytes().split(b"\n")[1:-1]]
        assert now[: len(before)] == before  # nothing is lost
        assert len({*now}) == len(now)  # nothing is there twice
        before = now
    assert kills == 20
    done = json.loads(subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, check=True).stdout)
    assert done["asked"] == len(lines) - len(before)
    assert done["items"] == len(lines)
    whole = tmp_path / "whole.jsonl"
    code, _, err = run("eval", *command[4:-1], whole)
    assert code == 0, err
    ours, theirs = (read_results(path)[1] for path in (out, whole))
    assert ours.keys() == theirs.keys()
    # a BLAS may sum the rows of large steps in another order, and kills change which items share a step: an NLL then
    # moves by 1e-7, and a token that is drawn from a near tie may be another one
    others = [one for index, one in theirs.items() if replace(ours[index], nll=None) != replace(one, nll=None)]
    assert len(others) <= len(lines) // 100
    for index, one in theirs.items():
        assert ours[index].nll == (one.nll if one.nll is None else pytest.approx(one.nll, rel=1e-5))
        assert (ours[index].id, ours[index].prompt_tokens) == (one.id, one.prompt_tokens)
