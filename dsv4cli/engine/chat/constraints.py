"""Several constraints on the tokens of one answer as one, and that which keeps tokens out; no torch."""

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from operator import and_

from dsv4cli.engine.chat.grammar import Grammar
from dsv4cli.engine.runtime.request import Constraint


class Constraints:
    """Several constraints as one: each sees every token, and a token comes that all of them let come."""

    def __init__(self, *parts: Constraint) -> None:
        """parts: where two force a token or take another for one, the first decides."""
        self._parts = parts

    @property
    def failure(self) -> str:
        """Why a grammar among them could not be followed, "" where it can."""
        return next((part.failure for part in self._parts if isinstance(part, Grammar) and part.failure), "")

    def forced(self) -> int | None:
        """The token that must come next, if any."""
        return next((token for part in self._parts if (token := part.forced()) is not None), None)

    def banned(self) -> tuple[int, ...]:
        """The tokens that must not come next."""
        return tuple(token for part in self._parts for token in part.banned())

    def masks(self, drafts: Sequence[int]) -> list[bytes | None]:
        """As `Constraint.masks`."""
        return [_all_of(masks) for masks in zip_longest(*(part.masks(drafts) for part in self._parts))]

    def instead(self, token: int) -> int | None:
        """What to take for a token that was drawn, if not the token itself."""
        return next((other for part in self._parts if (other := part.instead(token)) is not None), None)

    def push(self, token: int) -> None:
        """Takes notice of the next token."""
        for part in self._parts:
            part.push(token)


class Without:
    """Keeps some tokens out of an answer."""

    def __init__(self, ids: Sequence[int], vocabulary: int) -> None:
        """vocabulary: how many tokens the model has."""
        bits = (1 << vocabulary) - 1 & ~sum(1 << id for id in set(ids))
        self._mask = bits.to_bytes(-(-vocabulary // 8), "little")

    def forced(self) -> int | None:
        """None."""
        return None

    def banned(self) -> tuple[()]:
        """None beside those that never come."""
        return ()

    def masks(self, drafts: Sequence[int]) -> list[bytes]:
        """As `Constraint.masks`: the same everywhere."""
        return [self._mask] * (1 + len(drafts))

    def instead(self, token: int) -> int | None:
        """None."""
        return None

    def push(self, token: int) -> None:
        """Nothing follows from it."""


def _all_of(masks: Sequence[bytes | None]) -> bytes | None:
    """What every mask lets come."""
    given = [mask for mask in masks if mask is not None]
    if len(given) < 2:
        return given[0] if given else None
    bits = reduce(and_, (int.from_bytes(mask, "little") for mask in given))
    return bits.to_bytes(max(map(len, given)), "little")
