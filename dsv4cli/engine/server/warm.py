"""An engine for many clients, which has made its first steps: the first client waits for no kernel."""

import gc
from dataclasses import dataclass

import torch

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.graphs.compile_watch import OnPreparing, do_nothing
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.runtime.orders import Followers
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.state.capacity import FEWEST_TOKENS, Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.system.device import free_memory
from dsv4cli.engine.system.host_memory import host_memory

# a prompt and its answer in tokens, any will do
PROMPT, ANSWER = 8, 8
# of the free memory of a GPU, for the cache; steps take their part of the rest
DEVICE_PART = 2
# of that of the host, for what a GPU has no room for, or for the cache where a CPU computes
HOST_PART = 8
# milliseconds between two tokens while prompts are prefilled. On a CPU small chunks cost too much: beside eight streams
# nano prefills 8,075 tokens in 46 s with 400 ms, in 80 s with 200, in 16 s without a target (two busy cores)
GPU_STEP_MS, CPU_STEP_MS = 50.0, 400.0
# the most that a CPU's cache takes by itself
CPU_BYTES = 10**9


@dataclass(frozen=True)
class CacheOptions:
    """What clients share.

    cache_memory: bytes of the device for prompts and answers, of those that run and kept for those that begin alike; as
    much of the host's keeps more. None: half of what is free. step_ms: how much time there may be between two tokens of
    an answer while prompts of others are read, 0 for as much as these take. None: `GPU_STEP_MS` or `CPU_STEP_MS`.
    """

    cache_memory: int | None = None
    step_ms: float | None = None


def ready_engine(
    model: Transformer,
    share: CacheOptions,
    limits: Limits,
    device: torch.device | str,
    followers: Followers | None,
    drafting: Drafting,
    on_preparing: OnPreparing,
) -> Engine:
    """The engine; on_preparing: as `CompileWatch` has it, until it is ready. Raises UnsoundResult, NotEnoughMemory."""
    context = context_of(model.config, limits)
    own, host = _memory(share, torch.device(device))
    capacity = Capacity(MAX_SLOTS, min(FEWEST_TOKENS, context), cache_memory=own, host_memory=host)
    usual = GPU_STEP_MS if torch.device(device).type == "cuda" else CPU_STEP_MS
    step_ms = usual if share.step_ms is None else share.step_ms
    engine = Engine(model, capacity, device, followers, drafting, step_ms or None)
    engine.report_preparing(on_preparing)
    prompt = list(range(min(PROMPT, context - 1)))
    engine.add(Request(prompt, Sampling(0.0), Limits(ANSWER, limits.max_context), stop_ids=()))
    while engine.busy:
        engine.step()
    engine.forget()
    engine.report_preparing(do_nothing)
    return engine


def spare_what_is_there() -> None:
    """What this process has made so far stays as long as it does: Python's collector, which looks at what there is
    while answers wait, takes 0.13 s for all that a model and its libraries have made."""
    gc.collect()
    gc.freeze()


def _memory(share: CacheOptions, device: torch.device) -> tuple[int, int]:
    """Bytes of the device for the cache, and of host memory for what that has no room for."""
    host = host_memory()
    spare = CPU_BYTES if host is None else host.free // HOST_PART
    if device.type != "cuda":
        return share.cache_memory or min(CPU_BYTES, spare), 0
    own = share.cache_memory or (free_memory(device) or 0) // DEVICE_PART
    return own, min(own, spare)
