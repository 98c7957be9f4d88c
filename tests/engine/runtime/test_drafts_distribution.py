"""What a drafted step gives follows the model's distribution, whatever a drafter proposes: chi-square of 100,000 draws.

A request's noise depends on its seed and the place of the token; drafter and model draw with the same, and a draft is
kept where the model, after the same tokens, draws it too.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from dsv4cli.engine.runtime.engine import BANNED
from dsv4cli.engine.runtime.sampler import Draws, sample
from dsv4cli.engine.settings import Sampling
from tests.engine.runtime.test_sampler import slow_nucleus

VOCABULARY, REQUESTS, DRAFTS, FIRST = 24, 100_000, 2, 3
# after any token
FORBIDDEN = [2, 7, 11]
# drafts, what the model draws, and its likeliest tokens, int64 [R, DRAFTS] each -> the tokens, and which are kept
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def model(banned: bool) -> torch.Tensor:
    """The logits after each token: fp32 [V, V]."""
    logits = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 1.5
    if banned:
        logits[:, FORBIDDEN] = BANNED
    return logits


def drafters() -> dict[str, torch.Tensor]:
    """The logits that a drafter has after each token: fp32 [V, V]."""
    generator = torch.Generator().manual_seed(4)
    near = model(False) + torch.randn(VOCABULARY, VOCABULARY, generator=generator)
    blind = near.masked_fill(torch.rand(VOCABULARY, VOCABULARY, generator=generator) < 0.4, BANNED)
    return {"near": near, "elsewhere": -2 * model(False), "blind": blind}


def same(drafts: torch.Tensor, own: torch.Tensor, likeliest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return own, drafts == own


def likeliest_as_well(
    drafts: torch.Tensor, own: torch.Tensor, likeliest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    kept = (drafts == own) | (drafts == likeliest)
    return torch.where(kept, drafts, own), kept


def unseen(drafts: torch.Tensor, own: torch.Tensor, likeliest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return drafts, drafts == drafts


def after_another(
    drafts: torch.Tensor, own: torch.Tensor, likeliest: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps what the model drew after a draft that it did not draw."""
    return own, drafts == drafts


def stepped(
    logits: torch.Tensor, drafter: torch.Tensor, draws: Draws, last: torch.Tensor, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """A step after the newest tokens, last int64 [R]: tokens [R, DRAFTS + 1], and how many of a row are kept [R]."""
    at = [replace(draws, positions=draws.positions + ahead) for ahead in range(DRAFTS + 1)]
    before = [last]
    for place in at[:-1]:
        before.append(sample(drafter[before[-1]], place))
    own = torch.stack([sample(logits[token], place) for token, place in zip(before, at, strict=True)], 1)
    likeliest = logits.argmax(-1)[torch.stack(before[:-1], 1)]
    tokens, kept = rule(torch.stack(before[1:], 1), own[:, :-1], likeliest)
    return torch.cat((tokens, own[:, -1:]), 1), kept.long().cumprod(1).sum(1) + 1


def draws_of(sampling: Sampling, seed: int) -> Draws:
    """Four requests of each seed, at places far apart."""
    numbers = torch.arange(REQUESTS)
    one = Draws.of([sampling], [0], "cpu")
    same = one.temperatures.expand(REQUESTS), one.limits.expand(REQUESTS)
    return Draws(seed + numbers // 4, 5 + 100 * (numbers % 4), *same, one.kind)


def pairs(logits: torch.Tensor, drafter: torch.Tensor, sampling: Sampling, rule: Rule, seed: int) -> torch.Tensor:
    """The first two tokens of each request, int64 [REQUESTS, 2], by as many steps as that takes."""
    draws = draws_of(sampling, seed)
    tokens, kept = stepped(logits, drafter, draws, torch.full((REQUESTS,), FIRST), rule)
    short = (kept == 1).nonzero()[:, 0]
    parts = (draws.seeds[short], draws.positions[short] + 1, draws.temperatures[short], draws.limits[short])
    tokens[short, 1] = stepped(logits, drafter, Draws(*parts, draws.kind), tokens[short, 0], rule)[0][:, 0]
    return tokens[:, :2]


def chances_of(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Of each token after each: fp64 [V, V]."""
    chances = (logits.double() / sampling.temperature).softmax(-1)
    inside = torch.tensor([slow_nucleus(row, sampling.top_p) for row in chances.tolist()], dtype=torch.float64)
    return inside / inside.sum(-1, keepdim=True)


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


def deviations(tokens: torch.Tensor, chances: torch.Tensor) -> list[float]:
    """Of the first token, the second, and both."""
    both = chances[FIRST][:, None] * chances
    return [
        chi_square(tokens[:, 0], chances[FIRST]),
        chi_square(tokens[:, 1], both.sum(0)),
        chi_square(tokens[:, 0] * VOCABULARY + tokens[:, 1], both.flatten()),
    ]


# sampling, whether tokens are banned, which the drafter does not know
SAMPLINGS = {
    "T=1": (Sampling(1.0), False),
    "T=0.7": (Sampling(0.7), False),
    "top-p": (Sampling(1.0, 0.9), False),
    "banned": (Sampling(1.0), True),
    "all": (Sampling(0.7, 0.9), True),
}
CASES = [(name, drafter) for name in SAMPLINGS for drafter in ("near", "elsewhere", "blind")]
FAST = {("T=1", "near"), ("all", "blind")}


@pytest.mark.parametrize(
    ("name", "drafter"), [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in CASES]
)
def test_drafted_tokens_follow_the_model(name, drafter):
    sampling, banned = SAMPLINGS[name]
    logits = model(banned)
    tokens = pairs(logits, drafters()[drafter], sampling, same, 1)
    assert min(deviations(tokens, chances_of(logits, sampling))) > 0.01
    # which follows from this: no draft changes a token
    draws = draws_of(sampling, 1)
    first = sample(logits[torch.full((REQUESTS,), FIRST)], draws)
    assert torch.equal(tokens[:, 0], first)
    assert torch.equal(tokens[:, 1], sample(logits[first], replace(draws, positions=draws.positions + 1)))


@pytest.mark.parametrize(
    "rule",
    [likeliest_as_well, unseen, pytest.param(after_another, marks=pytest.mark.slow)],
    ids=lambda rule: rule.__name__,
)
def test_other_rules_are_noticed(rule):
    sampling, banned = SAMPLINGS["T=1"]
    logits = model(banned)
    assert min(deviations(pairs(logits, drafters()["near"], sampling, rule, 1), chances_of(logits, sampling))) < 1e-6
