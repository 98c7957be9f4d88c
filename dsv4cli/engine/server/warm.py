"""An engine that serves many clients, warmed up so that the first client does not wait for kernels to compile."""

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

# lengths of the warm-up prompt and answer in tokens; the values are arbitrary
PROMPT, ANSWER = 8, 8
# the cache gets 1/2 of a GPU's free memory; the rest is for the activations of steps
DEVICE_PART = 2
# 1/8 of the free host memory is for the host tier of the prefix cache or, on a CPU, for the cache itself
HOST_PART = 8
# Target for the inter-token latency while prompts are prefilled, in milliseconds. On a CPU small chunks cost too much:
# with eight streams running, nano prefills 8,075 tokens in 46 s with 400 ms, in 80 s with 200 ms, in 16 s without a
# target (two busy cores).
GPU_STEP_MS, CPU_STEP_MS = 50.0, 400.0
# bytes; the most that a CPU's cache uses by default
CPU_BYTES = 10**9


@dataclass(frozen=True)
class CacheOptions:
    """How clients share the engine.

    Attributes:
        cache_memory: GPU memory of the KV and prefix caches in bytes; the prefix cache may use as much host memory in
            addition. None: half of the free memory.
        step_ms: target for the inter-token latency of running answers while other prompts are prefilled, in
            milliseconds; 0 for no target. None: `GPU_STEP_MS` or `CPU_STEP_MS`.
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
    """Create an engine, and run a short request so that the kernels are compiled.

    Args:
        on_preparing: callback for `CompileWatch`, in effect until the engine is ready.

    Raises:
        UnsoundResult: logits are not finite.
        NotEnoughMemory: the engine or its first steps do not fit.
    """
    context = context_of(model.config, limits)
    own, host = _memory(share, torch.device(device))
    capacity = Capacity(MAX_SLOTS, min(FEWEST_TOKENS, context), cache_memory=own, host_memory=host)
    default_ms = GPU_STEP_MS if torch.device(device).type == "cuda" else CPU_STEP_MS
    step_ms = default_ms if share.step_ms is None else share.step_ms
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
    """Exclude all existing objects from Python's garbage collector.

    Collection pauses answers, and takes 0.13 s for the objects of a model and its libraries.
    """
    gc.collect()
    gc.freeze()
    # CPython runs a full collection once new objects reach a quarter of those that the last one found: one that finds
    # none keeps the garbage of requests from piling up
    gc.collect()


def _memory(share: CacheOptions, device: torch.device) -> tuple[int, int]:
    """Return the GPU memory for the caches, and the host memory for the prefix cache's host tier, in bytes.

    On a CPU, the first is host memory and the second is 0.
    """
    host = host_memory()
    spare = CPU_BYTES if host is None else host.free // HOST_PART
    if device.type != "cuda":
        return share.cache_memory or min(CPU_BYTES, spare), 0
    own = share.cache_memory or (free_memory(device) or 0) // DEVICE_PART
    return own, min(own, spare)
