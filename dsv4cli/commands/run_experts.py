"""What `dsv4 run` says of experts that do not fit on the GPU."""

from typing import TYPE_CHECKING

from dsv4cli.output import size_text

if TYPE_CHECKING:
    from dsv4cli.engine.host_experts import HostExperts


def division_sentence(experts: "HostExperts") -> str:
    """How many lie where."""
    plan, division = experts.plan, experts.plan.division
    return (
        f"of each layer's {division.experts} experts {division.rows} lie on the GPU at a time; {division.waiting} stay "
        f"in host memory, {size_text(plan.host_bytes)} in all"
    )


def traffic_sentence(experts: "HostExperts") -> str:
    """How often experts lay on the GPU, and what came from host memory."""
    traffic = experts.traffic()
    rate, each = traffic.found / max(traffic.chosen, 1), traffic.nbytes // max(traffic.tokens, 1)
    return f"{100 * rate:.1f} % of the experts lay on the GPU; {size_text(each)} a token came from host memory"
