"""Kernels of a benchmark, compiled by all cores while its model loads: one after another they take minutes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from dsv4cli.engine.checkpoint.source import FolderSource, RandomSource
from dsv4cli.engine.compiling.card import card_of
from dsv4cli.engine.compiling.compile_ahead import Compilation
from dsv4cli.engine.compiling.demand import demand_of
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.parallel.world import World
from dsv4cli.engine.settings import NO_DRAFTS, Drafting, Limits, Sampling
from dsv4cli.engine.weights.reserve import Workload


@contextmanager
def compiled_ahead(
    source: FolderSource | RandomSource,
    numerics: Numerics,
    where: tuple[torch.device, World],
    lengths: Sequence[int],
    limits: Limits,
    drafting: Drafting = NO_DRAFTS,
    load: Workload | None = None,
) -> Iterator[None]:
    """Load the model in the block; most kernels for prompts of these lengths are there when it ends."""
    device, world = where
    if device.type != "cuda" or world.rank:
        yield
        return
    identity, samplings = source.identity, [Sampling(0.0), Sampling(1.0)]
    demand = demand_of(
        identity.config, identity.formats, numerics, limits, samplings, drafting, lengths, ranks=world.size,
        sequences=len(lengths), gguf_types=identity.gguf_types,
    )  # fmt: skip
    demand = demand if load is None else replace(demand, load=load)
    with Compilation(demand, card_of(device), torch.cuda.current_device()) as ahead:
        yield
        ahead.wait(lambda counts: None)
