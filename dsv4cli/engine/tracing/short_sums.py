"""Sums of FP8 tensor cores: which tokens' linears they may be in, and how far they move what these give."""

from collections.abc import Callable

import torch

from dsv4cli.engine.model.moe import MoE
from dsv4cli.engine.tracing.feed import Jitter
from dsv4cli.engine.tracing.manifest import Text, TraceManifest
from dsv4cli.engine.tracing.observer import Watched
from dsv4cli.kernels.experts.ref import gated
from dsv4cli.kernels.gemm import SHORT_SUM
from dsv4cli.kernels.rows import ROWS_ALIKE

# rows that are moved at once: queries of all heads are long
AT_ONCE = 256


class ShortSums:
    """Moves what FP8 linears give for the first tokens of each text, `tokens` of them, as short sums do."""

    def __init__(self, tokens: tuple[int, ...]) -> None:
        # numbers of its own: the streams are moved as they are without it
        self.tokens, self.jitter = tokens, Jitter(SHORT_SUM, seed=1)

    def __call__(self, own: torch.Tensor, watched: Watched) -> torch.Tensor:
        """own [T, N] with the rows of these tokens moved."""
        count = min(self.tokens[watched.text] - watched.position, watched.count)
        if count <= 0:
            return own
        moved = own.clone()
        for rows in moved[watched.start : watched.start + count].split(AT_ONCE):
            rows.copy_(self.jitter(rows))
        return moved


def short_sums_between(one: TraceManifest, other: TraceManifest) -> tuple[int, ...]:
    """How many first tokens of each text one of the two sums up shortly in FP8 linears; () for none."""
    counts = tuple(max(_short(text, side.short_sums) for side in (one, other)) for text in one.texts)
    return counts if any(counts) else ()


def _short(text: Text, chunk: int) -> int:
    """Of a prompt whose steps have up to `chunk` tokens those in steps of more than ROWS_ALIKE."""
    if chunk <= ROWS_ALIKE:
        return 0
    rest = text.prompt % chunk
    return text.prompt if rest > ROWS_ALIKE else text.prompt - rest


def with_moved_shared_expert(
    ffn: MoE, x: torch.Tensor, output: torch.Tensor, summed: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """What the experts give [T, D] for x [T, D] if `summed` moves the sums in front of the shared one's w2, whose input
    is rounded to FP8."""
    shared = ffn.shared_experts
    gate, up = shared.w1(x), shared.w3(x)
    own = shared.w2(gated(gate, up, ffn.limit).to(x.dtype)).float()
    moved = shared.w2(gated(summed(gate), summed(up), ffn.limit).to(x.dtype)).float()
    return (output.float() + ffn.world.sum_rounded(moved - own, torch.float32)).to(output.dtype)
