"""What a demand is said to launch, and what random steps of it launch beside that: a process without TRITON_INTERPRET.

usage: python -m tests.support.dry_runs PRESET SEQUENCES CONTEXT RANKS STEPS; prints JSON.
"""

import json
import random
import sys
from typing import Any

from dsv4cli.engine.compiling.demand import Demand, Step, demand_of
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.config.model_config import parse_config
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.kernels.card import CARDS


def demand(preset: str, sequences: int, context: int, ranks: int) -> Demand:
    """As `dsv4 profile warm` makes it."""
    lengths = [context] * sequences if sequences > 1 else None
    return demand_of(
        parse_config(PRESETS[preset], preset), Formats(), Numerics.reference(), Limits(max_context=context),
        [Sampling(), Sampling(0.0), Sampling(1.0, 0.5)], Drafting(None), lengths, ranks=ranks,
    )  # fmt: skip


def random_step(one: Demand, draw: random.Random) -> Step:
    """A step that an engine may make for the demand."""
    sampling, longest = draw.choice(one.samplings), draw.choice(one.longest)
    count = draw.randint(1, one.sequences)
    if draw.random() < 0.5:
        verified = draw.randint(0, min(one.drafts, 64 // (1 << (count - 1).bit_length()) - 1))
        chunks = tuple((1, draw.randrange(1, one.context - 16)) for _ in range(count))
        return Step(chunks, sampling, longest, verified, one.drafts)
    most = max(min(one.chunk, one.context // 2) // count, 1)
    chunks = tuple((draw.randint(1, most), draw.choice((0, draw.randrange(one.context // 2)))) for _ in range(count))
    return Step(chunks, sampling, longest, 0, draw.randint(0, one.drafts))


def main(preset: str, sequences: str, context: str, ranks: str, steps: str) -> None:
    one, draw = demand(preset, int(sequences), int(context), int(ranks)), random.Random(0)
    missed: list[Any] = []
    with DryRun(one, CARDS["h200"]) as dry:
        found = [launch for task in dry.tasks() for launch in dry.launches(task)]
        for _ in range(int(steps)):
            step = random_step(one, draw)
            missed += [[launch.name, str(step)[:300], str(launch.constants)] for launch in dry.launches(step)]
    print(json.dumps({"found": len(found), "names": sorted({launch.name for launch in found}), "missed": missed}))


if __name__ == "__main__":
    main(*sys.argv[1:])
