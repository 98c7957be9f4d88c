"""The most that the tensors of a prompt's steps take on a GPU that is not there: a process without TRITON_INTERPRET.

usage: python -m tests.support.dry_peaks PRESET,CHUNK,PLACE,RANKS[,TYPE] ... PRESET,ROWS,LONGEST,RANKS,captured
...; prints JSON.
"""

import json
import sys

from dsv4cli.engine.checkpoint.gguf.naming import gguf_name
from dsv4cli.engine.checkpoint.layout import loaded_tensors
from dsv4cli.engine.compiling.demand import Step, demand_of
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.no_data import CUDA
from dsv4cli.engine.config.model_config import ModelConfig
from dsv4cli.engine.config.presets import PRESETS, shortened
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.graphs.prefill_graphs import CapturedPrefill
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import AUTO_DRAFTING, NO_DRAFTS, Limits, Sampling
from dsv4cli.kernels.card import CARDS
from tests.support import no_compiler as no_compiler
from tests.support.peak import Peak


def types_of(config: ModelConfig, kind: str) -> dict[str, str]:
    """The types of a GGUF file in which the matrices that the official form quantizes have this one."""
    weights = [spec for spec in loaded_tensors(config, Formats()).values() if spec.role == "weight"]
    return {gguf_name(spec): kind if spec.form else "F32" for spec in weights}


def peak_of(preset: str, chunk: int, place: int, ranks: int, layers: int | None, kind: str | None = None) -> int:
    """Of a step of so many tokens behind `place` others, in a cache that has room for them."""
    end, sampling = place + chunk, Sampling(0.0)
    limits = Limits(prefill_chunk=chunk, max_context=end + 100)
    config = parse_config(shortened(PRESETS[preset], layers, None), preset)
    demand = demand_of(
        config,
        Formats(),
        Numerics.reference(),
        limits,
        [sampling],
        NO_DRAFTS,
        [end],
        ranks=ranks,
        gguf_types=None if kind is None else types_of(config, kind),
    )
    with DryRun(demand, CARDS["h200"]) as dry:
        runner = Runner(dry._model, Capacity(1, end + 50), CUDA)
        runner.cache.provide(end // 128 + 4)
        runner.scheduler.add(dry._request(runner, chunk, place, Step(((chunk, place),), sampling, end + 50)))
        with Peak("meta") as peak:
            runner.run()
    return peak.most


def captured(preset: str, rows: int, longest: int, ranks: int) -> tuple[int, int]:
    """Of a server's captured prefill step for sequences of up to `longest` tokens, and what its output keeps."""
    config, limits = parse_config(shortened(PRESETS[preset], 5, None), preset), Limits(max_context=longest)
    demand = demand_of(
        config, Formats(), Numerics.reference(), limits, [Sampling(0.0)], AUTO_DRAFTING, None, ranks=ranks, sequences=64
    )
    with DryRun(demand, CARDS["h200"]) as dry:
        graphs = Runner(dry._model, Capacity(64, longest, chunks=True), CUDA).graphs
        assert graphs is not None
        step = CapturedPrefill(graphs, rows)
        with Peak("meta") as peak:
            output = step._run()
            kept = peak.live
        del output
    return peak.most, kept


if __name__ == "__main__":
    cases = [case.split(",") for case in sys.argv[1:] if not case.endswith(",captured")]
    # the first with all layers, which add nothing: each leaves only the streams; the others with some of every kind
    layers = [None] + [5] * (len(cases) - 1)
    found = [
        peak_of(preset, *map(int, rest[:3]), few, *rest[3:]) for (preset, *rest), few in zip(cases, layers, strict=True)
    ]
    graphs = [case.split(",")[:-1] for case in sys.argv[1:] if case.endswith(",captured")]
    kept = [captured(preset, *map(int, rest)) for preset, *rest in graphs]
    json.dump([*found, *kept], sys.stdout)
