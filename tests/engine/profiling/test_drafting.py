"""What is timed of steps with drafts: rows, the drafter's part, over the same places; and what is refused."""

import pytest
import torch

from dsv4cli.engine.config.presets import TINY
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.profiling import drafting
from dsv4cli.engine.profiling.clock import Timing
from dsv4cli.engine.profiling.drafting import DraftLoad, DraftProfile, VerifiedRows, choose_drafts, profile_drafts
from dsv4cli.engine.profiling.step import StepShape
from dsv4cli.engine.runtime import runner
from dsv4cli.engine.settings import Drafting, Sampling
from dsv4cli.engine.weights.load import build_random
from dsv4cli.errors import UnsoundResult, UsageError
from tests.support.slow import slow
from tests.support.synthetic import DSPARK

CPU = torch.device("cpu")
SAMPLING = Sampling(0.7, 0.9)
SHORT = TINY | {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}


@pytest.fixture(scope="module")
def models():
    return {
        name: build_random(parse_config(values, name), Numerics.reference())
        for name, values in (("mtp", SHORT), ("dspark", DSPARK))
    }


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(drafting, "SECONDS", 0)
    monkeypatch.setattr(drafting, "FEWEST", 1)
    monkeypatch.setattr(drafting, "WARM", 1)


@pytest.mark.parametrize("name", [*slow("mtp"), "dspark"])
def test_each_number_of_rows_is_one_step_of_the_runner(models, monkeypatch, name):
    steps, drafted, watched, filled = [], [], [], []
    nothing_compiles, fill = drafting.nothing_compiles, drafting.fill
    monkeypatch.setattr(drafting, "nothing_compiles", lambda: watched.append(len(steps)) or nothing_compiles())
    monkeypatch.setattr(drafting, "fill", lambda cache: filled.append(cache.blocks) or fill(cache))
    run, speculate = runner.Runner.run, runner.Runner.speculate

    def running(self):
        assert [one.sequence.length for one in self.scheduler.active] == [130, 130]
        ran = run(self)
        steps.append([(chunk.first, chunk.ids) for chunk in ran.chunks])
        assert all(chunk.request.sampling == SAMPLING for chunk in ran.chunks)
        return ran

    def speculating(self, ran, tokens, considered, count):
        drafted.append((len(tokens), considered, count))
        return speculate(self, ran, tokens, considered, count)

    monkeypatch.setattr(runner.Runner, "run", running)
    monkeypatch.setattr(runner.Runner, "speculate", speculating)
    found = profile_drafts(models[name], StepShape(1, 130, 2), DraftLoad(2), SAMPLING, CPU)
    assert (found.drafter, [(one.rows, one.computed) for one in found.rows]) == (name, [(1, 1), (2, 2), (3, 3)])
    assert (found.launches, found.rows[0].launches) == (None, None)
    # always after 130 tokens of both sequences, which have other tokens
    assert {first for one in steps for first, _ in one} == {130}
    assert all(len(ids) == len(other) for (_, ids), (_, other) in steps)
    assert all(ids != other for (_, ids), (_, other) in steps)
    assert len(filled) == 1
    assert filled[0] > 0
    # of each number of rows one step that may compile, then these take turns, then each is looked at
    assert watched == [3]
    assert [len(one[0][1]) for one in steps] == [1, 2, 3, 1, 2, 3, 1, 2, 3, 3]
    # only behind all rows, any of which may be accepted
    assert len(drafted) == 3
    assert all(one == (6, [2, 2], 2) for one in drafted)


def test_each_time_is_that_between_two_marks(models, monkeypatch):
    class Watch(drafting.Stopwatch):
        def seconds(self):
            return [1.0, 2.0, 4.0][: len(super().seconds())]

    monkeypatch.setattr(drafting, "Stopwatch", Watch)
    found = profile_drafts(models["mtp"], StepShape(1, 5, 1), DraftLoad(1), Sampling(), CPU)
    assert [(one.seconds.median, one.sampling.median) for one in found.rows] == [(1.0, 2.0)] * 2
    assert found.drafting.median == 4.0


@pytest.mark.slow  # captured steps are those of a GPU
def test_a_captured_step_may_have_more_rows_than_asked_for(models, monkeypatch):
    monkeypatch.setattr(runner, "captures", lambda device: True)
    found = profile_drafts(models["mtp"], StepShape(1, 0, 1), DraftLoad(4), Sampling(0.0), CPU)
    assert [(one.rows, one.computed) for one in found.rows] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6)]


def test_a_drafter_that_is_not_finite_is_unsound(models, monkeypatch):
    speculate = runner.Runner.speculate
    broken = lambda *inputs: speculate(*inputs) * float("nan")  # noqa: E731
    monkeypatch.setattr(runner.Runner, "speculate", broken)
    with pytest.raises(UnsoundResult):
        profile_drafts(models["mtp"], StepShape(1, 5, 1), DraftLoad(1), Sampling(), CPU)


def test_logits_that_are_not_finite_are_unsound(models, monkeypatch):
    logits = models["mtp"].logits
    monkeypatch.setattr(models["mtp"], "logits", lambda streams: logits(streams) * float("nan"))
    with pytest.raises(UnsoundResult):
        profile_drafts(models["mtp"], StepShape(1, 5, 1), DraftLoad(1), Sampling(), CPU)


def timing(seconds):
    return Timing(seconds, seconds, seconds, 5, "host")


def profile_of(drafts, accept=None, sequences=1):
    rows = [VerifiedRows(1, 1, timing(8.0), timing(2.0), None), VerifiedRows(2, 2, timing(9.0), timing(3.0), None)]
    return DraftProfile("mtp", DraftLoad(drafts, accept), sequences, Sampling(), rows, timing(4.0), None)


def test_what_a_token_takes():
    record = profile_of(1, sequences=3).record()
    assert (record["step_seconds"], record["break_even"]) == (16.0, 1.6)
    assert record["drafting"]["share"] == 0.25
    assert record["without"] == {"seconds": 10.0, "tokens_per_second": pytest.approx(0.3), "speedup": 1.0}
    assert record["seconds_per_token"] == [
        {"accepted": 1.0, "seconds": 16.0, "tokens_per_second": 3 / 16, "speedup": 0.625},
        {"accepted": 2.0, "seconds": 8.0, "tokens_per_second": 3 / 8, "speedup": 1.25},
    ]
    (line,) = profile_of(1, accept=1.6).record()["seconds_per_token"]
    assert (line["accepted"], line["seconds"], line["speedup"]) == (1.6, 10.0, 1.0)


CONFIG = parse_config(SHORT, "tiny")


def test_what_may_be_asked_for():
    dspark = parse_config(DSPARK, "tiny")
    assert choose_drafts(CONFIG, StepShape(1, 0, 1), Drafting(0), None) is None
    assert choose_drafts(CONFIG, StepShape(1, 0, 8), Drafting(7), 8.0) == DraftLoad(7, 8.0)
    assert choose_drafts(CONFIG, StepShape(1, 0, 32), Drafting(1), 1.0) == DraftLoad(1, 1.0)
    assert choose_drafts(dspark, StepShape(1, 0, 1), Drafting(5), None).accepted == [1, 2, 3, 4, 5, 6]
    most = CONFIG.max_position_embeddings - 16
    assert choose_drafts(CONFIG, StepShape(1, most, 1), Drafting(7), None) == DraftLoad(7)


def test_auto_is_what_is_usual_for_the_drafter():
    dspark, load = parse_config(DSPARK, "tiny"), StepShape(1, 0, 1)
    assert choose_drafts(CONFIG, load, Drafting(None), 4.0) == DraftLoad(3, 4.0)
    assert choose_drafts(dspark, load, Drafting(None), None) == DraftLoad(5)
    assert choose_drafts(CONFIG.without_drafter(), load, Drafting(None), None) is None


@pytest.mark.parametrize(
    ("values", "load", "drafts", "accept", "words"),
    [
        (SHORT, StepShape(1, 0, 1), 0, 2.0, ["--accept 2", "add --draft 3"]),
        (SHORT, StepShape(5, 0, 1), 3, None, ["--tokens 5", "remove --tokens"]),
        (DSPARK, StepShape(1, 0, 1), 6, None, ["at most 5 draft tokens", "use --draft 5"]),
        (SHORT, StepShape(1, 0, 16), 7, None, ["--batch 16", "16 x 8 rows", "use --batch 8 or --draft 3"]),
        (SHORT, StepShape(1, 0, 9), 4, None, ["16 x 5 rows (9 sequences are padded", "--batch 8 or --draft 3"]),
        (SHORT, StepShape(1, 0, 64), 1, None, ["64 x 2 rows", "use --batch 32"]),
        (SHORT, StepShape(1, CONFIG.max_position_embeddings - 15, 1), 1, None, ["no space", "--context 1048560"]),
        (SHORT, StepShape(1, 0, 1), 3, 4.1, ["--accept 4.1", "from 1 to 4"]),
        (SHORT, StepShape(1, 0, 1), 3, 0.9, ["--accept 0.9", "from 1 to 4"]),
        (SHORT, StepShape(1, 0, 1), 3, float("nan"), ["--accept nan", "from 1 to 4"]),
    ],
)
def test_refusals(values, load, drafts, accept, words):
    with pytest.raises(UsageError) as refused:
        choose_drafts(parse_config(values, "tiny"), load, Drafting(drafts), accept)
    said = f"{refused.value} {refused.value.remedy}"
    assert all(word in said for word in words), said
    assert "or --draft 0" not in said


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mtp", "dspark"])
def test_drafts_on_a_gpu(name):
    device = torch.device("cuda")
    model = build_random(parse_config(SHORT if name == "mtp" else DSPARK, name), Numerics.reference(), device="cuda")
    found = profile_drafts(model, StepShape(1, 300, 2), DraftLoad(4), Sampling(), device)
    assert [(one.rows, one.computed) for one in found.rows] == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 6)]
    assert all(one.launches is not None and one.launches.count > 0 for one in found.rows)
    assert found.launches is not None
    assert found.launches.busy > 0
    assert found.drafting.method == "events"
