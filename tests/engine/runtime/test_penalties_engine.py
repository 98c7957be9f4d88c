"""Penalties, top-k and min-p in the engine: each token is that of the plain definition, with drafts and without."""

from dataclasses import dataclass, field, replace

import pytest
import torch

from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime import leader_step
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.sampling import logit_masks, token_counts
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.weights.load import build_random
from dsv4cli.kernels.sampling import noise
from tests.support.plain_sampling import plain_chances
from tests.support.slow import slow_rows
from tests.support.small_model import FP32
from tests.support.speculation import CONFIGS, always_draft, model_of

PENALTIES = Sampling(1.0, seed=3, presence_penalty=1.5, frequency_penalty=1.25, repetition_penalty=1.5)
# requests of a batch; each has another of these
SAMPLINGS = [
    Sampling(1.0, seed=1),
    PENALTIES,
    replace(PENALTIES, temperature=0.0, frequency_penalty=0.0),
    Sampling(0.0),
    replace(PENALTIES, seed=5, top_k=20, min_p=0.01, top_p=0.95, logit_bias=((7, 2.0), (9, -100.0))),
    Sampling(1.3, seed=8, top_k=2),
    Sampling(1.0, seed=9, frequency_penalty=-1.0),
]


@dataclass
class Row:
    """What a row of a step was sampled from."""

    request: Request
    completion: list[int]
    logits: list[float]
    token: int


@dataclass
class Watched:
    """Every row that an engine samples."""

    rows: list[Row] = field(default_factory=list)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        honest = leader_step.sampled

        def sampled(ran, logits, tables):
            tokens = honest(ran, logits, tables)
            row = 0
            for chunk in ran.ready:
                own = chunk.request.ids[len(chunk.request.prompt) :]
                for number in range(1 + len(chunk.drafts)):
                    known = [*own, *chunk.drafts[:number]]
                    self.rows.append(Row(chunk.request, known, logits[row].tolist(), int(tokens[row])))
                    row += 1
            return tokens

        monkeypatch.setattr(leader_step, "sampled", sampled)


def requests(samplings: list[Sampling], most: int = 14) -> list[Request]:
    """Requests that come one after the other to their end, with prompts that repeat tokens."""
    return [
        Request([5, 6, 5, *[9 + number] * (1 + number)], one, Limits(max_tokens=most - number), stop_ids=())
        for number, one in enumerate(samplings)
    ]


def answers(model, asked: list[Request], drafts: int, device: str = "cpu") -> list[list[int]]:
    with Engine.of(model, asked, device, drafting=Drafting(drafts)) as engine:
        while engine.busy:
            engine.step()
        report = engine.draft_report()
    assert report is None or report.accepted > 0
    return [one.ids[len(one.prompt) :] for one in asked]


def plain_token(row: Row) -> int:
    """The token by the definition: the largest of probability / noise, or the likeliest."""
    sampling, prompt = row.request.sampling, row.request.prompt
    chances = plain_chances(row.logits, prompt, row.completion, sampling)
    if sampling.temperature == 0:
        return chances.index(max(chances))
    place = torch.tensor([len(prompt) + len(row.completion)], device="cpu")
    made = noise(torch.tensor([sampling.seed], device="cpu"), place, len(chances))[0].tolist()
    race = [chance / one for chance, one in zip(chances, made, strict=True)]
    return race.index(max(race))


def plain_row(row: Row) -> Row:
    own = row.request.sampling
    return replace(row, request=replace(row.request, sampling=Sampling(own.temperature, seed=own.seed)))


@pytest.mark.parametrize(("drafter", "drafts"), [("mtp", 3), *slow_rows(("mtp", 0), ("dspark", 5))])
def test_every_token_is_that_of_the_definition(monkeypatch, drafter, drafts):
    always_draft(monkeypatch)
    watched = Watched()
    watched.watch(monkeypatch)
    found = answers(model_of(drafter), requests(SAMPLINGS), drafts)
    assert [row.token for row in watched.rows] == [plain_token(row) for row in watched.rows]
    assert sum(map(len, found)) <= len(watched.rows)
    # and another than without penalties, top-k and min-p, in some rows
    assert sum(row.token != plain_token(plain_row(row)) for row in watched.rows) > 10


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "drafts"), [("mtp", 2), ("mtp", 7), ("dspark", 3)])
def test_drafts_change_no_token(monkeypatch, drafter, drafts):
    """On a GPU the last bits of logits depend on the rows of a step: there, the definition is compared instead."""
    always_draft(monkeypatch)
    model = model_of(drafter)
    assert answers(model, requests(SAMPLINGS), drafts) == answers(model, requests(SAMPLINGS), 0)


def on_gpu(drafter: str):
    return build_random(parse_config(CONFIGS[drafter], "test"), Numerics.plain(), device="cuda", formats=FP32)


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_gpu_follows_the_definition(monkeypatch, drafts):
    """Steps ahead, or drafts, in captured graphs."""
    always_draft(monkeypatch)
    watched = Watched()
    watched.watch(monkeypatch)
    answers(on_gpu("mtp"), requests(SAMPLINGS), drafts, "cuda")
    assert [row.token for row in watched.rows] == [plain_token(row) for row in watched.rows]


def test_requests_without_penalties_have_the_bits_that_they_have_alone(monkeypatch):
    honest, seen = leader_step.masked_logits, []

    def masked_logits(ready, logits, tables):
        found = honest(ready, logits, tables)
        rows = [chunk.request.sampling for chunk in ready]
        seen.append(any(one.penalizes for one in rows))
        assert seen[-1] == (found is not logits)  # nothing is launched without a request that wants it
        for row, one in enumerate(rows):
            assert one.penalizes or torch.equal(found[row], logits[row])
        return found

    monkeypatch.setattr(leader_step, "masked_logits", masked_logits)
    plain = [Sampling(1.0, seed=1), Sampling(0.0), Sampling(1.0, 0.9, seed=2)]
    together = answers(model_of("mtp"), requests([*plain, PENALTIES]), 0)
    assert {*seen} == {True, False}  # the last request ends first
    alone = [answers(model_of("mtp"), [one], 0)[0] for one in requests(plain)]
    assert together[:3] == alone


def test_rows_of_requests_that_have_ended_are_used_again(monkeypatch):
    made = []

    class Counts(token_counts.TokenCounts):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(logit_masks, "TokenCounts", Counts)
    engine = Engine(model_of("mtp"), Capacity(3, 300), "cpu")
    answered = []
    for wave in range(3):
        asked = requests([replace(one, seed=wave) for one in (PENALTIES, Sampling(0.0), PENALTIES)], 6)
        for one in asked:
            engine.add(one)
        engine.step()
        assert len(made[0]._table) == 2
        while engine.busy:
            engine.step()
        answered.append(asked)  # they are still referred to
    fresh = requests([replace(PENALTIES, seed=2)], 6)
    answers(model_of("mtp"), fresh, 0)
    assert answered[2][0].ids == fresh[0].ids


def test_each_token_is_uploaded_once(monkeypatch):
    uploaded = []
    honest = token_counts.upload

    def upload(numbers, device):
        uploaded.append(numbers)
        return honest(numbers, device)

    monkeypatch.setattr(token_counts, "upload", upload)
    asked = requests([PENALTIES], 8)
    answers(model_of("mtp"), asked, 0)
    flat = [one.tolist() for one in uploaded if one.dim() == 1]
    assert flat == [asked[0].prompt, *([token] for token in asked[0].ids[len(asked[0].prompt) : -1])]
