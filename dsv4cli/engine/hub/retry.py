"""Retries of hub requests: how often, after which delay, and which errors are final."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

from huggingface_hub import constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import parse_ratelimit_headers  # type: ignore[attr-defined] # public, but not marked so

from dsv4cli.errors import HubError

T = TypeVar("T")
# every failure of a request: of httpx below huggingface_hub 2, of httpx2 since
HTTP_ERROR: type[Exception] = HfHubHTTPError.__bases__[0]
# answers of a hub that may well serve the same request later
PASSING = {408, 429, 500, 502, 503, 504}
AGAIN = "run the same command again: it continues where it stopped"


class DownloadStopped(Exception):
    """The download was canceled: another file failed, or the user interrupted."""


class BadConnection(Exception):
    """A connection that closes too early, or stays open and is too slow. url: the requested URL, after redirection."""

    def __init__(self, message: str, url: object = "") -> None:
        super().__init__(message)
        self.url = url


class Notices:
    """A thread-safe, deduplicated channel for messages of many requests that wait at the same time."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._until = 0.0
        self._lock = threading.Lock()

    def __call__(self, text: str, seconds: float) -> None:
        """Report the text, unless an earlier reported wait is still running. seconds: length of this wait."""
        with self._lock:
            now = time.monotonic()
            if now >= self._until:
                self._until = now + seconds
                self._say(text)


def _silent(text: str, seconds: float) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class RetryPolicy:
    """When to retry a request and when to give up.

    Attributes:
        attempts: consecutive failures without a new byte that end the download.
        first_wait, longest_wait: seconds between attempts (exponential backoff, doubling).
        longest_order: longest wait in seconds that the hub may request (its rate limits use windows of 300 s).
        stall: seconds after which a connection slower than `slowest` bytes/s is dropped.
        report: called before each wait with the failure and the wait in seconds.
    """

    attempts: int = 6
    first_wait: float = 1.0
    longest_wait: float = 30.0
    longest_order: float = 330.0
    stall: float = 60.0
    slowest: int = 1000
    report: Callable[[str, float], None] = _silent


class Retrier:
    """A failure counter of one request, which waits between attempts and raises an explained error at the end."""

    def __init__(self, policy: RetryPolicy, stop: threading.Event, explain: Callable[[Exception], HubError]) -> None:
        self.policy = policy
        self.stop = stop
        self.explain = explain
        self.failures = 0

    def advanced(self) -> None:
        """Reset the failure count after new bytes."""
        self.failures = 0

    def failed(self, error: Exception) -> None:
        """Wait before the next attempt.

        Raises HubError if there is none left, DownloadStopped if the download was canceled.
        """
        policy = self.policy
        self.failures += 1
        order = ordered_wait(error)
        if not is_passing(error) or self.failures >= policy.attempts or (order or 0) > policy.longest_order:
            raise self.explain(error) from error
        wait = min(policy.longest_wait, policy.first_wait * 2 ** (self.failures - 1)) if order is None else order
        again = f"try {self.failures + 1} of {policy.attempts} in {wait:.3g} s"
        policy.report(f"{self.explain(error).message}; {again}", wait)
        if self.stop.wait(wait):
            raise DownloadStopped

    def call(self, request: Callable[[], T]) -> T:
        """Return the result of a request, retried as a whole."""
        while True:
            try:
                return request()
            except (HTTP_ERROR, OSError, BadConnection) as error:
                if is_local(error):
                    raise
                self.failed(error)


def is_local(error: Exception) -> bool:
    """Return whether an error comes from the local disk, not from the hub; only those have an errno and a file name."""
    is_remote = isinstance(error, (HTTP_ERROR, ConnectionError, TimeoutError, EntryNotFoundError))
    return isinstance(error, OSError) and not is_remote and error.errno is not None


def cause_of(error: Exception) -> Exception:
    """Return the underlying error, which huggingface_hub wraps for a file that is not in its cache."""
    inner = error.__cause__
    return inner if isinstance(error, LocalEntryNotFoundError) and isinstance(inner, Exception) else error


def is_passing(error: Exception) -> bool:
    """Return whether a retry of the same request may succeed."""
    error = cause_of(error)
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in PASSING
    return not isinstance(error, OfflineModeIsEnabled | FileMetadataError | EntryNotFoundError)


def ordered_wait(error: Exception) -> float | None:
    """Return the wait in seconds that the hub requests, None if it requests none.

    Its rate-limit header or Retry-After (seconds or a date, RFC 9110 10.2.3) states it.
    """
    error = cause_of(error)
    if not isinstance(error, HfHubHTTPError):
        return None
    headers = error.response.headers
    limit = parse_ratelimit_headers(headers)
    if error.response.status_code == 429 and limit is not None and limit.remaining == 0:
        return float(limit.reset_in_seconds)
    value = headers.get("Retry-After", "").strip()
    if value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def explain(error: Exception, repository: str, revision: str | None) -> HubError:
    """Return the user-facing error, with a remedy, for a failed request."""
    error = cause_of(error)
    page = f"{constants.ENDPOINT}/{repository}"
    if isinstance(error, OfflineModeIsEnabled):
        return HubError(
            f"{repository} cannot be fetched: huggingface_hub is in offline mode",
            f"unset HF_HUB_OFFLINE; `dsv4 inspect {repository}` shows what the cache holds",
        )
    if isinstance(error, GatedRepoError):
        return HubError(
            f"{repository} is gated: you must accept its licence first",
            f"accept it on {page}, then log in with `hf auth login`",
        )
    if isinstance(error, RepositoryNotFoundError):
        return HubError(
            f"the hub has no repository {repository}, or it is private",
            "check the name; for a private repository log in with `hf auth login`",
        )
    if isinstance(error, RevisionNotFoundError):
        return HubError(f"{repository} has no revision {revision}", f"see {page}/commits/main for its commits")
    if isinstance(error, EntryNotFoundError):
        return HubError(f"{repository} no longer has a file that it lists: {_short(error)}", AGAIN)
    if isinstance(error, HfHubHTTPError):
        return _explain_status(error, repository, page)
    if isinstance(error, FileMetadataError | ValueError | KeyError | TypeError):
        return HubError(f"{constants.ENDPOINT} does not answer as a hub does: {_short(error)}", "check HF_ENDPOINT")
    words = f"cannot be reached: {type(error).__name__}: {_short(error)}"
    storage = storage_of(error)
    if storage:
        return HubError(f"the hub's storage {storage} {words}", _open_the_way(storage))
    return HubError(f"{constants.ENDPOINT} {words}", f"check the connection, the proxy and HF_ENDPOINT, then {AGAIN}")


def storage_of(error: Exception) -> str:
    """Return the storage host, as https://host, if the request failed there after a redirect; else ''."""
    try:
        asked: Any = getattr(error, "response", error)
        url = urlsplit(str(error.url if isinstance(error, BadConnection) else asked.request.url))
    except (AttributeError, RuntimeError):  # httpx: it has never had a request
        return ""
    return f"{url.scheme}://{url.netloc}" if url.netloc not in ("", urlsplit(constants.ENDPOINT).netloc) else ""


def _open_the_way(storage: str) -> str:
    return f"the hub itself answers: if a proxy or a firewall stops {storage}, let it through; then {AGAIN}"


def _explain_status(error: HfHubHTTPError, repository: str, page: str) -> HubError:
    status, storage = error.response.status_code, storage_of(error)
    if storage and status != 429:
        sentence = f"the hub's storage {storage} fails with HTTP {status} on {repository}"
        return HubError(sentence, _open_the_way(storage) if status in (401, 403, 407) else AGAIN)
    if status == 401:
        return HubError(f"the hub refuses the login for {repository} (HTTP 401)", "log in again with `hf auth login`")
    if status == 403:
        return HubError(
            f"the hub refuses access to {repository} (HTTP 403)",
            f"check that the account of the token may read {page}; `hf auth whoami` shows which account it is",
        )
    if status == 429:
        return HubError(
            "the hub limits the rate of requests (HTTP 429)", f"wait some minutes, log in with `hf auth login`, {AGAIN}"
        )
    return HubError(f"the hub fails with HTTP {status} on {repository}: {_short(error)}", AGAIN)


def _short(error: Exception) -> str:
    """Return the first line of a message; huggingface_hub adds advice for its own users below it."""
    return next(iter(str(error).strip().splitlines()), "no message")[:160]
