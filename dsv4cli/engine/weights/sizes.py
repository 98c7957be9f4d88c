"""Bytes of one rank's shard of a model, and of the part that can be offloaded to host memory; no torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape
from dsv4cli.kernels.ggml.types import BLOCK_DTYPES

# bits of an element of a tensor to load: rows of blocks are bytes
BITS = DTYPE_BITS | dict.fromkeys(BLOCK_DTYPES, 8)
# shape and dtype (by its name in safetensors headers) of each matrix and scale of an expert
Form = dict[str, tuple[tuple[int, ...], str]]
EMBEDDING = "embed.weight"
FP32_BYTES = 4


@dataclass(frozen=True)
class RankSizes:
    """Sizes of one rank's shard of a model, in bytes.

    Attributes:
        total: all tensors.
        drafter: tensors of the drafter.
        layers: number of layers whose experts can be offloaded.
        experts: number of routed experts in each of them.
        expert: bytes of one expert.
        chosen: number of experts per token.
        embedding: bytes of the embedding, which can be offloaded too.
        dequantized: `total` with every weight in fp32; scales and tables as stored.
        dequantized_drafter: `drafter` with every weight in fp32.
        gguf: whether some matrices are GGUF blocks.
    """

    total: int
    drafter: int
    layers: int
    experts: int
    expert: int
    chosen: int
    embedding: int = 0
    dequantized: int = 0
    dequantized_drafter: int = 0
    gguf: bool = False

    @property
    def main(self) -> int:
        """Bytes without the drafter."""
        return self.total - self.drafter

    @property
    def rest(self) -> int:
        """Bytes that are always on the device."""
        return self.main - self.embedding - self.layers * self.experts * self.expert


def measure(specs: Iterable[TensorSpec], chosen: int, ranks: int) -> RankSizes:
    """Return the sizes of one rank's shard of a table; a token uses `chosen` experts of a layer.

    Raises CheckpointError for a tensor that the ranks cannot divide evenly.
    """
    table = list(specs)
    # count equal tensors once: there are many experts of the same shape
    kinds = Counter((spec.dtype, spec.shape, spec.shard, is_drafter(spec)) for spec in table)
    examples = {(spec.dtype, spec.shape, spec.shard): spec for spec in table}
    total = drafter = dequantized = dequantized_drafter = 0
    for (dtype, shape, shard, drafts), count in kinds.items():
        example = examples[dtype, shape, shard]
        values = count * prod(part_shape(example, ranks))
        nbytes = values * BITS[dtype] // 8
        wide = values * FP32_BYTES * example.count // prod(shape) if example.count else nbytes
        total += nbytes
        drafter += nbytes * drafts
        dequantized += wide
        dequantized_drafter += wide * drafts
    layers, form = expert_layers((spec for spec in table if not is_drafter(spec)), ranks)
    return RankSizes(
        total=total,
        drafter=drafter,
        layers=len(layers),
        experts=1 + max((spec.expert for spec in table if spec.expert is not None), default=-1),
        expert=sum(prod(shape) * BITS[dtype] // 8 for shape, dtype in form.values()),
        chosen=chosen,
        embedding=sum(prod(spec.shape) * BITS[spec.dtype] // 8 for spec in table if spec.name == EMBEDDING),
        dequantized=dequantized,
        dequantized_drafter=dequantized_drafter,
        gguf=any(spec.dtype in BLOCK_DTYPES for spec in table),
    )


def is_drafter(spec: TensorSpec) -> bool:
    """Return whether a tensor belongs to the drafter."""
    return spec.name.startswith("mtp.")


def expert_layers(specs: Iterable[TensorSpec], ranks: int) -> tuple[tuple[str, ...], Form]:
    """Return the modules whose experts have the first module's shapes and dtypes, and these."""
    forms: dict[str, Form] = {}
    for spec in specs:
        if spec.expert == 0:
            module, part = expert_part(spec)
            forms.setdefault(module, {})[part] = (part_shape(spec, ranks), spec.dtype)
    first = next(iter(forms.values()), {})
    return tuple(module for module, form in forms.items() if form == first), first


def expert_part(spec: TensorSpec) -> tuple[str, str]:
    """Return the module of an expert's tensor, and the name of its part of the expert."""
    module, matrix, role = spec.parameter.rsplit(".", 2)
    return module, f"{matrix}.{role}"
