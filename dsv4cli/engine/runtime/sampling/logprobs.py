"""Log-probabilities of tokens, and their likeliest alternatives."""

from collections.abc import Callable, Sequence
from math import isnan

import torch

from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.request import Alternatives, Request, RowScores
from dsv4cli.engine.runtime.sampling.sampler import check_finite, not_finite
from dsv4cli.engine.runtime.step import Chunk
from dsv4cli.engine.system.device import download
from dsv4cli.kernels.sampling import logsumexp

# rows of logits at once: 256 x 129,280 in fp32 are 132 MB
LOGIT_ROWS = 256
# a token, its log-probability and the alternatives
TokenLogprobs = tuple[int, float, Alternatives]


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor, count: int) -> list[TokenLogprobs]:
    """Return the log-probabilities of the tokens int64 [R] that follow logits fp32 [R, V], with `count` alternatives
    each.

    Waits for the device. Raises UnsoundResult for logits that are not finite.
    """
    return start_logprobs(logits, tokens, count, None)()[0]


@torch.inference_mode()
def start_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int, more: torch.Tensor | None
) -> Callable[[], tuple[list[TokenLogprobs], list[list[float]]]]:
    """Start `logprobs_of`, and return a function that waits for its result and for the numbers in `more`.

    more: fp64 [B, n] on the device, copied along; None for none. The function does not wait for later launches.
    """
    total = logsumexp(logits)[:, None]
    # fp64 holds all of it exactly
    columns = [tokens[:, None], logits.gather(-1, tokens[:, None]) - total]
    if count:
        best = logits.topk(min(count, logits.shape[-1]), -1)
        columns += [best.indices, best.values - total]
    known = torch.cat([column.double() for column in columns], 1)
    flat = known.flatten() if more is None else torch.cat((known.flatten(), more.flatten()))
    arriving = download(flat)

    def read() -> tuple[list[TokenLogprobs], list[list[float]]]:
        numbers = arriving()
        sampled = _split_rows(_rows(numbers[: known.numel()], *known.shape))
        return sampled, [] if more is None else _rows(numbers[known.numel() :], *more.shape)

    return read


def _split_rows(table: list[list[float]]) -> list[TokenLogprobs]:
    """Split rows of token, log-probability, alternatives and their log-probabilities."""
    if any(isnan(row[1]) for row in table):
        raise not_finite()
    middle = (2 + len(table[0])) // 2 if table else 2
    tops = [list(zip(map(int, row[2:middle]), row[middle:], strict=True)) for row in table]
    return [(int(row[0]), row[1], top) for row, top in zip(table, tops, strict=True)]


def _rows(numbers: list[float], count: int, width: int) -> list[list[float]]:
    return [numbers[row * width : (row + 1) * width] for row in range(count)]


@torch.inference_mode()
def score_rows(model: Transformer, chunks: Sequence[Chunk], streams: torch.Tensor) -> dict[Request, RowScores]:
    """Return the scores of these chunks' rows in a step whose last layer returned streams [T, N, D].

    Raises UnsoundResult for logits that are not finite.
    """
    rows = [row for chunk in chunks for row in range(chunk.row, chunk.last_row + 1)]
    padded = [[*chunk.request.ids[chunk.first + 1 : chunk.end + 1], 0] for chunk in chunks]  # 0 after the last token
    ids = [token for ids, chunk in zip(padded, chunks, strict=True) for token in ids[: chunk.tokens]]
    following = torch.tensor(ids, dtype=torch.int64, device=streams.device)
    count = max((chunk.request.limits.logprobs for chunk in chunks), default=0)
    wanted = streams if len(rows) == len(streams) else streams[rows]
    known: list[float] = []
    tops: list[Alternatives] = []
    for part, tokens in zip(wanted.split(LOGIT_ROWS), following.split(LOGIT_ROWS), strict=True):
        logits = model.logits(part)
        check_finite(logits)
        logprobs = logits.log_softmax(-1)
        known += logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
        tops += top_logprobs(logprobs, count)
    scores, start = {}, 0
    for chunk in chunks:
        end = start + chunk.tokens
        top = [best[: chunk.request.limits.logprobs] for best in tops[start:end]]
        scores[chunk.request], start = RowScores(known[start:end], top), end
    return scores


def top_logprobs(logprobs: torch.Tensor, count: int) -> list[Alternatives]:
    """Return the `count` likeliest tokens of each row of fp32 [R, V], best first."""
    best = logprobs.topk(min(count, logprobs.shape[-1]), -1)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(ids, values, strict=True)) for ids, values in pairs]
