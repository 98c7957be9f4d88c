"""Routed experts for many tokens: groups pairs by expert, multiplies tiles of them twice, and sums in a fixed order."""

from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from dsv4cli.kernels.block_scale.kernel import fp8_round
from dsv4cli.kernels.card import stages_that_fit
from dsv4cli.kernels.dispatch import KernelUnsupported
from dsv4cli.kernels.experts.kernel import grouped_gemm, grouped_operands, hopper
from dsv4cli.kernels.experts.kernel.few_tokens import SCALE_WORDS
from dsv4cli.kernels.experts.kernel.sort_by_expert import Groups, group
from dsv4cli.kernels.formats import FP4_BLOCK, FP8_BLOCK
from dsv4cli.kernels.launch import cdiv, next_power_of_2
from dsv4cli.kernels.pdl import FEW, overlap_of_few
from dsv4cli.kernels.rows import rows
from dsv4cli.kernels.stored_matrix import StoredMatrix

if TYPE_CHECKING:
    from dsv4cli.kernels.experts import ExpertWeights


# dtype for the scales of 32 columns of FP4 and NVFP4 if a row's scales do not fill whole words
SCALE_PARTS = {torch.int8: torch.uint8, torch.uint8: torch.int16}


def routed_outputs(
    x: torch.Tensor,
    weights: "ExpertWeights",
    experts: torch.Tensor,
    routing: torch.Tensor,
    limit: float,
    round_inputs: bool,
) -> torch.Tensor:
    """Return the output of each of a token's experts: [T * k, D] in x's dtype."""
    given, (tokens, per_token) = rows(x), experts.shape
    count, inner_width, width = weights.count, weights.w1.weight.shape[1], x.shape[1]
    if not tokens:
        return torch.empty(0, width, dtype=x.dtype, device=x.device)
    _check(weights, width, inner_width, round_inputs)
    form, wide = _format(weights.w1), torch.float32 in (x.dtype, weights.w1.weight.dtype)
    pairs, shared = tokens * per_token, hopper.suits(x, weights, tokens * per_token, count)
    size, tuned = hopper.tile(pairs, count) if shared else _columns(pairs, count, wide), form == "fp4" and not wide
    groups = group(experts, weights.rows, count, size)
    inputs, routing = _inputs(given, form, round_inputs), routing.contiguous()
    inner = torch.empty(pairs, _padded(inner_width), dtype=x.dtype, device=x.device)
    if shared:
        hopper.gate_up(inputs, groups, routing, weights, inner, limit, size)
    else:
        _gate_up(inputs, groups, routing, weights, inner, limit, width, form, size, tuned)
    if round_inputs:
        inner = fp8_round(inner, FP8_BLOCK)
    outputs = torch.empty(pairs, width, dtype=x.dtype, device=x.device)
    if shared:
        hopper.down(inner, groups, weights, outputs, size)
    else:
        _down(inner, groups, weights, outputs, inner_width, form, size, tuned)
    return outputs


def _gate_up(
    x: torch.Tensor,
    groups: Groups,
    routing: torch.Tensor,
    weights: "ExpertWeights",
    inner: torch.Tensor,
    limit: float,
    width: int,
    form: str,
    size: int,
    tuned: bool,
) -> None:
    (inner_width, padded), tiles = (weights.w1.weight.shape[1], inner.shape[1]), _tiles(groups)
    height, warps, steps, described = gate_up_tiles(size, tuned, x.device)
    grouped_gemm.gate_up[(cdiv(padded, height), len(groups.rows))](
        x, *tiles, routing, *_elements(weights.w1, height, described), *_elements(weights.w3, height, described),
        weights.w1.scale_2, weights.w3.scale_2, inner, limit, inner_width, width, x.shape[1], padded, routing.shape[1],
        form, described, height, size, min(warps, height // 16), steps, num_warps=warps,
    )  # fmt: skip


def _down(
    inner: torch.Tensor,
    groups: Groups,
    weights: "ExpertWeights",
    outputs: torch.Tensor,
    inner_width: int,
    form: str,
    size: int,
    tuned: bool,
) -> None:
    width, padded = outputs.shape[1], inner.shape[1]
    height, warps, steps, described = down_tiles(size, tuned, inner.device)
    grouped_gemm.down[(cdiv(width, height), len(groups.rows))](
        inner, *_tiles(groups), *_elements(weights.w2, height, described), weights.w2.scale_2, outputs, width,
        inner_width, padded, form, described, height, size, min(warps, height // 16), steps, num_warps=warps,
    )  # fmt: skip


def _tiles(groups: Groups) -> tuple[torch.Tensor, ...]:
    return groups.order, groups.row, groups.start, groups.rows


def ordered_sum(
    outputs: torch.Tensor,
    experts: torch.Tensor,
    shared: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Sum outputs [T * k, D] of pairs by token: [T, D], added in fp32 in ascending order of experts.

    shared: [T, D], added last. The sum is rounded once, to dtype.
    """
    (tokens, per_token), width = experts.shape, outputs.shape[1]
    total = torch.empty(tokens, width, dtype=dtype, device=outputs.device)
    if tokens:
        # with few tokens, smaller programs finish sooner, and there are multiprocessors for all of them
        block = min(256 if tokens <= FEW else 2048, next_power_of_2(width))
        grouped_gemm.add[(tokens, cdiv(width, block))](
            outputs, experts.contiguous(), shared, total, width, per_token, next_power_of_2(per_token), block,
            **overlap_of_few(outputs, tokens),
        )  # fmt: skip
    return total


def _format(matrix: StoredMatrix) -> str:
    weight, scale, _ = matrix
    if scale is None:
        return "plain"
    if weight.dtype != torch.float8_e4m3fn:
        return "fp4"
    return "fp8_f32" if scale.dtype == torch.float32 else "fp8"


def _columns(pairs: int, count: int, wide: bool) -> int:
    """Return the number of pairs in a tile for this many pairs and experts. wide: whether products are in fp32."""
    if wide:
        return 32
    load = pairs / count
    return 16 if load <= 12 else 32 if load <= 24 else 64 if load <= 50 else 128


class GroupedTiles(NamedTuple):
    """Rows of each matrix in a program, warps, stages, and whether a descriptor loads the weights."""

    rows: int
    warps: int
    stages: int
    described: bool


def gate_up_tiles(columns: int, tuned: bool, device: torch.device) -> GroupedTiles:
    """Return the tiles for w1 and w3, tuned on an H200 for FP4 weights of Flash.

    At 128 columns, two programs fill a multiprocessor's shared memory to the last byte: the barriers of a descriptor
    would leave space for only one, and halve the speed.
    """
    if not tuned:
        return GroupedTiles(64, 8, 2, False)
    return (
        GroupedTiles(64, 4, 2, True) if columns == 16 else GroupedTiles(64, 4, _stages(device, 2, 64, columns), False)
    )


def down_tiles(columns: int, tuned: bool, device: torch.device) -> GroupedTiles:
    """Return the tiles for w2, tuned as `gate_up_tiles`."""
    if not tuned:
        return GroupedTiles(128, 8, 2, False)
    return GroupedTiles(128, 4, _stages(device, 1, 128, columns), columns < 128)


def _stages(device: torch.device, matrices: int, height: int, columns: int) -> int:
    """Return the number of stages that fit in shared memory.

    A stage is 128 columns of FP4 with scales for `height` rows of each matrix, and of bf16 for the tile's pairs. Shared
    memory also holds the results while they are reordered.
    """
    return stages_that_fit(device, 3, matrices * height * (64 + 4) + columns * 256, height * columns * 2)


def _padded(width: int) -> int:
    return cdiv(width, 128) * 128


def _inputs(x: torch.Tensor, form: str, round_inputs: bool) -> torch.Tensor:
    count, width = x.shape
    padded = _padded(width)
    y = torch.empty(count, padded, dtype=x.dtype, device=x.device)
    grouped_operands.prepare[(cdiv(count, 8), padded // 128)](
        x, y, count, x.stride(0), width, padded, round_inputs, form, 8, num_warps=4
    )
    return y


def _elements(
    matrix: StoredMatrix, height: int, described: bool
) -> tuple[torch.Tensor | TensorDescriptor, torch.Tensor]:
    """Return the elements of a matrix's weight and of its scale as the products load them."""
    weight, scale, _ = matrix
    if scale is None:
        return weight, weight
    if weight.dtype == torch.float8_e4m3fn:
        return weight, scale if scale.dtype == torch.float32 else scale.view(torch.uint8)
    whole = scale.shape[-1] % (4 if weight.dtype == torch.int8 else 8) == 0
    codes = scale.view(SCALE_WORDS[weight.dtype] if whole else SCALE_PARTS[weight.dtype])
    words = weight.view(torch.int32).flatten(0, 1)
    return TensorDescriptor.from_tensor(words, [height, 16]) if described else words, codes


def _check(weights: "ExpertWeights", width: int, inner: int, round_inputs: bool) -> None:
    for part in chain(*(matrix[:2] for matrix in weights.matrices)):
        if part is not None and not (part.is_contiguous() and part.data_ptr() % 16 == 0):
            raise KernelUnsupported("the Triton experts require contiguous, 16-byte-aligned weights and scales")
    if weights.w1.weight.dtype in SCALE_PARTS and (width % FP4_BLOCK or inner % FP4_BLOCK):
        raise KernelUnsupported(f"the Triton experts require FP4 widths in multiples of 32, not {width} and {inner}")
    if round_inputs and (width % FP8_BLOCK or inner % FP8_BLOCK):
        raise KernelUnsupported(f"the Triton experts round only widths in multiples of 128, not {width} and {inner}")
