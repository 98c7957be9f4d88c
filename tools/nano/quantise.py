"""The rounding of the stored model and of the engine in training: exact values forward, straight-through gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from dsv4cli.kernels.block_scale.ref import fp4_round, fp8_round, round_e2m1
from dsv4cli.kernels.formats import E2M1_MAX, E4M3_MAX, FP4_BLOCK, FP8_BLOCK, KV_BLOCK
from dsv4cli.kernels.recode.blocks import power_of_two, scale_exponent
from tools.nano.shape import Parameter

# parameters that stay in fp32, whatever the dtype of activations
FP32_LEAVES = (
    "compressor.wkv.weight", "compressor.wgate.weight", "gate.weight", "head.weight", "norm.weight",
    "markov_w2.weight", "confidence_head.proj.weight",
)  # fmt: skip


@dataclass(frozen=True)
class Rounding:
    """What to round.

    Attributes:
        weights: to their storage format.
        activations: as Numerics.reference does, in addition to the dtype.
    """

    weights: bool
    activations: bool


def straight(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return exactly the values of `rounded`, with the gradient of x."""
    return rounded.detach() + (x - x.detach())


def linear_input(x: torch.Tensor, on: bool) -> torch.Tensor:
    """Round the input of a quantized linear: [..., K], K a multiple of 128."""
    return straight(x, fp8_round(x.detach(), FP8_BLOCK)) if on else x


def keys(kv: torch.Tensor, rope_dims: int, on: bool) -> torch.Tensor:
    """Round keys or entries [..., d] as in the cache: all dims except the RoPE dims to FP8."""
    if not on:
        return kv
    plain = kv.detach()
    return straight(kv, torch.cat((fp8_round(plain[..., :-rope_dims], KV_BLOCK), plain[..., -rope_dims:]), -1))


def index(x: torch.Tensor, hadamard: torch.Tensor, on: bool) -> torch.Tensor:
    """Rotate indexer queries or keys [..., D] by hadamard fp32 [D, D] (entries 1 and -1), then round to FP4."""
    if not on:
        return x
    turned = ((x.float() @ hadamard) * x.shape[-1] ** -0.5).to(x.dtype)
    return straight(turned, fp4_round(turned.detach(), FP4_BLOCK))


def hadamard_matrix(width: int, device: torch.device | str) -> torch.Tensor:
    """Return the Hadamard matrix in Sylvester order: fp32 [width, width], entries 1 and -1."""
    matrix = torch.ones(1, 1, device=device)
    while len(matrix) < width:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], device=device), matrix)
    return matrix


def fp4_weight(values: torch.Tensor) -> torch.Tensor:
    """Return the values that recode.to_fp4 stores: fp32 [..., N, K], same shape."""
    groups = values.unflatten(-1, (-1, FP4_BLOCK))
    exponent = scale_exponent(groups.abs().amax(-1, keepdim=True), E2M1_MAX)
    scaled = (groups * power_of_two(-exponent, torch.float32)).clamp(-E2M1_MAX, E2M1_MAX)
    return (round_e2m1(scaled) * power_of_two(exponent, torch.float32)).flatten(-2)


def fp8_weight(blocks: torch.Tensor) -> torch.Tensor:
    """Return the values that recode.to_fp8 stores: fp32 blocks [n, 128 * 128], same shape."""
    exponent = scale_exponent(blocks.abs().amax(-1, keepdim=True), E4M3_MAX)
    codes = (blocks * power_of_two(-exponent, torch.float32)).to(torch.float8_e4m3fn)
    return codes.float() * power_of_two(exponent, torch.float32)


def _to_blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Map [N, K], both multiples of 128, to [n, 128 * 128]."""
    tiles = matrix.unflatten(0, (-1, FP8_BLOCK)).unflatten(2, (-1, FP8_BLOCK))  # [N/128, 128, K/128, 128]
    return tiles.transpose(1, 2).reshape(-1, FP8_BLOCK * FP8_BLOCK)


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    rows, columns = shape
    tiles = blocks.view(rows // FP8_BLOCK, columns // FP8_BLOCK, FP8_BLOCK, FP8_BLOCK)
    return tiles.transpose(1, 2).reshape(rows, columns)


@torch.no_grad()
def stored_values(parameters: Mapping[str, torch.Tensor], table: Mapping[str, Parameter]) -> dict[str, torch.Tensor]:
    """Return every floating-point parameter as a checkpoint stores it, in fp32: exactly what `export` writes."""
    values = {name: tensor for name, tensor in parameters.items() if table[name].form == "f32"}
    values |= {name: t.bfloat16().float() for name, t in parameters.items() if table[name].form == "bf16"}
    fp4 = {name: tensor for name, tensor in parameters.items() if table[name].form == "fp4"}
    values |= _together(fp4, lambda t: t.reshape(-1, FP4_BLOCK), lambda t, shape: t.view(shape), fp4_weight)
    fp8 = {name: tensor for name, tensor in parameters.items() if table[name].form == "fp8"}
    return values | _together(fp8, _to_blocks, _from_blocks, fp8_weight)


def _together(
    tensors: Mapping[str, torch.Tensor],
    cut: Callable[[torch.Tensor], torch.Tensor],
    join: Callable[[torch.Tensor, torch.Size], torch.Tensor],
    rounding: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Round all tensors in one pass over their blocks, to launch few kernels in a step."""
    parts = [cut(tensor) for tensor in tensors.values()]
    rounded = rounding(torch.cat(parts)).split([len(part) for part in parts])
    return {name: join(part, tensors[name].shape) for name, part in zip(tensors, rounded, strict=True)}


def working_weights(
    parameters: Mapping[str, torch.Tensor], table: Mapping[str, Parameter], rounding: Rounding, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the weights of a step by name: rounded if `rounding` says so, in the dtype of the computation.

    parameters: fp32 masters and int64 tables. Gradients pass straight through to the masters.
    """
    floating = {name: tensor for name, tensor in parameters.items() if tensor.is_floating_point()}
    weights = {name: tensor for name, tensor in parameters.items() if not tensor.is_floating_point()}
    stored = stored_values(floating, table) if rounding.weights else {}
    for name, tensor in floating.items():
        value = straight(tensor, stored[name]) if rounding.weights else tensor
        fp32 = table[name].form == "f32" or name.endswith(FP32_LEAVES)
        weights[name] = value if fp32 else value.to(dtype)
    return weights
