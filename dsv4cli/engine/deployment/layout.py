"""How a model is distributed over the GPUs of a cluster."""

from collections.abc import Callable
from dataclasses import dataclass

from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.served_model import ServedModel
from dsv4cli.errors import UsageError

# why an engine cannot use a number of tensor-parallel ranks for a model on a cluster, '' if it can
Refusal = Callable[[ServedModel, Cluster, int], str]


@dataclass(frozen=True)
class ParallelLayout:
    """The layout of a deployment.

    Attributes:
        tp: tensor-parallel ranks of the attention.
        dp: data-parallel replicas of the attention. The experts are spread over all GPUs.
    """

    tp: int
    dp: int = 1

    @property
    def total(self) -> int:
        """Number of GPUs."""
        return self.tp * self.dp

    def __str__(self) -> str:
        """Return the layout as in `TP8 x DP2`."""
        return f"TP{self.tp}" if self.dp == 1 else f"TP{self.tp} x DP{self.dp}"


def choose_layout(model: ServedModel, cluster: Cluster, refusal: Refusal, wanted: int | None = None) -> ParallelLayout:
    """Return the layout with the most tensor-parallel ranks, or with as many as wanted.

    On one machine, the model has one replica. On several machines, all GPUs are used: what tensor parallelism leaves
    free becomes further replicas.

    Raises:
        UsageError: the engine cannot use the wanted number of ranks.
    """
    best = next(tp for tp in range(cluster.total, 0, -1) if not _reason(model, cluster, refusal, tp))
    if wanted is None or wanted == best:
        return _with(cluster, best)
    reason = _reason(model, cluster, refusal, wanted)
    if reason:
        others = f" on each of the {cluster.nodes} machines" if cluster.nodes > 1 and best == cluster.gpus else ""
        raise UsageError(f"--tp {wanted} is impossible on {cluster}: {reason}", f"use --tp {best}{others}")
    return _with(cluster, wanted)


def _with(cluster: Cluster, tp: int) -> ParallelLayout:
    return ParallelLayout(tp, 1 if cluster.nodes == 1 else cluster.total // tp)


def _reason(model: ServedModel, cluster: Cluster, refusal: Refusal, tp: int) -> str:
    if tp > cluster.total:
        return f"it has {cluster.total} GPU{'s'[: cluster.total != 1]}"
    small, large = sorted((tp, cluster.gpus))
    if cluster.nodes > 1 and (large % small or cluster.total % tp):
        return f"{cluster.nodes} machines with {cluster.gpus} GPUs each cannot be divided into groups of {tp}"
    return model.refusal(tp) or refusal(model, cluster, tp)
