"""What a demand is said to launch, and what random steps of it launch beside that: a process without TRITON_INTERPRET.

usage: python -m tests.support.dry_runs MODEL SEQUENCES CONTEXT RANKS STEPS; prints JSON. MODEL: preset or GGUF file.
"""

import gc
import json
import random
import sys
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITCallable, JITFunction

from dsv4cli.engine.checkpoint.identify import describe
from dsv4cli.engine.checkpoint.source import FolderSource
from dsv4cli.engine.compiling.demand import Demand, Step, demand_of
from dsv4cli.engine.compiling.dry_run import DryRun
from dsv4cli.engine.compiling.launches import Launch, compile_launch
from dsv4cli.engine.compiling.no_data import CUDA
from dsv4cli.engine.config.presets import PRESETS
from dsv4cli.engine.config.read import parse_config
from dsv4cli.engine.config.storage import Formats
from dsv4cli.engine.model.numerics import Numerics
from dsv4cli.engine.runtime.runner import Runner
from dsv4cli.engine.runtime.state.capacity import Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.kernels.card import CARDS
from dsv4cli.kernels.launch import Kernel
from tests.support import no_compiler as no_compiler


def demand(model: str, sequences: int, context: int, ranks: int) -> Demand:
    """As `dsv4 profile warm` makes it; of no sequences that of `dsv4 run` with a prompt of 5 tokens."""
    lengths = [5] if not sequences else [context] * sequences if sequences > 1 else None
    if model in PRESETS:
        identity = describe(parse_config(PRESETS[model], model), Formats())
    else:
        identity = FolderSource("test", Path(model)).identity
    return demand_of(
        identity.config, identity.formats, Numerics.reference(), Limits(max_context=context),
        [Sampling(), Sampling(0.0), Sampling(1.0, 0.5)], Drafting(None), lengths, ranks=ranks,
        gguf_types=identity.gguf_types,
    )  # fmt: skip


def random_step(one: Demand, draw: random.Random) -> Step:
    """A step that an engine may make for the demand."""
    sampling, longest = draw.choice(one.samplings), draw.choice(one.longest)
    count = draw.randint(1, one.sequences)
    if draw.random() < 0.5:
        verified = draw.randint(0, min(one.drafts, 64 // (1 << (count - 1).bit_length()) - 1))
        chunks = tuple((1, draw.randrange(1, longest - 16)) for _ in range(count))
        return Step(chunks, sampling, longest, verified, one.drafts)
    most = max(min(one.chunk, one.context // 2) // count, 1)
    chunks = tuple((draw.randint(1, most), draw.choice((0, draw.randrange(one.context // 2)))) for _ in range(count))
    return Step(chunks, sampling, longest, 0, draw.randint(0, one.drafts))


def captured_chunks(dry: DryRun, one: Demand) -> list[Launch]:
    """What captured chunks of prompts launch that nothing before them has."""
    capacity = Capacity(one.sequences, max(one.longest), chunks=True)
    before, runner = set(dry._recorder.launches), Runner(dry._model, capacity, CUDA)
    while runner.prepare():
        pass
    return [launch for identity, launch in dry._recorder.launches.items() if identity not in before]


def keys_of(launches: list[Launch], last_first: bool) -> list[str]:
    """What Triton's cache knows the kernels by, asked of a process that has asked for none."""
    kernels = sorted({(launch.module, launch.name) for launch in launches}, reverse=last_first)
    found = {names: getattr(import_module(names[0]), names[1]) for names in kernels}
    for function in (one for one in gc.get_objects() if isinstance(one, JITCallable)):
        function.hash, function.used_global_vals = None, {}
    keys = {names: function.cache_key for names, function in found.items()}
    return [keys[names] for names in sorted(kernels)]


def seen_again(dry: DryRun, step: Step) -> bool:
    """Whether a step that was done before is seen to launch the same, and nothing of it goes Triton's way."""
    dry.launches(step)
    before = set(dry._recorder.seen)
    with patch.object(JITFunction, "run", None):
        dry.launches(step)
    return bool(before) and dry._recorder.seen == before


def compiled_anew(dry: DryRun, step: Step, launches: list[Launch]) -> dict[str, list[bool]]:
    """Whether Triton's cache lacked one kernel: compiled ahead, ahead again, and where a launch asks for it."""
    one = next(launch for launch in launches if launch.name == "_rms_norm")
    ahead = [compile_launch(one), compile_launch(one)]
    dry._recorder.forget()
    lacked: list[bool] = []
    hook, runtime, compilation = knobs.runtime.jit_cache_hook, knobs.runtime, knobs.compilation
    # of what is launched only this kernel is compiled
    runtime.jit_cache_hook = lambda **details: details["fn"].name != one.name or details["key"] != one.key
    compilation.listener = lambda cache_hit, **details: lacked.append(not cache_hit)
    with patch.object(CompiledKernel, "_init_handles", lambda kernel: None), patch.object(Kernel, "run", _compiled):
        dry.launches(step)
    runtime.jit_cache_hook = hook
    return {"ahead": ahead, "launched": lacked}


def _compiled(kernel: Kernel, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """A launch that ends when its kernel is there."""
    JITFunction.run(kernel, *arguments, grid=grid, warmup=True, **options)


def widths_of(launches: list[Launch]) -> list[tuple[int, int]]:
    """The maximum numbers of pairs in narrow chunks, and in chunks, for which FP8 tensor cores multiply experts."""
    found = set[tuple[int, int]]()
    for launch in launches:
        if launch.module.endswith(".fp8_wgmma"):
            constants = {launch.function.arg_names[at]: value for (at,), value in launch.constants.items()}
            found.add((constants["NARROW"], constants["TOKENS"]))
    return sorted(found)


def main(model: str, sequences: str, context: str, ranks: str, steps: str) -> None:
    one, draw = demand(model, int(sequences), int(context), int(ranks)), random.Random(0)
    missed: list[Any] = []
    with DryRun(one, CARDS["h200"]) as dry:
        tasks = dry.tasks()
        found = [launch for task in tasks for launch in dry.launches(task)]
        for _ in range(int(steps)):
            step = random_step(one, draw)
            missed += [[launch.name, str(step)[:300], str(launch.constants)] for launch in dry.launches(step)]
        if one.sequences > 1:
            missed += [[launch.name, "a captured chunk", str(launch.constants)] for launch in captured_chunks(dry, one)]
        step = Step(((5, 0),), one.samplings[0], one.longest[0])
        again = seen_again(dry, step)
        anew = compiled_anew(dry, step, found)
        same_keys = keys_of(found, last_first=False) == keys_of(found, last_first=True)
    kept = "run" in vars(Kernel) or any(call.compiled for launch in found for call in launch.function.calls.values())
    told = {"found": len(found), "names": sorted({launch.name for launch in found}), "missed": missed, "anew": anew}
    told |= {"widths": widths_of(found)}
    json.dump(told | {"again": again, "kept": kept, "same_keys": same_keys}, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])
