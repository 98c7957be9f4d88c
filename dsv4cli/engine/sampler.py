"""From logits to a token: greedy, or drawn at a temperature from the nucleus of probability top_p."""

import torch

from dsv4cli.engine.settings import Sampling
from dsv4cli.errors import UnsoundResult


def check_finite(logits: torch.Tensor) -> None:
    """Raises UnsoundResult when a logit is not a finite number: fp32 [R, V]."""
    if not bool(logits.isfinite().all()):
        raise UnsoundResult(
            "the model's logits are not finite: its weights or this machine's arithmetic are wrong",
            "compare the checksums of the weight files with the publisher's, or try another --device or --dtype",
        )


def sample(logits: torch.Tensor, sampling: Sampling, generators: list[torch.Generator]) -> torch.Tensor:
    """One token per row: fp32 [R, V], a CPU generator per row -> int64 [R].

    Gumbel-max as in the official generate.py: argmax(probability / exponential noise). A row's choice depends on its
    own generator only, not on the other rows.
    """
    if sampling.temperature == 0:
        return logits.argmax(-1)
    chances = (logits / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        chances = nucleus(chances, sampling.top_p)
    noise = torch.stack([torch.empty(logits.shape[1]).exponential_(generator=generator) for generator in generators])
    return (chances / noise.to(logits.device)).argmax(-1)


def nucleus(chances: torch.Tensor, top_p: float) -> torch.Tensor:
    """The probabilities [R, V] with everything outside the nucleus at 0; the likeliest token always stays."""
    ordered, order = chances.sort(dim=-1, descending=True, stable=True)
    # what the tokens before hold together: 0 for the first, so it stays for any top_p above 0
    before = ordered.cumsum(-1) - ordered
    return chances.scatter(-1, order, ordered.masked_fill(before >= top_p, 0.0))
