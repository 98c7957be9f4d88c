"""`dsv4 inspect --for vllm|sglang --gpus`: the flags for a machine or a cluster, with their reasons."""

import json

import pytest

from tests.support.damage import GOLDEN


def test_each_flag_has_its_reason(dsv4):
    done = dsv4("inspect", "nano", "--for", "sglang", "--gpus", "2x4xH100")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "SGLang 0.5.23 would load nano"
    assert next(line for line in lines if "2x4xH100" in line).startswith("2x4xH100: TP4 x DP2, ")
    [reason] = [line for line in lines if line.startswith("--attn-dp-size 2 ")]
    assert "replicas of the attention" in reason
    commands = [line for line in lines if line.startswith("→")]
    assert [line.partition(": ")[0] for line in commands] == ["→ machine 0", "→ machine 1"]
    assert "--node-rank 1" in commands[1]
    printed = dsv4("serve", "nano", "--engine", "sglang", "--gpus", "2x4xH100", "--print").out.splitlines()
    assert [line.partition(": ")[2] for line in commands] == printed[1::2]


def test_the_plan_is_in_the_document(dsv4):
    verdict = json.loads(dsv4("inspect", "nano", "--for", "vllm", "--gpus", "H100", "--json").out)["verdict"]
    plan = verdict["deployment"]
    assert (plan["engine"], plan["gpus"], len(plan["commands"])) == ("vLLM 0.33.0", "1xH100", 1)
    without = json.loads(dsv4("inspect", "nano", "--for", "vllm", "--json").out)["verdict"]
    assert without["deployment"] is None
    assert without["command"] == verdict["command"]


@pytest.mark.parametrize(
    ("gpus", "reason"), [("8xA100", "need Hopper or Blackwell"), ("2x1GB", "does not fit on 2x1GB")]
)
def test_gpus_that_do_not_run_it(dsv4, gpus, reason):
    done = dsv4("inspect", "nano", "--for", "vllm", "--gpus", gpus)
    assert done.code == 3
    assert reason in " ".join(done.out.split())
    assert "dsv4 serve --model" in done.out
    assert "vllm serve" not in done.out


def test_a_model_that_is_not_loaded_has_no_plan(dsv4):
    """It has no tokenizer."""
    done = dsv4("inspect", str(GOLDEN / "tiny-flash"), "--for", "vllm", "--gpus", "8xH100")
    assert done.code == 3
    assert "would not load" in done.out
    assert "TP" not in done.out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--gpus", "8xH100"], "--gpus needs --fit"),
        (["--gpus", "8xH100", "--for", "ds4"], "--gpus needs --fit"),
        (["--gpus", "8xwolf", "--for", "vllm"], "--gpus cannot be"),
        (["--gpus", "2x8xH100", "--for", "vllm", "--fit"], "--gpus cannot be"),
        (["--for", "vllm", "--batch", "2"], "--batch needs --fit"),
    ],
)
def test_refusals(dsv4, words, complaint):
    done = dsv4("inspect", "nano", *words)
    assert done.code == 2
    assert complaint in done.err
