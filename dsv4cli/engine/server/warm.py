"""An engine for many clients, which has made its first steps: the first client waits for no kernel."""

from dataclasses import dataclass

import torch

from dsv4cli.engine.config.capacity import MAX_SLOTS
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine, Followers
from dsv4cli.engine.runtime.limits import context_of
from dsv4cli.engine.runtime.preparing import OnPreparing, do_nothing
from dsv4cli.engine.runtime.request import Request
from dsv4cli.engine.runtime.runner import FEWEST_TOKENS, Capacity
from dsv4cli.engine.settings import Drafting, Limits, Sampling
from dsv4cli.engine.system.device import free_memory
from dsv4cli.engine.system.host_memory import host_memory

# a prompt and its answer in tokens, any will do
PROMPT, ANSWER = 8, 8
# of the free memory of a GPU, for the cache; steps take their part of the rest
DEVICE_PART = 2
# of that of the host, for what a GPU has no room for, or for the cache where a CPU computes
HOST_PART = 8
# the most that a CPU's cache takes by itself
CPU_BYTES = 10**9


@dataclass(frozen=True)
class Sharing:
    """What clients share. cache_memory: bytes of the device for prompts and answers, of those that run and kept for
    those that begin alike; as much of the host's keeps more. step_ms: how much time prompts of others may take between
    two tokens of an answer. None: half of what is free; no bound."""

    cache_memory: int | None = None
    step_ms: float | None = None


def ready_engine(
    model: Transformer,
    share: Sharing,
    limits: Limits,
    device: torch.device | str,
    followers: Followers | None,
    drafting: Drafting,
    on_preparing: OnPreparing,
) -> Engine:
    """The engine; on_preparing: as `Preparing` has it, until it is ready. Raises UnsoundResult, NotEnoughMemory."""
    context = context_of(model.config, limits)
    own, host = _memory(share, torch.device(device))
    capacity = Capacity(MAX_SLOTS, min(FEWEST_TOKENS, context), cache_memory=own, host_memory=host)
    engine = Engine(model, capacity, device, followers, drafting, share.step_ms)
    engine.report_preparing(on_preparing)
    prompt = list(range(min(PROMPT, context - 1)))
    engine.add(Request(prompt, Sampling(0.0), Limits(ANSWER, limits.max_context), stop_ids=()))
    while engine.busy:
        engine.step()
    engine.forget()
    engine.report_preparing(do_nothing)
    return engine


def _memory(share: Sharing, device: torch.device) -> tuple[int, int]:
    """Bytes of the device for the cache, and of host memory for what that has no room for."""
    host = host_memory()
    spare = CPU_BYTES if host is None else host.free // HOST_PART
    if device.type != "cuda":
        return share.cache_memory or min(CPU_BYTES, spare), 0
    own = share.cache_memory or (free_memory(device) or 0) // DEVICE_PART
    return own, min(own, spare)
