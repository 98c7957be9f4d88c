"""The most that the tensors of a prompt's steps take on a GPU that is not there: a process without TRITON_INTERPRET.

usage: python -m tests.support.dry_peaks PRESET,CHUNK,PLACE,RANKS ...; prints JSON.
"""

import json
import sys

from dsv4cli.engine.compiling.demand import Step, demand_of
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.no_data import CUDA
from dsv4cli.engine.config.presets import PRESETS, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import NO_DRAFTS, Limits, Sampling
from dsv4cli.kernels.card import CARDS
from tests.support import no_compiler as no_compiler
from tests.support.peak import Peak


def peak_of(preset: str, chunk: int, place: int, ranks: int, layers: int | None) -> int:
    """Of a step of so many tokens behind `place` others, in a cache that has room for them."""
    end, sampling = place + chunk, Sampling(0.0)
    limits = Limits(prefill_chunk=chunk, max_context=end + 100)
    config = parse_config(shortened(PRESETS[preset], layers, None), preset)
    demand = demand_of(config, Formats(), Numerics.reference(), limits, [sampling], NO_DRAFTS, [end], ranks=ranks)
    with DryRun(demand, CARDS["h200"]) as dry:
        runner = Runner(dry._model, Capacity(1, end + 50), CUDA)
        runner.cache.provide(end // 128 + 4)
        runner.scheduler.add(dry._request(runner, chunk, place, Step(((chunk, place),), sampling, end + 50)))
        with Peak("meta") as peak:
            runner.run()
    return peak.most


if __name__ == "__main__":
    cases = [case.split(",") for case in sys.argv[1:]]
    # the first with all layers, which add nothing: each leaves only the streams; the others with some of every kind
    layers = [None] + [5] * (len(cases) - 1)
    found = [peak_of(preset, *map(int, rest), few) for (preset, *rest), few in zip(cases, layers, strict=True)]
    json.dump(found, sys.stdout)
