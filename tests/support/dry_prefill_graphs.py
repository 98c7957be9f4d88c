"""What the captured prefill steps of ranks launch that neither steps of as many tokens nor one GPU's captured steps do.

usage: python -m tests.support.dry_prefill_graphs PRESET SEQUENCES CONTEXT RANKS; prints JSON. A process without
TRITON_INTERPRET.
"""

import json
import sys

from dsv4cli.engine.compiling.demand import Step
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.no_data import CUDA
from dsv4cli.engine.config.capacity import RANK_ROWS
from dsv4cli.engine.runtime.graphs.prefill_graphs import CapturedPrefill
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.kernels.card import CARDS
from tests.support.dry_runs import demand


def main(preset: str, sequences: int, context: int, ranks: int) -> None:
    one = demand(preset, sequences, context, ranks)
    longest = max(one.longest)
    with DryRun(one, CARDS["h200"]) as dry:
        for chunks in (((4096, 0),), ((4096, 4096),), ((2, 0),) * sequences, ((768, 0),) * sequences):
            dry.launches(Step(chunks, one.samplings[0], longest))
        graphs = Runner(dry._model, Capacity(sequences, longest, chunks=True), CUDA).graphs
        assert graphs is not None
        for rows in (1024, 2048):
            CapturedPrefill(graphs, rows)._run()
        before = set(dry._recorder.launches)
        for rows in RANK_ROWS:
            dry._recorder.seen.clear()
            CapturedPrefill(graphs, rows)._run()
        found = [launch.name for identity, launch in dry._recorder.launches.items() if identity not in before]
        json.dump({"new": found, "seen": len(dry._recorder.seen)}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
