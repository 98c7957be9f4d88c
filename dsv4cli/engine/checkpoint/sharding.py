"""Tensor-parallel sizes that divide a model, and the shape of a rank's shard; integers, no torch."""

from collections.abc import Iterable
from math import gcd

from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.config.formats import STORAGE
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.errors import CheckpointError, UsageError
from dsv4cli.kernels.formats import FP8_BLOCK
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES, TYPES


def part_shape(spec: TensorSpec, ranks: int) -> tuple[int, ...]:
    """Return the shape of one rank's shard of a tensor.

    Raises CheckpointError if `ranks` does not divide the dimension, or the shard boundary would be inside a block.
    """
    if spec.shard is None:
        return spec.shape
    size, rest = divmod(spec.shape[spec.shard], ranks)
    kind = BLOCK_DTYPES.get(spec.dtype)
    block, what = STORAGE[spec.form].rows if spec.form and not spec.is_scale else 1, str([*spec.shape])
    if kind is not None:
        block = TYPES[kind].nbytes if spec.shard else 1
        columns = spec.shape[1] // TYPES[kind].nbytes * TYPES[kind].values
        what = f"[{spec.shape[0]}, {columns}] ({kind}, blocks of {TYPES[kind].values})"
    inside_a_block = ranks > 1 and size % block
    if rest or inside_a_block:
        raise CheckpointError(f"{spec.name} {what} cannot be split across {ranks} ranks", "use fewer ranks")
    return (*spec.shape[: spec.shard], size, *spec.shape[spec.shard + 1 :])


def check_dimensions(config: ModelConfig, ranks: int) -> None:
    """Raise UsageError naming the first dimension that `ranks` does not divide."""
    dimensions = {
        "num_attention_heads": config.num_attention_heads,
        "o_groups": config.o_groups,
        "moe_intermediate_size": config.moe_intermediate_size,
        "vocab_size": config.vocab_size,
    }
    most = gcd(*dimensions.values())
    for name, count in dimensions.items():
        if count % ranks:
            numbers = ", ".join(str(number) for number in range(1, most + 1) if most % number == 0)
            raise UsageError(
                f"{name} = {count} is not divisible by {ranks} ranks", f"use one of these numbers: {numbers}"
            )


def check_ranks(config: ModelConfig, specs: Iterable[TensorSpec], ranks: int, *, rounds: bool) -> None:
    """Raise UsageError, listing valid numbers of ranks, if `ranks` does not divide the model of this table.

    rounds: whether the inputs of FP4 matrices are quantized in blocks.
    """
    table = list(specs)
    reason = _refusal(config, table, ranks, rounds)
    if reason:
        # experts are many and alike
        kinds = {(spec.dtype, spec.shape, spec.shard, spec.form, spec.columns): spec for spec in table}.values()
        suiting = [str(count) for count in range(1, config.o_groups + 1) if not _refusal(config, kinds, count, rounds)]
        raise UsageError(reason, f"use {'one of these numbers: ' if suiting[1:] else ''}{', '.join(suiting)}")


def divides(config: ModelConfig, specs: Iterable[TensorSpec], ranks: int) -> bool:
    """Return whether `ranks` divides the model, with all input quantization of the official code."""
    return not _refusal(config, specs, ranks, rounds=True)


def _refusal(config: ModelConfig, specs: Iterable[TensorSpec], ranks: int, rounds: bool) -> str:
    """Return why `ranks` does not divide the model, '' if it does."""
    try:
        check_dimensions(config, ranks)
        for spec in specs:
            part_shape(spec, ranks)
            inner = spec.columns // ranks
            packed = spec.form is not None and not spec.is_scale and STORAGE[spec.form].codes > 1
            if rounds and packed and spec.shard == 1 and inner % FP8_BLOCK:
                return (
                    f"{ranks} ranks would have {inner} of the {spec.columns} columns of {spec.name} each, and what it "
                    f"is multiplied with is rounded in blocks of {FP8_BLOCK}"
                )
    except (UsageError, CheckpointError) as error:
        return error.message
    return ""
