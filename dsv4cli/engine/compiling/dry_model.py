"""A model without data for dry runs: one layer of each kind, and simulated tensor-parallel ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dsv4cli.engine.checkpoint.gguf.loading import loaded_specs
from dsv4cli.engine.checkpoint.layout import TensorSpec, loaded_tensors
from dsv4cli.engine.compiling.demand import Demand
from dsv4cli.engine.config.capacity import divides_from
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.parallel.world import SINGLE, World
from dsv4cli.engine.weights.fill import allocate
from dsv4cli.engine.weights.offload import ExpertOffload, plan_of
from dsv4cli.engine.weights.placement import Division, decide
from dsv4cli.engine.weights.reserve import reserves
from dsv4cli.engine.weights.sizes import measure
from dsv4cli.kernels.all_reduce import SymmetricBuffers, all_gather, all_reduce, buffer_shape, reduce_scatter

# the tensors of a layer in a GGUF file begin with this and its number
BLOCK = "blk."


@dataclass(frozen=True)
class DryWorld(World):
    """Rank 0 of simulated ranks.

    Attributes:
        every: each rank's view of the buffers, because each rank compiles its own kernel.
    """

    every: tuple[SymmetricBuffers, ...] = ()

    def sum_rounded(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Launch each rank's all-reduce, if the ranks would use shared buffers for it."""
        x = x.contiguous()
        for buffers in self.every if self.every[0].takes(x) else ():
            all_reduce(x, dtype, buffers)
        return x.to(dtype)

    def sum_rows(self, x: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
        """Launch each rank's reduce-scatter."""
        if rows == len(x):
            return self.sum_rounded(x, dtype)
        for buffers in self.every:
            reduce_scatter(x, dtype, buffers)
        return x.new_empty(rows, *x.shape[1:], dtype=dtype)

    def gather_rows(self, parts: Sequence[torch.Tensor], tokens: int) -> list[torch.Tensor]:
        """Launch each rank's all-gather."""
        if len(parts[0]) == tokens:
            return list(parts)
        for buffers in self.every:
            all_gather(parts, tokens, buffers)
        return [x.new_empty(tokens, *x.shape[1:]) for x in parts]

    def gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """Return a tensor with the columns of all ranks."""
        return x.new_empty(x.shape[0], x.shape[1] * self.size)

    def broadcast_from_leader(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's own tensor."""
        return x


def placed(demand: Demand) -> tuple[Demand, Division | None]:
    """Apply the memory placement to a demand.

    Returns:
        The demand with the chunk size that fits, and without a drafter if that does not fit; and how experts are
        divided if not all fit on the GPU, else None.

    Raises:
        NotEnoughMemory: the model does not fit.
    """
    if demand.memory is None:
        return demand, None
    config = demand.config
    sizes = measure(_specs(demand).values(), config.num_experts_per_tok, demand.ranks)
    reserved = reserves(config, demand.formats, demand.load, demand.ranks, gguf=sizes.gguf)
    placement = decide(sizes, demand.memory, reserved, demand.drafting)
    config = config if placement.drafter else config.without_drafter()
    return replace(demand, config=config, chunk=placement.chunk), placement.division


def dry_model(demand: Demand, division: Division | None, device: torch.device) -> Transformer:
    """Build the model of a demand without data. Requires `NoData`."""
    numerics = Numerics(getattr(torch, demand.dtype), demand.simulate, demand.exact)
    demand, world = one_of_each_kind(demand), _world(demand.ranks, device)
    model, specs = Transformer(demand.config, numerics, world), _specs(demand)
    if division is not None:
        plan = plan_of(specs.values(), division, world.size)
        offload = ExpertOffload(plan, device)
        offload.install(model)
        elsewhere = {name for name, _ in offload.destinations(specs.values())}
        specs = {name: spec for name, spec in specs.items() if name not in elsewhere}
    allocate(model, specs, device, world)
    return model.eval()


def one_of_each_kind(demand: Demand) -> Demand:
    """Reduce the model to the first layer with each kind of part, plus the layers that a drafter reads."""
    config, types = demand.config, _types_by_layer(demand)
    first: dict[object, int] = {}
    for layer, ratio in enumerate(config.layer_ratios):
        for part in _parts((config.is_hash_layer(layer), ratio), types.get(layer, [])):
            first.setdefault(part, layer)
    kept = sorted({*first.values()})
    targets = () if config.dspark is None else config.dspark.target_layer_ids
    kept = sorted({*kept, *range(len(targets))})
    ratios = tuple(config.layer_ratios[layer] for layer in kept)
    stages = config.compress_ratios[config.num_hidden_layers :]
    reduced_types = {name: kind for name, kind in demand.gguf_types.items() if not name.startswith(BLOCK)}
    for new, old in enumerate(kept):
        reduced_types |= {f"{BLOCK}{new}.{name}": kind for name, kind in types.get(old, ())}
    reduced = replace(
        config,
        num_hidden_layers=len(kept),
        num_hash_layers=sum(config.is_hash_layer(layer) for layer in kept),
        compress_ratios=ratios + stages,
        dspark=config.dspark and replace(config.dspark, target_layer_ids=tuple(range(len(targets)))),
    )
    return replace(demand, config=reduced, gguf_types=reduced_types)


def _parts(kind: tuple[bool, int], types: list[tuple[str, str]]) -> Iterator[object]:
    """Yield the kinds of the parts of a layer: experts and the shared expert by their GGUF types alone.

    In a file with many types, hardly two layers are alike, while their parts are.
    """
    parts: dict[str, list[tuple[str, str]]] = {"_exps.": [], "_shexp.": [], "": []}
    for name, stored in types:
        parts[next(part for part in parts if part in name)].append((name, stored))
    rest = parts.pop("")
    yield kind, tuple(rest)
    yield from map(tuple, parts.values())


def _types_by_layer(demand: Demand) -> dict[int, list[tuple[str, str]]]:
    """Return the names in a layer, and the types, of its tensors in a GGUF file."""
    found = dict[int, list[tuple[str, str]]]()
    for name, kind in demand.gguf_types.items():
        if name.startswith(BLOCK):
            layer, _, rest = name.removeprefix(BLOCK).partition(".")
            found.setdefault(int(layer), []).append((rest, kind))
    return {layer: sorted(types) for layer, types in found.items()}


def _specs(demand: Demand) -> dict[str, TensorSpec]:
    """Return the tensors that fill the model's parameters."""
    if demand.gguf_types:
        return loaded_specs(demand.config, demand.gguf_types)
    return loaded_tensors(demand.config, demand.formats)


def _world(ranks: int, device: torch.device) -> World:
    if ranks == 1:
        return SINGLE
    boxes = tuple(torch.empty(buffer_shape(ranks), dtype=torch.int32, device=device) for _ in range(ranks))
    sums = torch.empty(buffer_shape(ranks)[0], dtype=torch.int32, device=device)
    every = tuple(SymmetricBuffers(rank, boxes, sums) for rank in range(ranks))
    return DryWorld(size=ranks, divides_from=divides_from(ranks), every=every)
