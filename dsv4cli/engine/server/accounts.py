"""Accounts of API keys: rate limits, and which cached prefixes a request may use; no torch."""

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from math import ceil

from dsv4cli.engine.server.api_keys import ApiKey
from dsv4cli.engine.server.refusals import Refusal

MINUTE = 60.0  # seconds


class RateLimit:
    """A limit per minute, as a token bucket: it holds one minute's amount, and refills evenly.

    The amount spent may exceed what the bucket holds. Then it must refill first.
    """

    def __init__(self, per_minute: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a full bucket. `per_minute` is None for no limit."""
        self._clock = clock
        self._most, self._level, self._at = per_minute, float(per_minute or 0), clock()

    def change(self, per_minute: int | None) -> None:
        """Change the limit. The amount already spent is kept."""
        spent = 0.0 if self._most is None else self._most - self._refilled()
        self._most, self._level, self._at = per_minute, (per_minute or 0) - spent, self._clock()

    def wait(self) -> float:
        """Return the seconds until the bucket holds at least 1; 0 if it does now."""
        missing = 0.0 if self._most is None else 1 - self._refilled()
        return 0.0 if self._most is None or missing <= 0 else missing * MINUTE / self._most

    def spend(self, amount: int) -> None:
        """Take an amount out of the bucket."""
        if self._most is not None:
            self._level, self._at = self._refilled() - amount, self._clock()

    def _refilled(self) -> float:
        assert self._most is not None
        return min(self._level + (self._clock() - self._at) * self._most / MINUTE, float(self._most))


class Account:
    """What an API key may use. Requests of a server without keys share one account without limits.

    Attributes:
        name: the key's name; empty if the server has no keys.
        scope: requests share cached prefixes only with requests of the same scope.
    """

    def __init__(self, key: ApiKey | None = None, scope: str = "") -> None:
        self.name, self.scope = "" if key is None else key.name, scope
        self._requests = RateLimit(None if key is None else key.requests)
        self._tokens = RateLimit(None if key is None else key.tokens)

    def change(self, key: ApiKey) -> None:
        """Change the name and the limits."""
        self.name = key.name
        self._requests.change(key.requests)
        self._tokens.change(key.tokens)

    def admit(self) -> None:
        """Count a request. Raises `Refusal` with status 429 if a limit is exceeded; that request is not counted."""
        for what, limit in (("requests", self._requests), ("tokens", self._tokens)):
            seconds = limit.wait()
            if seconds:
                raise Refusal(
                    429,
                    f"this API key has used its {what} per minute: try again in {ceil(seconds)} s",
                    code="rate_limit_exceeded",
                    retry_after=ceil(seconds),
                )
        self._requests.spend(1)

    def charge(self, tokens: int) -> None:
        """Count tokens of a prompt or of an answer."""
        self._tokens.spend(tokens)


ANYONE = Account()


class Accounts:
    """The accounts of a server's API keys. The keys can be replaced while requests run."""

    def __init__(self, keys: Sequence[ApiKey] = (), *, share_cache: bool = False) -> None:
        """Create accounts.

        Args:
            keys: a request needs one of them; if empty, no key is needed.
            share_cache: whether requests share cached prefixes regardless of their keys.
        """
        self._share_cache = share_cache
        self._of: dict[bytes, Account] = {}
        self.replace(keys)

    @property
    def required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._of)

    def find(self, given: bytes) -> Account | None:
        """Return the account of a key, None if it does not exist. The running time reveals nothing about the keys."""
        found = [account for secret, account in self._of.items() if hmac.compare_digest(given, secret)]
        return found[0] if found else None

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Replace the accepted keys. A key that remains keeps its account and its usage.

        Running requests are not affected.
        """
        before, self._of = self._of, {}
        for key in keys:
            account = before.get(key.secret) or Account(key, self._scope(key))
            account.change(key)
            self._of[key.secret] = account

    def _scope(self, key: ApiKey) -> str:
        """Return the cache scope of a key. It depends on the key alone: a name may be given to someone else."""
        return "" if self._share_cache else hashlib.sha256(key.secret).hexdigest()
