"""Decides when `fp8_wgmma` computes experts, and launches it. It needs Gluon and is imported only when used.

Few tokens take four launches: rounding inputs and sorting pairs, w1 and w3, w2, and the sum over experts.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch

from dsv4cli.kernels.card import HOPPER_SHARED, multiprocessors
from dsv4cli.kernels.experts.kernel import few_tokens_gemm, fp8_inputs, hopper
from dsv4cli.kernels.experts.kernel.sort_by_expert import group
from dsv4cli.kernels.launch import cdiv, next_power_of_2, takes_gluon
from dsv4cli.kernels.pdl import overlap
from dsv4cli.kernels.rows import planned_rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from dsv4cli.kernels.experts import ExpertWeights

# fewest tokens for which `fp8_wgmma` is faster
LEAST = 2
# most tokens whose pairs are sorted by the launch that rounds inputs, and which the shared expert processes in the same
# launches as the others. In launches of its own before them, all experts take 480 us instead of 465 us for 32 tokens,
# and 729 us instead of 701 us for 64 (H200, 6 of 256; routed experts alone 446 us and 670 us)
FEW = 64
# up to this many pairs per expert on average: the most pairs of a narrow chunk, and of a chunk. Other kernels follow.
# Measured (H200, 6 of 192 or 256 experts): at 6 pairs, (8, 16) takes 863 us and (8, 8) 950; at 12, (8, 16) 989 and
# (16, 32) 1,015; at 16, 972 and 847; at 24, (16, 32) 1,002 and `warp_specialized` 1,084; at 32, 1,335 and 1,343.
# At 1.5 pairs, (8, 8) takes 658 us and (8, 16) 674; at 2 and below, (8, 8) is faster, too. Not measured: the limits 4,
# where one expert in 50 has more than 8 pairs, and 13, which interpolation suggests
WIDTHS = ((4, (8, 8)), (13, (8, 16)), (24, (16, 32)))
# bytes of a pipeline stage; maximum and minimum number of stages
STAGE, SLOTS, FEWEST = 128 * (256 + 16), 4, 2
# widths are multiples of this many columns
COLUMNS = 512
# bytes of shared memory besides stages, inputs and their scales (up to 596 with Triton 3.6 and 3.7)
REST = 1 << 10
# counters of batches, one per launch
TURNS = 2
# tokens that a warp of `fp8_inputs.arrange` rounds
PER_WARP = 8
# columns of a token that a program of `add` sums
SUMMED = 512


class ChunkedPairs(NamedTuple):
    """A call's pairs, cut into chunks, and what `fp8_inputs` prepares for them.

    Attributes:
        narrow, tokens: maximum number of pairs in a narrow chunk, and in a chunk. Inputs of a narrow chunk have space
            for `narrow` tokens, and those of a larger one for `tokens`.
        own: tokens of the shared expert, whose chunks come first, or 0.
        place: int32 [pairs], the position of each pair, by expert.
        words, count: int64 [..] and int32 [1]: chunks of routed experts, and their number.
        inputs, scales, factors, counters, turns: see the parameters of `fp8_inputs.prepare`.
    """

    narrow: int
    tokens: int
    own: int
    place: torch.Tensor
    words: torch.Tensor
    count: torch.Tensor
    inputs: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor
    counters: torch.Tensor
    turns: torch.Tensor

    @property
    def written(self) -> tuple[torch.Tensor, ...]:
        """What the kernels of `fp8_inputs` write besides the inputs, in the order of their parameters."""
        return self.scales, self.factors, self.counters, self.turns


def suits(x: torch.Tensor, weights: "ExpertWeights", pairs: int, round_inputs: bool) -> bool:
    """Return whether `fp8_wgmma` supports these weights and inputs x [T, D], and is the fastest for them.

    Its sums differ from those of a single token, so this is False inside `exact_rows`. pairs: the number of pairs.
    """
    inner, width = weights.w1.weight.shape[1], x.shape[1]
    if not round_inputs or len(x) < LEAST or planned_rows(len(x), 1) == 1:
        return False
    if not _is_few(pairs, weights.count, max(inner, width)):
        return False
    if weights.w1.weight.dtype != torch.int8 or x.dtype != torch.bfloat16 or width % COLUMNS or inner % COLUMNS:
        return False
    return takes_gluon(x.device) and _are_described(weights)


def suits_shared(x: torch.Tensor, weights: "ExpertWeights", shared: "ExpertWeights") -> bool:
    """Return whether `fp8_wgmma` can compute this shared expert along with the routed experts, and is the fastest.

    Its weights are read once for each chunk of x [T, D].
    """
    if len(x) > FEW:
        return False
    first = shared.w1.weight
    alike = first.shape == (weights.w1.weight.shape[1], weights.w2.weight.shape[1])
    scales = (matrix.scale for matrix in shared.matrices)
    coded = all(scale is not None and scale.dtype != torch.float32 for scale in scales)
    return alike and first.dtype == torch.float8_e4m3fn and coded and _are_described(shared)


def _are_described(weights: "ExpertWeights") -> bool:
    """Return whether the weights and scales are contiguous and start at multiples of 16 bytes."""
    return all(
        part is not None and part.is_contiguous() and part.storage_offset() % 16 == 0
        for matrix in weights.matrices
        for part in matrix[:2]
    )


def _is_few(pairs: int, experts: int, width: int) -> bool:
    """Return whether no other kernel is faster for this many pairs. Arguments: as of `chunk`.

    The limit is that of `hopper` if the widest chunks do not fit in shared memory.
    """
    fitting = _fitting(width)
    if len(fitting) < len(WIDTHS):
        return bool(fitting) and pairs < hopper.LEAST * experts
    return pairs <= fitting[-1][0] * experts


def _fitting(width: int) -> list[tuple[int, tuple[int, int]]]:
    """Return the entries of WIDTHS whose inputs of this width fit in shared memory next to the fewest stages."""
    return [entry for entry in WIDTHS if buffers(width, entry[1][1])[0] >= FEWEST]


def chunk(pairs: int, experts: int, width: int) -> tuple[int, int]:
    """Return the maximum number of pairs in a narrow chunk, and in a chunk.

    pairs, experts: number of pairs and of experts; width: columns of x or of w2's inputs, whichever has more.
    """
    fitting = _fitting(width)
    return next((widths for most, widths in fitting if pairs <= most * experts), fitting[-1][1])


def buffers(width: int, tokens: int) -> tuple[int, int]:
    """Return the number of stages of weights, and that of input buffers.

    width: columns of the inputs; tokens: most pairs of a chunk.
    """
    each = width * tokens + width // 128 * tokens * 4
    inputs = 2 if SLOTS * STAGE + 2 * each + REST <= HOPPER_SHARED else 1
    return min(SLOTS, (HOPPER_SHARED - REST - inputs * each) // STAGE), inputs


def mixture(
    x: torch.Tensor,
    weights: "ExpertWeights",
    shared: "ExpertWeights | None",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    dtype: torch.dtype,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the sum of routed experts and of the shared one, if given, rounded once to dtype: [T, D].

    Args:
        shared: one that `suits_shared` accepts.
        experts, routing: contiguous.
        own: the shared expert's output [T, D], instead of `shared`.
    """
    work = (_prepared if len(x) <= FEW else _sorted)(x, weights, experts, routing, shared is not None)
    parts = _products(x.shape[1], work, weights, shared, limit)
    if shared is not None:
        own = parts[experts.numel() :]
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    (tokens, width), columns = x.shape, min(x.shape[1] & -x.shape[1], SUMMED)
    few_tokens_gemm.add[(tokens, width // columns)](
        parts, parts if own is None else own, work.place, y, width, experts.shape[1], own is not None, columns,
        **overlap(y),
    )  # fmt: skip
    return y


def _work(x: torch.Tensor, weights: "ExpertWeights", pairs: int, shared: bool) -> ChunkedPairs:
    """Allocate buffers for a call's pairs and inputs."""
    width, inner, own = x.shape[1], weights.w1.weight.shape[1], len(x) if shared else 0
    narrow, tokens = chunk(pairs, weights.count, max(width, inner))
    most = min(pairs, pairs // tokens + weights.count)
    every = most + cdiv(own, tokens)

    def new(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=x.device)

    return ChunkedPairs(
        narrow, tokens, own, new(pairs), new(most, dtype=torch.int64), new(1),
        new(every, width * tokens, dtype=torch.int8), new(every, width // 128 * tokens, dtype=torch.float32),
        new(every, tokens, dtype=torch.float32), new(every, inner // 128), new(TURNS),
    )  # fmt: skip


def _prepared(
    x: torch.Tensor, weights: "ExpertWeights", experts: torch.Tensor, routing: torch.Tensor, shared: bool
) -> ChunkedPairs:
    """Sort the pairs of few tokens, and round their inputs."""
    pairs, per_token, width = experts.numel(), experts.shape[1], x.shape[1]
    work = _work(x, weights, pairs, shared)
    blocks = work.counters.shape[1]
    fp8_inputs.prepare[(len(x), cdiv(width, fp8_inputs.COLUMNS))](
        x, experts, weights.rows, routing, work.place, work.words, work.count, work.inputs.view(torch.uint8),
        *work.written, pairs, cdiv(work.own, work.tokens), x.stride(0), width, per_token, next_power_of_2(per_token),
        next_power_of_2(pairs), max(next_power_of_2(weights.count), 32), next_power_of_2(blocks), blocks, TURNS,
        work.narrow, work.tokens, shared, fp8_inputs.COLUMNS, **overlap(x),
    )  # fmt: skip
    return work


def _sorted(
    x: torch.Tensor, weights: "ExpertWeights", experts: torch.Tensor, routing: torch.Tensor, shared: bool
) -> ChunkedPairs:
    """Sort the pairs of many tokens, and round their inputs."""
    assert not shared
    work = _work(x, weights, experts.numel(), False)
    groups, blocks = group(experts, weights.rows, weights.count, work.tokens), work.counters.shape[1]
    work = work._replace(place=groups.position, words=groups.words, count=groups.count)
    fp8_inputs.arrange[(len(work.inputs), x.shape[1] // 128)](
        x, groups.order, work.words, work.count, routing, work.inputs.view(torch.uint8), *work.written, x.stride(0),
        x.shape[1], experts.shape[1], next_power_of_2(blocks), blocks, TURNS, work.narrow, work.tokens, **overlap(x),
        num_warps=work.tokens // PER_WARP,
    )  # fmt: skip
    return work


def _products(
    width: int, work: ChunkedPairs, weights: "ExpertWeights", shared: "ExpertWeights | None", limit: float
) -> torch.Tensor:
    """Return the output of each pair by position, then those of the shared expert: bf16 [P + own, D]."""
    from dsv4cli.kernels.experts.kernel import fp8_wgmma
    from dsv4cli.kernels.experts.kernel.fp8_layouts import WARPS

    inner_width, pairs, device = weights.w1.weight.shape[1], len(work.place), work.inputs.device

    def results(columns: int) -> torch.Tensor:
        return torch.empty(pairs + work.own, columns, dtype=torch.bfloat16, device=device)

    every = len(work.inputs)
    inner, outputs = results(inner_width), results(width)
    inner_inputs = torch.empty(every, inner_width * work.tokens, dtype=torch.int8, device=device)
    inner_scales = torch.empty(every, inner_width // 128 * work.tokens, dtype=torch.float32, device=device)
    chunks, programs = (work.words, work.count, pairs, work.own), (multiprocessors(device),)
    given, next_given = (
        _inputs(*one, work.tokens) for one in ((work.inputs, work.scales), (inner_inputs, inner_scales))
    )
    last = _routed(weights.w2)
    fp8_wgmma.products[programs](
        *_routed(weights.w1), *_routed(weights.w3), *_own((shared or weights).w1, (shared or weights).w3),
        *given, *chunks, work.factors, inner, inner_inputs, inner_scales, work.counters,
        work.turns[:1], limit, inner_width, width, work.narrow, work.tokens, *buffers(width, work.tokens), True,
        shared is not None, **overlap(inner), num_warps=WARPS,
    )  # fmt: skip
    fp8_wgmma.products[programs](
        *last, *last, *_own((shared or weights).w2, (shared or weights).w2), *next_given,
        *chunks, None, outputs, None, None, None, work.turns[1:], limit, width, inner_width, work.narrow, work.tokens,
        *buffers(inner_width, work.tokens), False, shared is not None, **overlap(inner), num_warps=WARPS,
    )  # fmt: skip
    return outputs


def _routed(matrix: StoredMatrix) -> "tuple[TensorDescriptor, TensorDescriptor]":
    """Return a stack's codes as bytes [E * N, K / 2] and its scales as words [E * N, K / 128], in tiles of 64 rows."""
    from dsv4cli.kernels.gluon_launch import gluon_described

    codes, scale, _ = matrix
    assert scale is not None
    words = scale.view(torch.int32).flatten(0, 1)
    return gluon_described(codes.flatten(0, 1), (64, 128)), gluon_described(words, (64, 4))


def _own(first: StoredMatrix, second: StoredMatrix) -> "tuple[TensorDescriptor | torch.Tensor, ...]":
    """Return the codes and scales of two matrices as bytes: the shared expert's, or placeholders that are not read."""
    from dsv4cli.kernels.gluon_launch import gluon_described

    codes = [gluon_described(one.weight.view(torch.int8).flatten(0, -2), (64, 128)) for one in (first, second)]
    scales = [one.scale.view(torch.uint8) for one in (first, second) if one.scale is not None]
    return *codes, *scales


def _inputs(inputs: torch.Tensor, scales: torch.Tensor, tokens: int) -> "tuple[TensorDescriptor, TensorDescriptor]":
    """Return inputs as rows of 32 bytes, and the scales of 512 columns of a chunk of `tokens` as rows of four."""
    from dsv4cli.kernels.gluon_launch import gluon_described

    return gluon_described(inputs.view(-1, 32), (128, 32)), gluon_described(scales.view(-1, 4), (tokens, 4))
