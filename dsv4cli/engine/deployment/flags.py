"""Tables of flags: for each flag of an engine, its value for a deployment and the reason for it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from dsv4cli.engine.deployment.cluster import Cluster
from dsv4cli.engine.deployment.layout import ParallelLayout, Refusal
from dsv4cli.engine.deployment.served_model import ServedModel

EngineName = Literal["vllm", "sglang"]


@dataclass(frozen=True)
class ServerSettings:
    """What the user wants of the server.

    Attributes:
        names: what clients call the model; empty for the model's own name.
        context: maximum context length in tokens; None for the largest possible.
        drafts: maximum number of draft tokens; 0 for no speculative decoding, None for the engine's usual number.
        head: address of the first machine, for the others.
        head_port: port of that machine at which the machines find each other.
        ready_seconds: how long loading may take.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    context: int | None = None
    drafts: int | None = None
    head: str = ""
    head_port: int = 29501
    ready_seconds: int = 3600


@dataclass(frozen=True)
class Deployment:
    """A model on a cluster, before it is translated into the flags of an engine."""

    model: ServedModel
    cluster: Cluster
    layout: ParallelLayout
    settings: ServerSettings

    @property
    def weights_per_gpu(self) -> int:
        """Bytes of weights on each GPU: experts are spread over all, the rest over the tensor-parallel ranks."""
        return self.model.expert_bytes // self.layout.total + self.model.other_bytes // self.layout.tp


# a flag without a value is True; None and False leave the flag out; a tuple is several values
Value = str | int | float | bool | tuple[str, ...] | None
Choose = Callable[[Deployment, int], Value]


@dataclass(frozen=True)
class FlagRule:
    """A flag or an environment variable of an engine.

    Attributes:
        value: its value for a deployment and the number of a machine.
        reason: why it is set.
    """

    name: str
    value: Choose
    reason: str


@dataclass(frozen=True)
class ChosenFlag:
    """A flag with its values for one deployment, none for a switch, and the reason for it."""

    name: str
    values: tuple[str, ...]
    reason: str

    @property
    def words(self) -> list[str]:
        """The words of the command line."""
        return [self.name, *self.values]


@dataclass(frozen=True)
class EngineSpec:
    """An engine's server.

    Attributes:
        title: name and version that the rules were checked against.
        command: the words that start the server, with a program on PATH.
        module: the words after a Python that do the same.
        model_flag: the flag before the model, '' if the model is an argument.
        parsers: flags without which tool calls and reasoning come out as plain text.
        tp_flag: the flag for the number of GPUs of one machine.
        rules, environment: flags and environment variables.
        drafting: the method of speculative decoding; None if the engine cannot use the checkpoint's drafter.
        refusal: why a number of tensor-parallel ranks is impossible.
        usable: share of a GPU's memory that the engine uses by default.
        many_keys: whether the server accepts several API keys.
        notes: sentences on a deployment.
    """

    name: EngineName
    title: str
    command: tuple[str, ...]
    module: tuple[str, ...]
    model_flag: str
    parsers: tuple[ChosenFlag, ...]
    tp_flag: str
    rules: tuple[FlagRule, ...]
    environment: tuple[FlagRule, ...]
    drafting: Choose
    refusal: Refusal
    usable: float
    many_keys: bool
    notes: Callable[[Deployment], Iterator[str]]


def chosen(rules: Iterable[FlagRule], deployment: Deployment, node: int) -> list[ChosenFlag]:
    """Return the flags that a machine of a deployment needs, in the order of the table."""
    values = [(rule, rule.value(deployment, node)) for rule in rules]
    return [
        ChosenFlag(rule.name, _words(value), rule.reason)
        for rule, value in values
        if value is not None and value is not False
    ]


def _words(value: Value) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    return () if value is True else (str(value),)
