"""What a drafted step gives follows the model's distribution, whatever a drafter proposes: chi-square of 100,000 draws.

Model and drafter are tables of what follows each token; drawing, drafting and accepting are the engine's own. At the
end the whole engine, with small random nets.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.model.batch import Batch
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import HiddenStates, Transformer
from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
from dsv4cli.engine.runtime.drafts.drafters import Choose, Drafts, Newest
from dsv4cli.engine.runtime.drafts.speculate import Verified, speculate
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.sampling.logit_masks import BANNED
from dsv4cli.engine.runtime.sampling.sampler import Draws, sample
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.weights.load import build_random
from dsv4cli.kernels.sampling import IN_PROMPT, penalize
from tests.support.plain_sampling import plain_chances
from tests.support.slow import slow
from tests.support.speculation import always_draft
from tests.support.synthetic import DSPARK, SMALL

VOCABULARY, REQUESTS, DRAFTS, FIRST = 24, 100_000, 2, 3
# after any token; the drafter does not know
FORBIDDEN = [2, 7, 11]
# what the model drew after the newest token and each draft, int64 [R, 1 + DRAFTS], the drafts, and what is likeliest
# after the same tokens -> what is taken for drawn
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def model(banned: bool = False) -> torch.Tensor:
    """The logits after each token: fp32 [V, V]."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    if banned:
        logits[:, FORBIDDEN] = BANNED
    return logits


def drafters() -> dict[str, torch.Tensor]:
    """The logits that a drafter has after each token: fp32 [V, V]."""
    generator = torch.Generator().manual_seed(4)
    near = model() + torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    blind = near.masked_fill(torch.rand(VOCABULARY, VOCABULARY, generator=generator) < 0.4, BANNED)
    return {"near": near, "elsewhere": -2 * model(), "blind": blind}


class TableDrafter:
    name, most, usual, reads_next = "mtp", DRAFTS, DRAFTS, False

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def absorb(self, hidden: HiddenStates, next_ids: torch.Tensor, batch: Batch) -> None:
        pass

    def draft(self, newest: Newest, count: int, choose: Choose) -> Drafts:
        tokens, token = [], newest.tokens
        for number in range(count):
            token = choose(self._logits[token], number)
            tokens.append(token)
        return Drafts(torch.stack(tokens, 1), torch.ones(len(token), count))


def drafted(table: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Behind prompts that end with FIRST: int64 [REQUESTS, DRAFTS]."""
    numbers = torch.arange(REQUESTS)
    none = torch.zeros(REQUESTS, 0, dtype=torch.int64)
    before = Verified(numbers, draws.positions - 2, numbers, torch.zeros_like(numbers), none)
    hidden = HiddenStates(torch.zeros(REQUESTS, 1, 1), None)
    # no position but the one that is made from where the newest token stands
    unplaced = replace(draws, positions=torch.zeros_like(numbers))
    given = torch.full((REQUESTS,), FIRST)
    return speculate(TableDrafter(table), (hidden, None), given, before, unplaced, DRAFTS)[:, :DRAFTS].long()


def sampled(logits: torch.Tensor, completion: torch.Tensor, draws: Draws, sampling: Sampling) -> torch.Tensor:
    """A token of each row, as the engine samples it after FIRST as the prompt and a completion, int64 [R, n]."""
    if sampling.penalizes:
        seen = torch.zeros(1, VOCABULARY, dtype=torch.int32)
        seen[0, FIRST] = IN_PROMPT
        penalties = [sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]
        own = torch.tensor(penalties)[:, None].repeat(1, len(logits))
        logits = penalize(logits, seen, torch.zeros_like(draws.seeds), completion.T.contiguous(), own)
    return sample(logits, draws)


def drawn(
    logits: torch.Tensor, drafts: torch.Tensor, draws: Draws, rule: Rule, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model draws after FIRST and after each draft, int64 [R, 1 + DRAFTS], and how many drafts it accepts."""
    newest = torch.full((REQUESTS, 1), FIRST)
    before = torch.cat((newest, drafts), 1)
    places = [replace(draws, positions=draws.positions + ahead) for ahead in range(1 + DRAFTS)]
    own = torch.stack(
        [sampled(logits[before[:, ahead]], drafts[:, :ahead], place, sampling) for ahead, place in enumerate(places)],
        1,
    )
    own = rule(own, drafts, logits.argmax(-1)[before])
    numbers = torch.arange(REQUESTS)
    verified = Verified(numbers, draws.positions - 1, numbers * (1 + DRAFTS), torch.full_like(numbers, DRAFTS), drafts)
    return own, verified.accepted(own.flatten())


def as_drawn(own: torch.Tensor, drafts: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    return own


def likeliest_as_well(own: torch.Tensor, drafts: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    """Greedy acceptance: a draft that is the model's likeliest token is accepted."""
    kept = torch.where(drafts == likeliest[:, :-1], drafts, own[:, :-1])
    return torch.cat((kept, own[:, -1:]), 1)


def unverified(own: torch.Tensor, drafts: torch.Tensor, likeliest: torch.Tensor) -> torch.Tensor:
    return torch.cat((drafts, own[:, -1:]), 1)


def draws_of(sampling: Sampling) -> Draws:
    """Of the token after FIRST: four requests of each seed, at places far apart."""
    numbers = torch.arange(REQUESTS)
    one = Draws.of([sampling], [0], "cpu")
    alike = (own.expand(REQUESTS) for own in (one.temperatures, one.limits, one.counts, one.gaps))
    return Draws(1 + numbers // 4, 5 + 100 * (numbers % 4), *alike, one.kind)


def pairs(logits: torch.Tensor, table: torch.Tensor, sampling: Sampling, rule: Rule) -> torch.Tensor:
    """The first two tokens of each request, int64 [REQUESTS, 2]."""
    draws = draws_of(sampling)
    own, accepted = drawn(logits, drafted(table, draws), draws, rule, sampling)
    # the next step's first row
    short = (accepted == 0).nonzero()[:, 0]
    alike = (one[short] for one in (draws.temperatures, draws.limits, draws.counts, draws.gaps))
    place = Draws(draws.seeds[short], draws.positions[short] + 1, *alike, draws.kind)
    own[short, 1] = sampled(logits[own[short, 0]], own[short, :1], place, sampling)
    return own[:, :2]


def chances_of(logits: torch.Tensor, sampling: Sampling) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the first token, fp64 [V], and of the second after each, fp64 [V, V]."""
    rows = logits.tolist()
    first = plain_chances(rows[FIRST], [FIRST], [], sampling)
    second = [plain_chances(row, [FIRST], [token], sampling) for token, row in enumerate(rows)]
    return torch.tensor(first, dtype=torch.float64), torch.tensor(second, dtype=torch.float64)


def chi_square(found: torch.Tensor, chances: torch.Tensor) -> float:
    """The probability of a deviation as large: int64 [n] of cells, fp64 [cells]. Rare cells are taken together."""
    expected, counts = chances * len(found), found.bincount(minlength=len(chances)).double()
    if counts[expected == 0].any():
        return 0.0
    rare = expected < 5
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    known = expected > 0
    distance = ((counts - expected)[known] ** 2 / expected[known]).sum()
    return float(torch.special.gammaincc((known.sum() - 1) / 2, distance / 2))


def likelihood(tokens: torch.Tensor, chances: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The least of chi-square of the first token, of the second, and of both."""
    both = chances[0][:, None] * chances[1]
    first, second = tokens.unbind(1)
    cells = (first, chances[0]), (second, both.sum(0)), (first * VOCABULARY + second, both.flatten())
    return min(chi_square(found, expected) for found, expected in cells)


PENALTIES = Sampling(1.0, presence_penalty=1.5, frequency_penalty=-0.75, repetition_penalty=1.3)
# sampling, whether tokens are banned
SAMPLINGS = {
    "T=1": (Sampling(1.0), False),
    "T=0.7": (Sampling(0.7), False),
    "top-p": (Sampling(1.0, 0.9), False),
    "banned": (Sampling(1.0), True),
    "all": (Sampling(0.7, 0.9), True),
    "top-k": (Sampling(1.0, top_k=5), False),
    "min-p": (Sampling(1.5, min_p=0.1), False),
    "filters": (Sampling(1.5, 0.8, top_k=9, min_p=0.02), False),
    "penalties": (PENALTIES, False),
    "everything": (replace(PENALTIES, temperature=0.8, top_p=0.9, top_k=12, min_p=0.01), True),
}
CASES = [(name, drafter) for name in SAMPLINGS for drafter in ("near", "elsewhere", "blind")]
FAST = {("T=1", "near")}


@pytest.mark.parametrize(
    ("name", "drafter"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_drafted_tokens_follow_the_model(name, drafter):
    sampling, banned = SAMPLINGS[name]
    logits = model(banned)
    tokens = pairs(logits, drafters()[drafter], sampling, as_drawn)
    assert likelihood(tokens, chances_of(logits, sampling)) > 0.01
    # for this reason: no draft changes a token
    draws = draws_of(sampling)
    none = torch.zeros(REQUESTS, 0, dtype=torch.int64)
    first = sampled(logits[torch.full((REQUESTS,), FIRST)], none, draws, sampling)
    second = sampled(logits[first], first[:, None], replace(draws, positions=draws.positions + 1), sampling)
    assert torch.equal(tokens, torch.stack((first, second), 1))


@pytest.mark.parametrize(
    "rule", [pytest.param(likeliest_as_well, marks=pytest.mark.slow), unverified], ids=lambda rule: rule.__name__
)
@pytest.mark.parametrize("name", ["T=1", *(pytest.param(name, marks=pytest.mark.slow) for name in ("T=0.7", "top-p"))])
def test_other_ways_to_accept_are_noticed(name, rule):
    sampling, banned = SAMPLINGS[name]
    logits = model(banned)
    assert likelihood(pairs(logits, drafters()["near"], sampling, rule), chances_of(logits, sampling)) < 1e-6


@pytest.mark.slow
def test_tokens_behind_a_rejected_draft_are_noticed(monkeypatch):
    monkeypatch.setattr(Verified, "accepted", lambda verified, next_ids: verified.drafted)
    sampling, logits = Sampling(1.0), model()
    assert likelihood(pairs(logits, drafters()["near"], sampling, as_drawn), chances_of(logits, sampling)) < 1e-6


@pytest.mark.slow
def test_penalties_that_do_not_see_drafts_are_noticed(monkeypatch):
    honest, logits = penalize, model()

    def blind(logits, seen, places, drafts, penalties):
        return honest(logits, seen, places, drafts[:0], penalties)

    monkeypatch.setitem(globals(), "penalize", blind)
    assert likelihood(pairs(logits, drafters()["near"], PENALTIES, as_drawn), chances_of(logits, PENALTIES)) < 1e-6


@pytest.mark.parametrize("name", [*slow("T=1", "filters"), "top-p"])
def test_a_drafter_that_knows_the_model_is_always_right(name):
    """Its draws have the noise, the temperature, the nucleus and the filters of the model's at the same place."""
    sampling, _ = SAMPLINGS[name]
    draws = draws_of(sampling)
    _, accepted = drawn(model(), drafted(model(), draws), draws, as_drawn, sampling)
    assert (accepted == DRAFTS).all()


NETS = {"mtp": SMALL, "dspark": DSPARK}
# requests of a step, and those of 1 + 7 rows that graphs hold
TOGETHER = 8


@cache
def net(drafter: str) -> Transformer:
    return build_random(parse_config(NETS[drafter], "test"), Numerics.plain())


@cache
def answers(drafter: str, sampling: Sampling, drafts: int) -> tuple[list[list[int]], DraftReport | None]:
    """Of requests that differ in seed, prompt and length, all at once."""
    requests = [
        Request(
            [3 + number % 50] * (3 + number % 5),
            replace(sampling, seed=sampling.seed + number),
            Limits(max_tokens=6 + number % 3),
        )
        for number in range(TOGETHER)
    ]
    with Engine.of(net(drafter), requests, "cpu", drafting=Drafting(drafts)) as engine:
        while engine.busy:
            engine.step()
        return [request.ids for request in requests], engine.draft_report()


# how many drafts, how they are drawn, how many seeds
FEW = [(3, Sampling(1.0), 1)]
MANY = [(drafts, Sampling(1.0), 5) for drafts in range(1, 8)]
MANY += [(drafts, sampling, 3) for drafts in (2, 7) for sampling in (Sampling(0.7), Sampling(1.0, 0.9), Sampling(4.0))]


@pytest.mark.slow  # test_speculation.py compares seeded answers
@pytest.mark.parametrize("drafter", ["mtp", *slow("dspark")])
@pytest.mark.parametrize(
    ("drafts", "sampling", "batches"), [*FEW, *(pytest.param(*case, marks=pytest.mark.slow) for case in MANY)]
)
def test_a_seed_draws_the_same_with_drafts(monkeypatch, drafts, sampling, batches, drafter):
    always_draft(monkeypatch)
    accepted = rejected = 0
    for batch in range(batches):
        seeded = replace(sampling, seed=batch * TOGETHER)
        found, report = answers(drafter, seeded, drafts)
        assert found == answers(drafter, seeded, 0)[0]
        assert report is not None
        accepted, rejected = accepted + report.accepted, rejected + report.drafted - report.accepted
    assert accepted > 0
    assert rejected > 0
