"""How often a failed request is repeated, and how long is waited."""

import threading
import time
from email.utils import formatdate

import pytest
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import get_session

from dsv4cli.engine.hub import retry
from dsv4cli.engine.hub.retry import (
    BadConnection,
    DownloadStopped,
    Retrier,
    RetryPolicy,
    explain,
    is_local,
    ordered_wait,
)
from dsv4cli.errors import HubError


def answer(status: int, **headers: str) -> HfHubHTTPError:
    """The error that huggingface_hub makes of an answer."""
    request = get_session().build_request("GET", "http://hub/org/name")
    fields = {key.replace("_", "-"): value for key, value in headers.items()}

    class Answer:
        status_code = status

    response = Answer()
    response.headers, response.request = type(request.headers)(fields), request
    return HfHubHTTPError(f"HTTP {status}", response=response)


def retrier_that_notes(waits: list[float], policy: RetryPolicy) -> Retrier:
    """A retrier that notes how long it would wait."""

    class Stop:
        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return False

    return Retrier(policy, Stop(), lambda error: explain(error, "org/name", None))


@pytest.mark.parametrize(
    ("error", "seconds"),
    [
        (answer(503), None),
        (answer(429, retry_after="7"), 7),
        (answer(503, retry_after=" 7 "), 7),
        (answer(503, retry_after="soon"), None),
        (answer(429, ratelimit='"api";r=0;t=55'), 55),
        (answer(429, ratelimit='"api";r=9;t=55'), None),
        (BadConnection("cut"), None),
    ],
)
def test_how_long_the_hub_asks_to_wait(error, seconds):
    assert ordered_wait(error) == seconds


@pytest.mark.parametrize(("ahead", "seconds"), [(30, 30), (-30, 0)])
def test_a_date_to_wait_for(ahead, seconds, monkeypatch):
    now = 1_700_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)
    assert ordered_wait(answer(503, retry_after=formatdate(now + ahead, usegmt=True))) == seconds


def test_waits_double_up_to_a_bound_and_end():
    waits = []
    retrier = retrier_that_notes(waits, RetryPolicy(attempts=6, first_wait=1, longest_wait=5))
    for _ in range(5):
        retrier.failed(BadConnection("cut"))
    with pytest.raises(HubError, match="cannot be reached: BadConnection: cut"):
        retrier.failed(BadConnection("cut"))
    assert waits == [1, 2, 4, 5, 5]


def test_new_bytes_renew_the_patience():
    waits = []
    retrier = retrier_that_notes(waits, RetryPolicy(attempts=3, first_wait=1))
    for _ in range(20):
        retrier.failed(BadConnection("cut"))
        retrier.advanced()
    assert waits == [1] * 20


def test_what_the_hub_orders_is_obeyed_up_to_a_bound():
    waits = []
    retrier = retrier_that_notes(waits, RetryPolicy(longest_wait=5, longest_order=60))
    retrier.failed(answer(429, retry_after="60"))
    with pytest.raises(HubError, match="limits the rate"):
        retrier.failed(answer(429, retry_after="61"))
    assert waits == [60]


@pytest.mark.parametrize("status", [400, 401, 403, 404, 410, 501])
def test_a_refusal_is_not_repeated(status):
    waits = []
    with pytest.raises(HubError):
        retrier_that_notes(waits, RetryPolicy()).failed(answer(status))
    assert waits == []


def test_a_wrapped_error_counts_as_what_it_wraps():
    outer = LocalEntryNotFoundError("not in the cache")
    outer.__cause__ = answer(503, retry_after="3")
    waits = []
    retrier_that_notes(waits, RetryPolicy()).failed(outer)
    assert waits == [3]
    outer.__cause__ = OfflineModeIsEnabled("offline")
    with pytest.raises(HubError, match="offline mode"):
        retrier_that_notes(waits, RetryPolicy()).failed(outer)


def test_called_off_while_it_waits():
    stop = threading.Event()
    stop.set()
    with pytest.raises(DownloadStopped):
        Retrier(RetryPolicy(first_wait=60), stop, lambda error: HubError("no")).failed(BadConnection("cut"))


@pytest.mark.parametrize(
    ("error", "local"),
    [
        (OSError(28, "No space left on device"), True),
        (PermissionError(13, "Permission denied"), True),
        (ConnectionResetError(104, "Connection reset by peer"), False),
        (TimeoutError(110, "Connection timed out"), False),
        (answer(503), False),
        (OSError("consistency check failed"), False),
        (LocalEntryNotFoundError("not in the cache"), False),
    ],
)
def test_whose_fault_it_is(error, local):
    assert is_local(error) is local


def test_what_many_requests_say_at_once_is_said_once(monkeypatch):
    given: list[str] = []
    clock = iter([0.0, 0.1, 3.9, 4.1])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    notices = retry.Notices(given.append)
    for number in range(4):
        notices(f"{number}", 4)
    assert given == ["0", "3"]
