"""Short sums of FP8 tensor cores: which tokens' linears may have them, and how much they change the results."""

from collections.abc import Callable

import torch

from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.tracing.feed import Jitter
from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.engine.tracing.observer import Watched
from dsv4cli.kernels.experts.activation import gated
from dsv4cli.kernels.gemm import SHORT_SUM
from dsv4cli.kernels.rows import ROWS_ALIKE

# rows to perturb at once, to limit memory: queries of all heads are long rows
AT_ONCE = 256


class ShortSums:
    """Perturbs the outputs of FP8 linears as short sums would, for the first `tokens` tokens of each text."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        # a separate seed, so that the perturbation of the streams does not depend on it
        self.tokens, self.jitter = tokens, Jitter(SHORT_SUM, seed=1)

    def __call__(self, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """Return own [T, N] with the rows of these tokens perturbed."""
        count = min(self.tokens[watched.text] - watched.position, watched.count)
        if count <= 0:
            return own
        moved = own.clone()
        for rows in moved[watched.start : watched.start + count].split(AT_ONCE):
            rows.copy_(self.jitter(rows))
        return moved


def short_sums_between(one: TraceManifest, other: TraceManifest) -> tuple[int, ...]:
    """Return the number of leading tokens with short sums in FP8 linears on either side, by text; () if all are 0."""
    counts = tuple(max(_short(text, side.short_sums) for side in (one, other)) for text in one.texts)
    return counts if any(counts) else ()


def _short(text: Text, chunk: int) -> int:
    """Return how many prompt tokens are in steps of more than ROWS_ALIKE tokens, with steps of up to `chunk` tokens."""
    if chunk <= ROWS_ALIKE:
        return 0
    rest = text.prompt % chunk
    return text.prompt if rest > ROWS_ALIKE else text.prompt - rest


def with_moved_shared_expert(
    ffn: MoE, x: torch.Tensor, output: torch.Tensor, summed: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Return the experts' output [T, D] for x [T, D], with `summed` applied before the shared expert's w2.

    The input of w2 is rounded to FP8, so short sums change it.
    """
    shared = ffn.shared_experts
    gate, up = shared.w1(x), shared.w3(x)
    own = shared.w2(gated(gate, up, ffn.limit).to(x.dtype)).float()
    moved = shared.w2(gated(summed(gate), summed(up), ffn.limit).to(x.dtype)).float()
    return (output.float() + ffn.world.sum_rounded(moved - own, torch.float32)).to(output.dtype)
