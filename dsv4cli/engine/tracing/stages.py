"""The stages of a forward pass that a recording contains, in order of computation. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dsv4cli.errors import UsageError

Group = Literal["block", "attn", "index", "router", "ffn", "logits"]
GROUPS: tuple[Group, ...] = ("block", "attn", "index", "router", "ffn", "logits")
# STREAMS: a layer's input; for the index after the last layer, the last block's output
STREAMS, AFTER_ATTENTION, LOGITS = "streams", "ffn.streams", "logits"


@dataclass(frozen=True)
class TraceStage:
    """A point in a block whose values are recorded.

    Attributes:
        words: description in human-readable output.
        group: the name that selects it in --what.
        per: what a row is: a token, a compressed entry, or a token with logits.
        choices: a row is a set of chosen numbers instead of values.
        split: each rank has a part of the heads, dimension 1.
        basis: official rounding changes the basis of its values (the indexer's Hadamard rotation), so they are only
            comparable with others that are rounded this way.
        direct: it is computed from the streams without rounding to the dtype of activations.
    """

    name: str
    words: str
    group: Group
    per: Literal["token", "entry", "logits"] = "token"
    choices: bool = False
    split: bool = False
    basis: bool = False
    direct: bool = False


STAGES = (
    TraceStage(STREAMS, "the streams it takes", "block"),
    TraceStage("hc_attn.post", "hyper-connection of attention, post weights", "attn", direct=True),
    TraceStage("hc_attn.comb", "hyper-connection of attention, comb weights", "attn", direct=True),
    TraceStage("attn.input", "attention, its normed input", "attn"),
    TraceStage("attn.wq_a", "attention, latent queries before their norm", "attn"),
    TraceStage("attn.q", "attention, queries", "attn", split=True),
    TraceStage("attn.kv", "attention, keys of the window", "attn"),
    TraceStage("attn.entries", "attention, compressed entries", "attn", per="entry"),
    TraceStage("indexer.q", "indexer, queries", "index", basis=True),
    TraceStage("indexer.weights", "indexer, weights of its heads", "index"),
    TraceStage("indexer.entries", "indexer, compressed keys", "index", per="entry", basis=True),
    TraceStage("indexer.chosen", "indexer, chosen entries", "index", choices=True),
    TraceStage("attn.o", "attention, after the sink", "attn", split=True),
    TraceStage("attn.output", "attention, after the output projection", "attn"),
    TraceStage(AFTER_ATTENTION, "the streams after attention", "block"),
    TraceStage("hc_ffn.post", "hyper-connection of the experts, post weights", "ffn", direct=True),
    TraceStage("hc_ffn.comb", "hyper-connection of the experts, comb weights", "ffn", direct=True),
    TraceStage("ffn.input", "experts, their normed input", "ffn"),
    TraceStage("gate.chosen", "router, chosen experts", "router", choices=True),
    TraceStage("gate.weights", "router, weights of the chosen experts", "router"),
    TraceStage("ffn.output", "experts, their sum", "ffn"),
    TraceStage(LOGITS, "the head, logits", "logits", per="logits"),
)
BY_NAME = {stage.name: stage for stage in STAGES}
ORDER = {stage.name: number for number, stage in enumerate(STAGES)}


def parse_groups(text: str | None) -> tuple[Group, ...]:
    """Parse group names such as "block,attn"; None means all groups. Raises UsageError for unknown names."""
    if text is None:
        return GROUPS
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in GROUPS:
            raise UsageError(f"--what {name!r} is not a group of stages", f"choose from {','.join(GROUPS)}")
    return tuple(group for group in GROUPS if group in names)


def placed(layer: int, stage: str) -> str:
    """Describe a stage of a layer in words. A layer's input streams are named as the previous layer's output."""
    if stage == LOGITS:
        return BY_NAME[LOGITS].words
    if stage == STREAMS:
        return f"layer {layer - 1}, its output" if layer else "the embedding"
    return f"layer {layer}, {BY_NAME[stage].words}"


def in_order(names: Sequence[str]) -> list[str]:
    """Sort stages of a layer in order of computation."""
    return sorted(names, key=ORDER.__getitem__)
