"""The plan of a deployment: the command line of each machine, with its reasons."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.flags import ChosenFlag, Deployment, EngineName, EngineSpec, ServerSettings, chosen
from dsv4cli.engine.deployment.layout import choose_layout
from dsv4cli.engine.deployment.served_model import ServedModel
from dsv4cli.engine.deployment.sglang import SGLANG
from dsv4cli.engine.deployment.vllm import VLLM
from dsv4cli.errors import NotEnoughMemory, UnsupportedHardware, UsageError
from dsv4cli.harmless import harmless_line, shell_word

ENGINES: dict[EngineName, EngineSpec] = {"vllm": VLLM, "sglang": SGLANG}
# bytes of each GPU that activations, CUDA graphs, communication buffers and the shortest useful KV cache take
RESERVED = 8 * 10**9


@dataclass(frozen=True)
class DeploymentPlan:
    """How an engine serves a model on a cluster."""

    engine: EngineSpec
    deployment: Deployment

    @property
    def nodes(self) -> range:
        """The numbers of the machines."""
        return range(self.deployment.cluster.nodes)

    def flags(self, node: int = 0) -> list[ChosenFlag]:
        """Return the flags of a machine."""
        return [*self.engine.parsers, *chosen(self.engine.rules, self.deployment, node)]

    def environment(self, node: int = 0) -> list[ChosenFlag]:
        """Return the environment variables of a machine."""
        return chosen(self.engine.environment, self.deployment, node)

    def arguments(self, node: int = 0) -> list[str]:
        """Return the words after the command that starts the server."""
        model = [self.engine.model_flag, self.deployment.model.name]
        return [word for word in model if word] + [word for flag in self.flags(node) for word in flag.words]

    def shell_line(self, node: int = 0, command: Sequence[str] = (), keys: str = "") -> str:
        """Return the command line of a machine for a shell.

        Args:
            command: the words that start the server; by default those of the program on PATH.
            keys: shell text that expands to the API keys, '' without keys.
        """
        words = [f"{one.name}={quoted(one.values[0])}" for one in self.environment(node)]
        words += [*map(quoted, command or self.engine.command), *map(quoted, self.arguments(node))]
        return " ".join([*words, *(["--api-key", keys] if keys and node == 0 else [])])

    def notes(self) -> Iterator[str]:
        """Yield sentences on the deployment."""
        cluster, layout = self.deployment.cluster, self.deployment.layout
        free = cluster.total - layout.total
        if free:
            yield f"{free} of the {cluster.total} GPUs {'is' if free == 1 else 'are'} not used: {layout}"
        yield from self.engine.notes(self.deployment)
        if cluster.nodes > 1 and self.deployment.model.local:
            yield f"each machine needs the folder {self.deployment.model.name}"

    def record(self) -> dict[str, Any]:
        """Return the plan as a JSON value."""
        layout = self.deployment.layout
        return {
            "engine": self.engine.title,
            "gpus": str(self.deployment.cluster),
            "tensor_parallel": layout.tp,
            "data_parallel": layout.dp,
            "weights_per_gpu": self.deployment.weights_per_gpu,
            "commands": [self.shell_line(node) for node in self.nodes],
            "reasons": {one.name: one.reason for one in (*self.environment(), *self.flags())},
            "notes": list(self.notes()),
        }


def plan_deployment(
    engine: EngineName, model: ServedModel, cluster: Cluster, settings: ServerSettings, tp: int | None = None
) -> DeploymentPlan:
    """Return the plan for a model on a cluster.

    Args:
        tp: number of tensor-parallel ranks; None for the best.

    Raises:
        UsageError: the number of ranks is impossible, or draft tokens are wanted and there is no drafter.
        UnsupportedHardware: the engine has no kernels for these GPUs.
        NotEnoughMemory: the weights do not fit.
    """
    spec = ENGINES[engine]
    if cluster.architecture == "older":
        raise UnsupportedHardware(
            f"{spec.title} has no DeepSeek-V4 attention kernels for {cluster.card}: they need Hopper or Blackwell",
            f"use dsv4's own server: {model.own_command}",
        )
    plan = _planned(spec, model, cluster, settings, tp)
    if settings.drafts and spec.drafting(plan.deployment, 0) is None:
        raise UsageError(f"{model.label} has no drafter that {spec.title} can use", "remove --draft")
    usable = _usable(spec, cluster)
    if plan.deployment.weights_per_gpu > usable:
        raise _too_large(plan, usable)
    return plan


def _planned(
    spec: EngineSpec, model: ServedModel, cluster: Cluster, settings: ServerSettings, tp: int | None
) -> DeploymentPlan:
    layout = choose_layout(model, cluster, spec.refusal, tp)
    return DeploymentPlan(spec, Deployment(model, cluster, layout, settings))


def _usable(spec: EngineSpec, cluster: Cluster) -> int:
    """Return the bytes of each GPU that an engine can fill with weights."""
    return int(cluster.memory * spec.usable) - RESERVED


def _too_large(plan: DeploymentPlan, usable: int) -> NotEnoughMemory:
    deployment = plan.deployment
    model, cluster = deployment.model, deployment.cluster
    needed, total = _gb(deployment.weights_per_gpu), _gb(model.total_bytes)
    larger = (Cluster(nodes, gpus, cluster.card, cluster.memory, cluster.architecture) for nodes, gpus in _LARGER)
    fits = next((one for one in larger if _fits(plan, one)), None)
    advice = f"use at least {fits}, or " if fits else ""
    return NotEnoughMemory(
        f"{model.label} does not fit on {cluster}: its weights ({total}) take {needed} of each GPU, and "
        f"{plan.engine.title} can use about {_gb(usable)}",
        f"{advice}dsv4's own server, which keeps experts in host memory: {model.own_command}",
    )


# numbers of machines and GPUs to recommend
_LARGER = ((1, 2), (1, 4), (1, 8), (2, 8), (4, 8), (8, 8))


def _fits(plan: DeploymentPlan, cluster: Cluster) -> bool:
    other = _planned(plan.engine, plan.deployment.model, cluster, plan.deployment.settings, None)
    return other.deployment.weights_per_gpu <= _usable(plan.engine, cluster)


def quoted(word: str) -> str:
    """Return a word of a command line quoted for a shell. Unlike `shell_word`, it accepts flags."""
    return shlex.quote(word) if harmless_line(word) == word else shell_word(word)


def _gb(nbytes: int) -> str:
    return f"{nbytes / 10**9:.0f} GB"


def start_line(engine: EngineName, name: str, ranks: int = 0, revision: str = "") -> str:
    """Return the shortest command that starts an engine with a model, for a cluster that is not known.

    Args:
        ranks: number of GPUs; 0 leaves it to the engine.
        revision: of the repository, '' for the default.
    """
    spec = ENGINES[engine]
    words = [*spec.command, *filter(None, [spec.model_flag]), shell_word(name)]
    words += [word for flag in spec.parsers for word in flag.words]
    if ranks > 1:
        words += [spec.tp_flag, str(ranks)]
    return " ".join([*words, *(["--revision", shell_word(revision)] if revision else [])])
