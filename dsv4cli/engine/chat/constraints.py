"""Combination of several constraints of an answer, and a constraint that bans tokens. Does not import torch."""

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from operator import and_

from dsv4cli.engine.chat.grammar import Grammar
from dsv4cli.engine.runtime.request import Constraint


class Constraints:
    """Several constraints as one. Each of them sees every token; a token is allowed if all of them allow it."""

    def __init__(self, *parts: Constraint) -> None:
        """Combine constraints. If two of them force or replace a token, the first takes precedence."""
        self._parts = parts

    @property
    def failure(self) -> str:
        """The failure of the first failed grammar; "" if none failed."""
        return next((part.failure for part in self._parts if isinstance(part, Grammar) and part.failure), "")

    def forced(self) -> int | None:
        """Return the token that must come next, if any."""
        return next((token for part in self._parts if (token := part.forced()) is not None), None)

    def banned(self) -> tuple[int, ...]:
        """Return the tokens that must not come next."""
        return tuple(token for part in self._parts for token in part.banned())

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """Return the combined bit masks, as `Constraint.masks` does."""
        return [_all_of(masks) for masks in zip_longest(*(part.masks(drafts) for part in self._parts))]

    def instead(self, token: int) -> int | None:
        """Return the token to use in place of a sampled one; None to keep it."""
        return next((other for part in self._parts if (other := part.instead(token)) is not None), None)

    def push(self, token: int) -> None:
        """Record the next token."""
        for part in self._parts:
            part.push(token)


class Without:
    """Bans some tokens from an answer."""

    def __init__(self, ids: Sequence[int], vocabulary: int) -> None:
        """Ban the tokens `ids`, in a vocabulary of `vocabulary` tokens."""
        bits = (1 << vocabulary) - 1 & ~sum(1 << id for id in set(ids))
        self._mask = bits.to_bytes(-(-vocabulary // 8), "little")

    def forced(self) -> int | None:
        """Return None: no token is forced."""
        return None

    def banned(self) -> tuple[()]:
        """Return no tokens: the masks ban them."""
        return ()

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """Return bit masks, as `Constraint.masks` does. They are the same at every position."""
        return [self._mask] * (1 + len(drafts))

    def instead(self, token: int) -> int | None:
        """Return None: no token is replaced."""
        return None

    def push(self, token: int) -> None:
        """Ignore the next token, which changes nothing."""


def _all_of(masks: Sequence[bytes | None]) -> bytes | None:
    """Return the intersection of the masks."""
    given = [mask for mask in masks if mask is not None]
    if len(given) < 2:
        return given[0] if given else None
    bits = reduce(and_, (int.from_bytes(mask, "little") for mask in given))
    return bits.to_bytes(max(map(len, given)), "little")
