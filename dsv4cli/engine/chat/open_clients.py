"""Clients with a running request, so that another thread can abort all of them. Does not import torch."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from dsv4cli.engine.chat.api_client import ApiClient


class OpenClients:
    """The clients whose requests are running.

    Attributes:
        ended: set by `close`.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self._lock, self._clients = threading.Lock(), set[ApiClient]()

    @contextmanager
    def open(self, client: ApiClient) -> Iterator[ApiClient]:
        """Include a client while the block runs, and yield it."""
        with self._lock:
            self._clients.add(client)
        try:
            yield client
        finally:
            with self._lock:
                self._clients.discard(client)

    def close(self) -> None:
        """Abort all running requests."""
        self.ended.set()
        with self._lock:
            for client in self._clients:
                client.close()
