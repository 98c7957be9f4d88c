"""Sampling in plain PyTorch."""

import torch

# of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators): the step from state to state, and
# the factors of its mixing
STEP, FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# the same numbers of 64 bits with a sign
_STEP, _FIRST, _SECOND = STEP - 2**64, FACTORS[0] - 2**64, FACTORS[1] - 2**64


def noise(seeds: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
    column = torch.arange(width, device=seeds.device)
    bits = _mixed(_mixed(_mixed(seeds) + places * _STEP)[:, None] + column * _STEP)
    # exact in fp64
    return -((_shifted(bits, 12).double() + 0.5) * 2.0**-52).log().float()


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """What splitmix64 gives in each state: int64, modulo 2 ** 64."""
    x = x + _STEP
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, bits: int) -> torch.Tensor:
    # zeros come in from the left
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def draw(logits: torch.Tensor, noise: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    chances = (logits / temperature).softmax(-1)
    if top_p < 1:
        chances = nucleus(chances, top_p)
    return (chances / noise).argmax(-1)


def nucleus(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """The probabilities [R, V] with everything outside the nucleus at 0; the likeliest token always stays."""
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    # what the tokens before hold together: 0 for the first, so it stays for any top_p above 0
    before = ordered.cumsum(-1) - ordered
    return chances.scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))
