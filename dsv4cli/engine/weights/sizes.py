"""How many bytes one rank's part of a model has, and how many of them may lie in host memory; no torch."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from dsv4cli.engine.checkpoint.headers import DTYPE_BITS
from dsv4cli.engine.checkpoint.layout import TensorSpec
from dsv4cli.engine.checkpoint.sharding import part_shape

# shape and dtype (as a safetensors header names it) of each matrix and scale of an expert
Form = dict[str, tuple[tuple[int, ...], str]]
EMBEDDING = "embed.weight"
FP32_BYTES = 4


@dataclass(frozen=True)
class RankSizes:
    """Bytes of one rank's part of a model.

    total: all tensors. drafter: those of the drafter. layers: how many have `experts` routed experts of `expert` bytes
    each that may lie in host memory. chosen: how many of them a token takes. embedding: of the table, which may too.
    dequantized, dequantized_drafter: total and drafter with every weight in fp32; scales and tables as stored.
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

    @property
    def main(self) -> int:
        """Without the drafter."""
        return self.total - self.drafter

    @property
    def rest(self) -> int:
        """What lies on the device in any case."""
        return self.main - self.embedding - self.layers * self.experts * self.expert


def measure(specs: Iterable[TensorSpec], chosen: int, ranks: int) -> RankSizes:
    """Adds up one rank's part of a table, of which a token takes `chosen` experts of a layer.

    Raises CheckpointError for a tensor that the ranks do not divide.
    """
    table = list(specs)
    # experts are many and alike
    kinds = Counter((spec.dtype, spec.shape, spec.shard, is_drafter(spec)) for spec in table)
    examples = {(spec.dtype, spec.shape, spec.shard): spec for spec in table}
    total = drafter = dequantized = dequantized_drafter = 0
    for (dtype, shape, shard, drafts), count in kinds.items():
        example = examples[dtype, shape, shard]
        values = count * prod(part_shape(example, ranks))
        nbytes = values * DTYPE_BITS[dtype] // 8
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
        expert=sum(prod(shape) * DTYPE_BITS[dtype] // 8 for shape, dtype in form.values()),
        chosen=chosen,
        embedding=sum(prod(spec.shape) * DTYPE_BITS[spec.dtype] // 8 for spec in table if spec.name == EMBEDDING),
        dequantized=dequantized,
        dequantized_drafter=dequantized_drafter,
    )


def is_drafter(spec: TensorSpec) -> bool:
    """Whether it is a tensor of the drafter."""
    return spec.name.startswith("mtp.")


def expert_layers(specs: Iterable[TensorSpec], ranks: int) -> tuple[tuple[str, ...], Form]:
    """The modules whose experts are of the form of the first module's, and this form."""
    forms: dict[str, Form] = {}
    for spec in specs:
        if spec.expert == 0:
            module, part = expert_part(spec)
            forms.setdefault(module, {})[part] = (part_shape(spec, ranks), spec.dtype)
    first = next(iter(forms.values()), {})
    return tuple(module for module, form in forms.items() if form == first), first


def expert_part(spec: TensorSpec) -> tuple[str, str]:
    """The module of an expert's tensor, and which part of the expert it is."""
    module, matrix, role = spec.parameter.rsplit(".", 2)
    return module, f"{matrix}.{role}"
