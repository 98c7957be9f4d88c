"""An engine that several threads share: their requests run in one batch, without a dedicated thread."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

from dsv4cli.engine.chat.conversation import Conversation
from dsv4cli.engine.chat.dialogue import Dialogue
from dsv4cli.engine.model.transformer import Transformer
from dsv4cli.engine.runtime.engine import Engine
from dsv4cli.engine.runtime.request import Request, Token
from dsv4cli.engine.settings import Limits
from dsv4cli.errors import UsageError


class SharedEngine:
    """An engine for several threads.

    A thread that waits for its tokens runs the next step for all requests, and stores the tokens of other requests for
    their threads. Requests that exceed the engine's slots wait in the engine's queue.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._lock = Lock()
        self._arrived: dict[Request, deque[list[Token] | Exception]] = {}
        self._cancelled: deque[Request] = deque()

    @property
    def model(self) -> Transformer:
        """The model that the engine runs."""
        return self.engine.model

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other threads from using the model inside the block."""
        with self._lock:
            while self._cancelled:
                self._remove(self._cancelled.popleft())
            yield

    def add(self, request: Request) -> None:
        """Queue a request. Raises what `Engine.add` raises."""
        with self.alone():
            self.engine.add(request)
            self._arrived[request] = deque()

    def next_tokens(self, request: Request) -> list[Token]:
        """Return the tokens that the next step sampled for a request, none for a prefill step.

        Raises the error that ended the request, which may come from a step that another thread ran.
        """
        with self.alone():
            arrived = self._arrived[request]
            while not arrived:
                self._step()
            first = arrived.popleft()
        if isinstance(first, Exception):
            raise first
        return first

    def cancel(self, request: Request) -> None:
        """End a request before the next step.

        It takes no lock, because the garbage collector may call it in the middle of a step, to end an abandoned reply.
        """
        self._cancelled.append(request)

    def close(self) -> None:
        """End all requests with an error and free the cache."""
        with self.alone():
            self._end_all(UsageError("this model has been closed", "create another Model"))
            self.engine.forget()

    def _step(self) -> None:
        try:
            results = self.engine.step()
        except Exception as error:  # noqa: BLE001 - raised again in each waiting thread
            self._end_all(error)
            return
        for result in results:
            if result.request in self._arrived:  # a step launched ahead may include a cancelled request
                self._arrived[result.request].append(result.tokens)

    def _end_all(self, error: Exception) -> None:
        for request, arrived in self._arrived.items():
            arrived.append(error)
            self.engine.cancel(request)

    def _remove(self, request: Request) -> None:
        self._arrived.pop(request, None)
        self.engine.cancel(request)


class SharedConversation(Conversation):
    """A conversation on a shared engine."""

    def __init__(self, shared: SharedEngine, dialogue: Dialogue, limits: Limits, device: torch.device | str) -> None:
        super().__init__(shared.model, dialogue, limits, device, engine=shared.engine)
        self._shared = shared

    def _add(self, request: Request) -> None:
        self._shared.add(request)

    def _next_tokens(self, request: Request) -> list[Token]:
        return self._shared.next_tokens(request)

    def _cancel(self, request: Request) -> None:
        self._shared.cancel(request)
