"""Sends the requests of checks: a limited number at a time, with retries and a journal. No torch."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from time import monotonic

from dsv4cli.engine.chat.api_client import BUSY, LONGEST, ApiClient, NoAnswer, NoConnection, RawResponse
from dsv4cli.engine.chat.open_clients import OpenClients
from dsv4cli.engine.verification.calls import ApiCall, ServerReply
from dsv4cli.engine.verification.journal import ReplyJournal
from dsv4cli.errors import ServerError

# seconds to wait before the second and later attempts of a request that was not accepted, if the server names no time
BACKOFF = (1.0, 2.0, 4.0, 8.0, 16.0)
# seconds to wait at most if the server names a time
LONGEST_BACKOFF = 60.0
# attempts to connect to a server that has answered before
CONNECTIONS = 4
# calls in a row without an answer in time after which no more are sent: each may have taken ten minutes
GIVE_UP = 3


class Sender:
    """Sends calls to one server.

    Attributes:
        sent: number of requests sent so far, without those in the journal.
    """

    def __init__(
        self, url: str, key: str, concurrency: int, seconds: float, journal: ReplyJournal | None = None
    ) -> None:
        """Check the URL.

        Args:
            key: the API key, "" for none.
            concurrency: maximum number of concurrent requests.
            seconds: timeout of a response.

        Raises:
            UsageError: the URL is invalid.
        """
        self.url = ApiClient(url, key).url
        self._key, self.concurrency, self._seconds, self._journal = key, concurrency, seconds, journal
        self.sent = 0
        self._late = 0  # calls in a row without an answer in time
        self._lock, self._open = threading.Lock(), OpenClients()

    def send(self, call: ApiCall, *, keep: bool = True) -> ServerReply:
        """Return the response to a call, from the journal if it has one. Not sent if the server stopped answering.

        Raises:
            ServerError: the server does not accept connections.
        """
        kept = self._journal.find(call) if self._journal is not None else None
        if kept is not None:
            return kept
        if self._late >= GIVE_UP:
            return ServerReply(0, failure="not sent")
        reply = self._patiently(call)
        with self._lock:
            if not reply.late:
                self._late = 0
            elif call.seconds is None:  # otherwise a hang is what the call is to find
                self._late += 1
        if keep:
            self.keep([call], {call.key: reply})
        return reply

    def send_all(
        self, calls: Sequence[ApiCall], together: int | None, done: Callable[[], None], *, keep: bool = True
    ) -> dict[str, ServerReply]:
        """Return the responses to calls, by key.

        Args:
            together: maximum number of concurrent requests; None for the sender's limit, which is never exceeded.
            done: called after each response.
            keep: whether to write each response to the journal immediately.

        Raises:
            ServerError: the server does not accept connections. The other requests are cancelled.
        """
        workers = max(1, min(together or self.concurrency, self.concurrency, len(calls)))
        found: dict[str, ServerReply] = {}
        with ThreadPoolExecutor(workers, thread_name_prefix="verify") as pool:
            keys = {pool.submit(self.send, call, keep=keep): call.key for call in calls}
            left = set(keys)
            try:
                while left:
                    ready, left = wait(left, return_when=FIRST_COMPLETED)
                    for one in ready:
                        found[keys[one]] = one.result()
                        done()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.close()
                raise
        return found

    def keep(self, calls: Iterable[ApiCall], replies: Mapping[str, ServerReply]) -> None:
        """Write responses to the journal.

        None is written if one is late, or after `close`, which ends requests: that says nothing about the server.
        """
        found = [(call, replies[call.key]) for call in calls]
        if self._journal is None or self._open.ended.is_set() or any(reply.late for _, reply in found):
            return
        for call, reply in found:
            self._journal.add(call, reply)

    def close(self) -> None:
        """End all running requests."""
        self._open.close()

    def _patiently(self, call: ApiCall) -> ServerReply:
        """Send a call. Retry while the server is busy or briefly unreachable."""
        attempt = 0
        while True:
            reply, wish = self._once(call, last=attempt + 1 >= CONNECTIONS)
            if reply is not None and (reply.status not in BUSY or attempt >= len(BACKOFF)):
                return reply
            pause = BACKOFF[min(attempt, len(BACKOFF) - 1)] if wish is None else min(wish, LONGEST_BACKOFF)
            if self._open.ended.wait(pause):
                return ServerReply(0, failure="closed")
            attempt += 1

    def _once(self, call: ApiCall, *, last: bool) -> tuple[ServerReply | None, float | None]:
        """Send a call once.

        Returns:
            The response, None if no connection was accepted; and the seconds after which the server wants a retry.
        """
        client, start = ApiClient(self.url, self._key), monotonic()
        with self._lock:
            self.sent += 1
        seconds = min(call.seconds or self._seconds, self._seconds)
        try:
            with self._open.open(client):
                raw = client.exchange(call.method, call.path, call.content, seconds, call.most or LONGEST)
        except NoConnection:
            if last:
                raise
            return None, None
        except NoAnswer:
            return ServerReply(0, failure="no answer", seconds=monotonic() - start), None
        except ServerError:
            return ServerReply(0, failure="closed", seconds=monotonic() - start), None
        text = raw.body.decode(errors="replace")
        return ServerReply(raw.status, text, raw.complete, "", monotonic() - start), _retry_after(raw)


def _retry_after(raw: RawResponse) -> float | None:
    wish = raw.headers.get("retry-after", "")
    return float(wish) if wish.isdecimal() else None
