"""`dsv4 profile step --draft` from outside: JSON, tables, baselines, what it refuses."""

import json
from functools import cache

import pytest

from dsv4cli.commands.profile.draft_report import show_drafts
from dsv4cli.engine.checkpoint import source
from dsv4cli.engine.config.presets import TINY, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.profiling import ceilings, clock, drafting, step
from dsv4cli.output import Colours, Output
from tests.support.program import Program

STEP = ("profile", "step", "--model", "random:tiny,layers=1", "--context", "9")
# of this machine: measured by the first command that needs them
CEILINGS = cache(ceilings.measure_ceilings)


@pytest.fixture
def dsv4(monkeypatch, capfd):
    monkeypatch.setattr(clock, "CPU_SECONDS", 0)
    monkeypatch.setattr(ceilings, "measure_ceilings", CEILINGS)
    for module in (step, drafting):
        monkeypatch.setattr(module, "SECONDS", 0)
        monkeypatch.setattr(module, "FEWEST", 2)
    return Program(monkeypatch, capfd)


def test_step_with_drafts(dsv4, tmp_path):
    done = dsv4(*STEP, "--draft", "2", "--accept", "1.5", "--batch", "2", "--json")
    assert (done.code, done.err) == (0, "")
    draft = json.loads(done.out)["draft"]
    assert (draft["drafter"], draft["drafts"], draft["accept"], draft["temperature"]) == ("mtp", 2, 1.5, 1)
    assert [line["name"] for line in draft["rows"]] == ["verify 1 row", "verify 2 rows", "verify 3 rows"]
    assert [line["rows"] for line in draft["rows"]] == [line["computed"] for line in draft["rows"]] == [1, 2, 3]
    last, (token,) = draft["rows"][-1], draft["seconds_per_token"]
    parts = [line["median"] for line in (last["seconds"], last["sampling"], draft["drafting"]["seconds"])]
    assert draft["step_seconds"] == pytest.approx(sum(parts))
    assert token["seconds"] == pytest.approx(draft["step_seconds"] / 1.5)
    assert token["tokens_per_second"] == pytest.approx(2 / token["seconds"])
    assert draft["break_even"] == pytest.approx(draft["step_seconds"] / draft["without"]["seconds"])
    assert [line["launches"] for line in (last, draft["drafting"])] == [None, None]
    path = tmp_path / "old.json"
    path.write_text(done.out)
    changed = dsv4(*STEP, "--draft", "1", "--baseline", str(path), "--json")
    found = {line["name"]: line["verdict"] for line in json.loads(changed.out)["baseline"]["changes"]}
    assert found["verify 2 rows"] is not None
    assert (found["draft 1 token"], found["verify 3 rows"], found["draft 2 tokens"]) == (None, None, None)


@pytest.mark.slow  # test_whether_drafts_pay has its words
def test_step_with_drafts_for_people(dsv4):
    assert '"draft": null' in dsv4(*STEP, "--json").out
    done = dsv4(*STEP, "--draft", "1")
    assert done.code == 0
    # the drafter is loaded for this only
    assert done.err.splitlines()[0] != dsv4(*STEP).err.splitlines()[0]
    assert max(map(len, done.out.splitlines())) <= 80
    assert "mtp, 1 per step, temperature 1" in done.out
    assert "share few experts" in done.out
    starts = [line.split("  ")[0] for line in done.out.splitlines()]
    end = starts[starts.index("drafts") :]
    assert end[:8] == ["drafts", "step", "", "", "break-even", "", "rows", "1"]
    assert end[8:14] == ["2", "", "accepted length", "no drafts", "1", "2"]


@pytest.mark.parametrize(
    ("break_even", "launches", "words"),
    [
        (1.25, None, "1.25 tokens per step; drafts pay above that"),
        (2.5, None, "2.50 tokens per step, but the maximum is 2: these drafts never pay"),
        (1.25, {"count": 1234, "busy_seconds": 1.0}, "1,234 to verify, 1,234 to draft"),
    ],
)
def test_whether_drafts_pay(capfd, break_even, launches, words):
    seconds = {"median": 1e-3, "low": 1e-3, "high": 1e-3}
    rows = [{"rows": rows, "computed": 2 * rows - 1, "seconds": seconds, "sampling": seconds} for rows in (1, 2)]
    token = {"accepted": 2.0, "seconds": 1e-3, "tokens_per_second": 1000.0, "speedup": 1.0}
    show_drafts(
        Output(Colours()),
        {
            "drafter": "mtp", "drafts": 1, "temperature": 0.0, "rows": [line | {"launches": launches} for line in rows],
            "drafting": {"seconds": seconds, "share": 0.5, "launches": launches}, "step_seconds": 1e-3,
            "without": token, "seconds_per_token": [token], "break_even": break_even,
        },
    )  # fmt: skip
    said = capfd.readouterr().out
    assert words in said
    assert "2, computed as 3" in said
    assert ("kernels" in said) == (launches is not None)


def test_a_model_without_a_drafter(dsv4, monkeypatch):
    bare = source.RandomSource("bare", parse_config(shortened(TINY, 1, 8), "bare").without_drafter(), 1)
    monkeypatch.setattr(source, "resolve_model", lambda text: bare)
    done = dsv4(*STEP, "--draft", "3")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: bare has no drafter, and --draft 3 needs one")
    assert '"draft": null' in dsv4(*STEP, "--draft", "auto", "--json").out


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--draft", "7", "--batch", "16"], "16 x 8 rows"),
        (["--draft", "3", "--tokens", "2"], "--tokens 2"),
        (["--draft", "3", "--accept", "4.5"], "--accept 4.5"),
        (["--accept", "2"], "--accept 2"),
        (["--draft", "8"], "--draft"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refusals(dsv4, arguments, word):
    done = dsv4("profile", "step", *arguments)
    assert (done.code, done.out) == (2, "")
    sentence, remedy = done.err.splitlines()
    assert sentence.startswith("error: ")
    assert word in sentence
    assert remedy.startswith("→ ")
