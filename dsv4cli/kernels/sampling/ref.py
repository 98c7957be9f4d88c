"""Sampling in plain PyTorch."""

import torch


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
