"""What an engine runs and holds, in numbers."""

from dataclasses import dataclass

from dsv4cli.engine.runtime.runner import Runner


@dataclass(frozen=True)
class Usage:
    """running, waiting: requests. slots, blocks: of the device's cache, those that sequences and kept states hold.

    states: that are kept; device_bytes, host_bytes: what they take. hits: requests that have found a state since the
    engine began; found: tokens of their prompts that were not read again.
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
    """Of a runner; the padding of graphs does not count."""
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
