"""Many requests to a server, several at a time, each retried until it is answered. Does not import torch."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar

from dsv4cli.engine.chat.api_client import (
    ApiClient,
    ConnectionLost,
    NoAnswer,
    NoConnection,
    RequestRejected,
    ServerBusy,
    StreamEnded,
)
from dsv4cli.engine.chat.open_clients import OpenClients
from dsv4cli.engine.chat.remote import COMPLETIONS, AnswerFailed, push_event
from dsv4cli.engine.chat.remote_answer import RemoteAnswer
from dsv4cli.errors import ServerError

T = TypeVar("T")
# seconds before the second and later attempts; a server may ask for more, up to LONGEST_PAUSE
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
LONGEST_PAUSE = 60.0
# seconds in which no request was answered, after which a failing request is given up
PATIENCE = 600.0
# attempts of a request whose answer fails or breaks off each time, although the server accepts it
MOST_BROKEN = 20
PASSING = (NoConnection, NoAnswer, ConnectionLost, ServerBusy, AnswerFailed)


def ask(client: ApiClient, body: Mapping[str, Any]) -> RemoteAnswer:
    """Send a streaming request, and return the complete answer. Raises ServerError."""
    answer = RemoteAnswer()
    try:
        with closing(client.stream(COMPLETIONS, body)) as events:
            for event in events:
                push_event(client, answer, event)
    except StreamEnded:
        if not answer.finish:
            reason = f"{client.url}: the connection closed before the answer was complete"
            raise ConnectionLost(reason, "try again; see also the server's log") from None
    answer.finish = answer.finish or "stop"  # the stream is complete, even if the server sent no reason
    return answer


class Backoff:
    """The pauses between the attempts of one request.

    Attributes:
        attempts: number of failed attempts.
    """

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience, self._since = patience, monotonic()
        self.attempts = self._broken = 0

    def pause(self, error: ServerError, answered: float = 0.0) -> float | None:
        """Return the seconds to wait after a failure, None to give up.

        Args:
            answered: when the server last answered another request, by `monotonic`.
        """
        if not isinstance(error, PASSING):
            return None
        self.attempts += 1
        self._broken += isinstance(error, AnswerFailed | ConnectionLost)
        wait = error.wait if isinstance(error, ServerBusy) else None
        pause = max(PAUSES[min(self.attempts, len(PAUSES)) - 1], min(wait or 0.0, LONGEST_PAUSE))
        late = monotonic() + pause > max(self._since, answered) + self._patience
        return None if late or self._broken >= MOST_BROKEN else pause


class RemotePool(Generic[T]):
    """Carries out requests in threads, at most `concurrency` at a time."""

    def __init__(
        self,
        connect: Callable[[], ApiClient],
        concurrency: int,
        tell: Callable[[str], None],
        patience: float = PATIENCE,
    ) -> None:
        """Create a pool. It sends nothing before `carry_out`.

        Args:
            connect: returns a client of the server.
            tell: called in a worker thread with a message when requests begin to fail.
            patience: seconds without an answer to any request, after which a failing request is given up.
        """
        self._connect, self._concurrency, self._tell, self._patience = connect, concurrency, tell, patience
        self._lock, self._open = threading.Lock(), OpenClients()
        self._results: SimpleQueue[tuple[int, T | BaseException]] = SimpleQueue()
        self._answered, self._troubled = monotonic(), False

    def carry_out(self, tasks: Sequence[Callable[[ApiClient], T]]) -> Iterator[tuple[int, T | RequestRejected]]:
        """Yield the number and the result of each task when it ends, or the server's rejection.

        Closing the iterator cancels the other requests.

        Raises:
            ServerError: a request was given up.
        """
        numbers = iter(range(len(tasks)))
        workers = min(self._concurrency, len(tasks))
        for _ in range(workers):
            threading.Thread(target=self._work, args=(tasks, numbers), daemon=True).start()
        try:
            for _ in tasks:
                number, found = self._results.get()
                if isinstance(found, BaseException) and not isinstance(found, RequestRejected):
                    raise found
                yield number, found
        finally:
            self._open.close()

    def _work(self, tasks: Sequence[Callable[[ApiClient], T]], numbers: Iterator[int]) -> None:
        while not self._open.ended.is_set():
            with self._lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                self._results.put((number, self._patiently(tasks[number])))
            except RequestRejected as error:
                self._results.put((number, error))
            except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for results
                self._open.ended.set()
                self._results.put((number, error))

    def _patiently(self, task: Callable[[ApiClient], T]) -> T:
        backoff = Backoff(self._patience)
        while True:
            try:
                with self._open.open(self._connect()) as client:
                    found = task(client)
            except ServerError as error:
                pause = backoff.pause(error, self._answered)
                if pause is None or self._open.ended.is_set():
                    raise
                self._note(error)
                self._open.ended.wait(pause)
                continue
            self._answered, self._troubled = monotonic(), False
            return found

    def _note(self, error: ServerError) -> None:
        """Report a failure, unless one has been reported since the last answer."""
        with self._lock:
            first, self._troubled = not self._troubled, True
        if first and not self._open.ended.is_set():
            self._tell(f"{error.message}; trying again")
