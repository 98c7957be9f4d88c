"""A request: its prompt, sampling, limits and progress. No torch."""

from array import array
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dsv4cli.engine.config.capacity import DEFAULT_CHUNK
from dsv4cli.engine.runtime.sequence import Sequence
from dsv4cli.engine.settings import Limits, Sampling

# array typecode of packed token ids: int32
ID = "i"
ID_BYTES = array(ID).itemsize
# (token id, natural logarithm of its probability at temperature 1)
Alternatives = list[tuple[int, float]]


class Constraint(Protocol):
    """Restricts the tokens of a request. It sees each of them in order."""

    def forced(self) -> int | None:
        """Return the token that must come next, if any."""

    def banned(self) -> Items[int]:
        """Return the tokens that must not come next."""

    def masks(self, drafts: Items[int]) -> Items[bytes | None]:
        """Return bit masks of the allowed next tokens: for the next one, then after each of these draft tokens.

        In a mask, token n is bit n % 8 of byte n // 8; a mask covers the whole vocabulary or more. None, or a missing
        mask,
        allows every token.
        """
        return ()

    def instead(self, token: int) -> int | None:
        """Return the token to use in place of a sampled one; None to keep it."""

    def push(self, token: int) -> None:
        """Record the next token."""


@dataclass(frozen=True)
class Token:
    """A sampled token.

    Attributes:
        logprob: its log-probability at temperature 1, before biases and constraints.
        top: the `logprobs` likeliest tokens, likewise.
        finish: why the request ends with it: "stop" at an end token, "length" at its limit; else None.
        prepared: whether its step compiled kernels or captured a graph, so that its time is not typical.
    """

    id: int
    logprob: float
    top: Alternatives
    finish: Literal["stop", "length"] | None
    prepared: bool = False


@dataclass(eq=False)
class Request:
    """A prompt, how to continue it, and the state of that.

    Attributes:
        constraint: restricts its tokens.
        stop_ids: the tokens that end it; None for the model's end tokens.
        keep: prompt lengths at which the prefix cache keeps the state.
        cache_scope: the request shares cached prefixes only with requests of the same scope.
        scored: whether the prompt's tokens are scored instead of continued.
        name: what messages call the prompt.

    The engine sets:
        number: its place in order of arrival.
        ids: prompt and completion.
        done: how many of `ids` went through the model.
        end: the largest length of `ids`.
        cached: how many prompt tokens were a cache hit.
        sequence: its state in the KV cache; None while it is queued.
        drafts: draft tokens that the next step verifies.
        drafted, accepted: draft tokens that were verified so far, and accepted.
        default_chunk: prompt tokens in a step, unless its limits say otherwise.
        packed: `ids` as int32, up to the last call of `pack`: quick to compare and to send.
        borders: a hash of the tokens up to each block boundary, as far as the prefix cache has asked for them.
    """

    prompt: list[int]
    sampling: Sampling
    limits: Limits
    constraint: Constraint | None = None
    stop_ids: tuple[int, ...] | None = None
    keep: tuple[int, ...] = ()
    scored: bool = False
    name: str = "the prompt"
    cache_scope: str = ""
    number: int = -1
    end: int = 0
    done: int = 0
    cached: int = 0
    sequence: Sequence | None = None
    drafts: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    default_chunk: int = DEFAULT_CHUNK
    packed: bytearray = field(default_factory=bytearray)
    borders: list[int] = field(default_factory=list)
    ids: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    def pack(self) -> bytearray:
        """Return all ids so far as int32. The buffer only grows."""
        self.packed += array(ID, self.ids[len(self.packed) // ID_BYTES :])
        return self.packed

    @property
    def prefill_chunk(self) -> int:
        """The maximum number of prompt tokens in a step."""
        return self.limits.prefill_chunk or self.default_chunk

    @property
    def caught_up(self) -> bool:
        """Whether every token has gone through the model."""
        return self.done == len(self.ids)

    @property
    def decodes(self) -> bool:
        """Whether its next chunk is its newest token, or a running step has that token."""
        return self.done >= len(self.ids) - 1 and not self.scored


@dataclass(frozen=True)
class RowScores:
    """The log-probability of the token after each of some consecutive rows, and the likeliest tokens there.

    After the last token of a request the log-probability has no meaning.
    """

    logprobs: list[float]
    top: list[Alternatives]


@dataclass(frozen=True)
class Result:
    """What a request got in a step: sampled tokens in order (none while its prompt is prefilled), or scores."""

    request: Request
    tokens: list[Token]
    scores: RowScores | None = None
