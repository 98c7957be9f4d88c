"""Sampling in plain PyTorch."""

import math

import torch

BANNED = -1e30
IN_PROMPT, OCCURRENCE = 1, 2

# constants of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators): the increment of its
# state, and the factors of its mixing function
STEP, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# probabilities are summed as integers in units of 1 / UNIT: exact in any order
UNIT = 2**62
# a sum this close to top_p counts as reaching it, because the last bits of probabilities depend on the device: sums
# that should equal top_p are off by less than this
SLACK = UNIT >> 16
# above any sum: the nucleus is the whole vocabulary
EVERYTHING = 2**63 - 1
# the same constants as signed 64-bit integers
_STEP, _FIRST, _SECOND = STEP - 2**64, FACTORS[0] - 2**64, FACTORS[1] - 2**64


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    column = torch.arange(width, device=seeds.device)
    bits = _mixed(_mixed(_mixed(seeds) + positions * _STEP)[:, None] + column * _STEP)
    # exact in fp64
    return -((_shifted(bits, 12).double() + 0.5) * 2.0**-52).log().float()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Return the output of splitmix64 in each state: int64, modulo 2 ** 64."""
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    # logical shift
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, places: torch.Tensor, drafts: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    own = seen[places.clamp(min=0)]
    drafted = torch.zeros_like(own)
    for tokens in drafts:
        drafted.scatter_add_(1, tokens.clamp(min=0)[:, None], (tokens >= 0).int()[:, None])
    counts = own // OCCURRENCE + drafted
    # fp32 penalties times counts are exact in fp64
    repetition, frequency, presence = penalties.double()[:, :, None]
    values = logits.double()
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where((own > 0) | (drafted > 0), repeated, values)
    values = values - frequency * counts - presence * (counts > 0)
    return torch.where(places[:, None] < 0, logits, values.float())


def keep_likeliest(logits: torch.Tensor, counts: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
    width = logits.shape[1]
    ordered = logits.sort(dim=-1, descending=True)[0]
    last = torch.where(counts == 0, width, counts).clamp(max=width) - 1
    smallest = torch.maximum(ordered.gather(-1, last[:, None]), ordered[:, :1] - gaps[:, None])
    return logits.masked_fill(logits < smallest, BANNED)


def gap_of(min_p: float, temperature: float) -> float:
    return -temperature * math.log(min_p) if min_p > 0 else math.inf


def draw(logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    return _race(logits, noise, temperatures, _chances(logits, temperatures))


def draw_nucleus(
    logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    return _race(logits, noise, temperatures, nucleus(_chances(logits, temperatures), limits))


def _chances(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the probabilities. Those of a row with temperature 0 are not used."""
    return (logits / temperatures.masked_fill(temperatures == 0, 1.0)[:, None]).softmax(-1)


def _race(logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor, chances: torch.Tensor) -> torch.Tensor:
    return torch.where(temperatures[:, None] == 0, logits, chances / noise).argmax(-1)


def nucleus(chances: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities [R, V] with 0 outside each row's nucleus. The most likely token is always kept."""
    ordered = chances.sort(dim=-1, descending=True)[0]
    units = (ordered.double() * UNIT).long()
    # the sum of all tokens before: 0 for the first, which is therefore kept with any limit
    inside = units.cumsum(-1) - units < limits[:, None]
    smallest = ordered.gather(-1, inside.sum(-1, keepdim=True) - 1)
    return chances.masked_fill(chances < smallest, 0.0)


def limit_of(top_p: float) -> int:
    """Return the nucleus limit in units of 1 / `UNIT`: the tokens before a token of the nucleus sum to less."""
    return max(int(top_p * UNIT) - SLACK, 1) if top_p < 1 else EVERYTHING


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    return torch.where(logits.isfinite().all(-1), logits.logsumexp(-1), float("nan"))


def chance_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1).gather(-1, tokens[:, None])[:, 0]
