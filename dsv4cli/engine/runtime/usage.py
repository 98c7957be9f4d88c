"""Counts of what an engine runs and holds."""

from dataclasses import dataclass

from dsv4cli.engine.runtime.runner import Runner


@dataclass(frozen=True)
class Usage:
    """Number of requests, cache slots and blocks that an engine uses, and prefix-cache statistics.

    Attributes:
        running, waiting: requests.
        slots, blocks: slots and blocks of the device's cache that sequences and the prefix cache use.
        states: states in the prefix cache.
        device_bytes, host_bytes: memory of these states.
        hits: requests that had a cache hit since the engine was created.
        found: prompt tokens that were cache hits.
    """

    running: int = 0
    waiting: int = 0
    slots: int = 0
    blocks: int = 0
    states: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    hits: int = 0
    found: int = 0


def usage_of(runner: Runner) -> Usage:
    """Return the usage of a runner, without the padding sequence of graphs."""
    cache, prefixes, scheduler = runner.cache, runner.prefixes, runner.scheduler
    padding = int(runner.graphs is not None)
    own = {
        "running": len(scheduler.active),
        "waiting": scheduler.waiting,
        "slots": cache.slots - cache.free_slots - padding,
        "blocks": cache.used_blocks - padding,
    }
    if prefixes is None:
        return Usage(**own)
    return Usage(
        **own,
        states=len(prefixes.states),
        device_bytes=prefixes.device_bytes,
        host_bytes=prefixes.host_bytes,
        hits=prefixes.hits,
        found=prefixes.found,
    )
