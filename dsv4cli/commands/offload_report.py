"""Experts in host memory: memory limits of `dsv4 run` and `dsv4 chat`, and what they report."""

from typing import TYPE_CHECKING

from dsv4cli.output import Output, size_text

if TYPE_CHECKING:
    from dsv4cli.engine.weights.offload import ExpertOffload
    from dsv4cli.engine.weights.placement import MemoryLimits


def memory_limits(gpu_memory: str | None, host_memory: str | None) -> "MemoryLimits":
    """Return the limits that --gpu-memory and --host-memory set. Raises UsageError."""
    from dsv4cli.engine.settings import parse_size
    from dsv4cli.engine.weights.placement import MemoryLimits

    gpu = None if gpu_memory is None else parse_size("--gpu-memory", gpu_memory)
    host = None if host_memory is None else parse_size("--host-memory", host_memory)
    return MemoryLimits(gpu, host)


def division_sentence(experts: "ExpertOffload") -> str:
    """Return how many experts are on the GPU and in host memory, as text."""
    plan, division = experts.plan, experts.plan.division
    return (
        f"{division.rows} of each layer's {division.experts} experts fit on the GPU; {division.offloaded} "
        f"stay in host memory, {size_text(plan.host_bytes)} with the embedding"
    )


def report_traffic(out: Output, experts: "ExpertOffload | None") -> None:
    """Print the hit rate of experts on the GPU and the bytes copied from host memory; nothing if all experts fit."""
    if experts is not None:
        traffic = experts.traffic()
        rate, per_token = traffic.found / max(traffic.chosen, 1), traffic.nbytes // max(traffic.tokens, 1)
        out.status(
            f"{100 * rate:.1f} % of the experts used were on the GPU; {size_text(per_token)} per token from host memory"
        )
