"""Sampling from logits: penalties, top-k and min-p, then the most likely token or a random one, with or without top-p.

The order is that of vLLM (vllm/v1/sample/sampler.py, `Sampler`): repetition, frequency and presence penalty on the
logits (`penalize`), temperature, min-p and top-k (`keep_likeliest`), then top-p among the tokens that these keep, with
their probabilities scaled to a sum of 1 (`draw_nucleus`). A greedy row takes the argmax after the penalties.

Source of the draw: official generate.py (`sample`: Gumbel-max). Nothing synchronizes with the device. A row's result is
bit-exact whatever the other rows are and however many.
Triton requires: fp32 with consecutive columns, and contiguous per-row numbers.
"""

import torch

from dsv4cli.kernels.dispatch import choose
from dsv4cli.kernels.sampling import ref

# the logit of a token that cannot be sampled: far below any other, and finite at the lowest temperature
BANNED = ref.BANNED
# in the counts of `penalize`: a token of the prompt, and each occurrence in the completion
IN_PROMPT, OCCURRENCE = ref.IN_PROMPT, ref.OCCURRENCE


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row, the lowest column among equals: fp32 [R, V] without NaN -> int64 [R]."""
    return choose(logits, ref).greedy(logits)


def penalize(
    logits: torch.Tensor, seen: torch.Tensor, places: torch.Tensor, drafts: torch.Tensor, penalties: torch.Tensor
) -> torch.Tensor:
    """Return the logits with penalties on the tokens that a sequence already has, fp32 [R, V].

    A token of the prompt or the completion has its logit divided by the repetition penalty if it is positive, and
    multiplied by it if not (Keskar et al., CTRL, arXiv 1909.05858). Then a token that occurs n > 0 times in the
    completion loses n times the frequency penalty, and the presence penalty once (OpenAI's definition). Computed in
    fp64 and rounded once.

    Args:
        logits: finite fp32 [R, V].
        seen: int32 [S, V], the tokens of each sequence: `IN_PROMPT` if the prompt has the token, plus `OCCURRENCE` for
            each time that the completion has it.
        places: int64 [R], each row's sequence in `seen`; a row with -1 is returned as it is.
        drafts: int64 [D, R], draft tokens that precede each row and count as completion; -1 for none.
        penalties: fp32 [3, R]: repetition (above 0; 1 for none), frequency and presence.
    """
    return choose(logits, ref).penalize(logits, seen, places, drafts, penalties)


def keep_likeliest(logits: torch.Tensor, counts: torch.Tensor, gaps: torch.Tensor) -> torch.Tensor:
    """Return the logits with `BANNED` for tokens outside top-k or below min-p, fp32 [R, V].

    A row keeps the logits that are at least its counts-th largest and at least its largest minus its gap. With top-k
    and min-p these are the same tokens in any order of the two. Equal logits are kept or banned together.

    Args:
        logits: finite fp32 [R, V].
        counts: int64 [R], top-k; 0 for all tokens.
        gaps: fp32 [R], from `gap_of`.
    """
    return choose(logits, ref).keep_likeliest(logits, counts, gaps)


def gap_of(min_p: float, temperature: float) -> float:
    """Return how far below the largest logit a token is min_p times as likely at a temperature; infinite for 0."""
    return ref.gap_of(min_p, temperature)


def draw(logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return argmax(probability / noise) of each row, int64 [R]; for a row with temperature 0, as `greedy`.

    Among equals the lowest column wins.

    Args:
        logits: finite fp32 [R, V]. Probabilities are softmax(logits / temperature) in fp32.
        noise: fp32 [R, V] above 0; exponential noise samples from the probabilities.
        temperatures: fp32 [R], 0 or above.
    """
    return choose(logits, ref).draw(logits, noise, temperatures)


def draw_nucleus(
    logits: torch.Tensor, noise: torch.Tensor, temperatures: torch.Tensor, limits: torch.Tensor
) -> torch.Tensor:
    """Sample as `draw` does, from each row's nucleus (top-p).

    The nucleus holds the tokens, by descending probability, before which the probabilities sum to less than the limit,
    and all tokens as likely as the last of these. The most likely token is always in it. Sums are exact, in integer
    multiples of 2 ** -62.

    Args:
        limits: int64 [R], from `limit_of`.
    """
    return choose(logits, ref).draw_nucleus(logits, noise, temperatures, limits)


def limit_of(top_p: float) -> int:
    """Return the nucleus limit of a top_p above 0: top_p - 2 ** -16, or for 1 a limit that no sum reaches."""
    return ref.limit_of(top_p)


def chance_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Return the probability of one token per row at temperature 1: finite fp32 [R, V], int64 [R] -> fp32 [R]."""
    return choose(logits, ref).chance_of(logits, tokens)


def logsumexp(logits: torch.Tensor) -> torch.Tensor:
    """Return log(sum(exp(logits))) of each row, fp32 [R, V] -> fp32 [R]; NaN if a logit of the row is not finite."""
    return choose(logits, ref).logsumexp(logits)


def noise(seeds: torch.Tensor, positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return exponential noise with mean 1, fp32 [R, width] above 0, the same on every device.

    It depends only on seed, position and column. The bits of column c are m(m(m(seed) + s * position) + s * c) modulo 2
    ** 64, where m(x) is the output of splitmix64 in state x and s its step. The value is -log((k + 0.5) / 2 ** 52),
    with k their first 52 bits, computed in fp64 and rounded once.

    Args:
        seeds, positions: int64 [R].
    """
    return choose(seeds, ref).noise(seeds, positions, width)
