"""A request: a sequence that is asked of the model, how its tokens are drawn, when it ends, what it got; no torch."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dsv4cli.engine.config.capacity import USUAL_CHUNK
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.settings import Limits, Sampling

# of a token id where they are packed: int32
ID = "i"
ID_BYTES = array(ID).itemsize
# (token id, natural logarithm of its probability at temperature 1)
Alternatives = list[tuple[int, float]]


class Constraint(Protocol):
    """What else decides about the tokens of a request; it sees each of them in order."""

    def forced(self) -> int | None:
        """The token that must come next, if any."""

    def banned(self) -> Items[int]:
        """The tokens that must not come next."""

    def masks(self, drafts: Items[int]) -> Items[bytes | None]:
        """The tokens that may come next, then those that may behind each of these drafts if it and all before it came.

        A bit a token, that of token n in byte n // 8 as 1 << n % 8, for the whole vocabulary or more; None: all may.
        So may they where there are fewer masks.
        """
        return ()

    def instead(self, token: int) -> int | None:
        """What to take for a token that was drawn, if not the token itself."""

    def push(self, token: int) -> None:
        """Takes notice of the next token."""


@dataclass(frozen=True)
class Token:
    """A drawn token, its log-probability at temperature 1, the `logprobs` likeliest tokens there: as the model has it,
    without biases and constraints.

    finish: why the request ends with it, "stop" at an end token, "length" at its limit. prepared: the step took time to
    compile kernels or to capture a graph, which others do not.
    """

    id: int
    logprob: float
    top: Alternatives
    finish: Literal["stop", "length"] | None
    prepared: bool = False


@dataclass(eq=False)
class Request:
    """What is asked: a prompt, the sampling of what follows it, and its limits.

    constraint: what else decides about its tokens.
    stop_ids: the tokens that end it, None for the model's end tokens.
    keep: the lengths at which a prefix cache keeps the state.
    scored: nothing is drawn; each row of the prompt gives the log-probability of the token that follows it.
    name: what messages call the prompt.

    The engine sets the rest.
    number: its place in the order in which requests came.
    ids: the prompt and what was drawn; done: how many of them went through the model; end: the most there can be.
    cached: how many tokens of the prompt were held and need not be read.
    sequence: its state in the cache, None while it waits.
    drafts: tokens that the next step verifies behind the newest.
    usual_chunk: how many tokens of it a step has where its limits do not say.
    packed: its ids as int32 in one piece of memory, which is compared and sent in no time, as far as `pack` was called.
    borders: a hash of its tokens up to each border of a block, as far as a prefix cache has asked for them.
    """

    prompt: list[int]
    sampling: Sampling
    limits: Limits
    constraint: Constraint | None = None
    stop_ids: tuple[int, ...] | None = None
    keep: tuple[int, ...] = ()
    scored: bool = False
    name: str = "the prompt"
    number: int = -1
    end: int = 0
    done: int = 0
    cached: int = 0
    sequence: Sequence | None = None
    drafts: list[int] = field(default_factory=list)
    usual_chunk: int = USUAL_CHUNK
    packed: bytearray = field(default_factory=bytearray)
    borders: list[int] = field(default_factory=list)
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    def pack(self) -> bytearray:
        """All its ids so far, packed. The memory only grows."""
        self.packed += array(ID, self.ids[len(self.packed) // ID_BYTES :])
        return self.packed

    @property
    def prefill_chunk(self) -> int:
        """The most tokens of it in a step."""
        return self.limits.prefill_chunk or self.usual_chunk

    @property
    def caught_up(self) -> bool:
        """Whether every token has gone through the model."""
        return self.done == len(self.ids)

    @property
    def decodes(self) -> bool:
        """Whether its next chunk is its newest token, or a step that runs already has that."""
        return self.done >= len(self.ids) - 1 and not self.scored


@dataclass(frozen=True)
class RowScores:
    """Of consecutive rows of a request: the log-probability of the token that follows each, meaningless after the last
    of the request, and the likeliest tokens there."""

    logprobs: list[float]
    top: list[Alternatives]


@dataclass(frozen=True)
class Result:
    """What a request got in a step: the drawn tokens in order, none while its prompt is read; if scored, its rows."""

    request: Request
    tokens: list[Token]
    scores: RowScores | None = None
