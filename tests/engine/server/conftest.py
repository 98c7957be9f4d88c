import gc
import warnings

import pytest

from dsv4cli.engine.server.streaming import EventStream
from tests.support.serving import served


@pytest.fixture(scope="session")
def nano():
    """A server that all tests of a worker share."""
    with served() as one:
        yield one


@pytest.fixture
def own_garbage():
    """Collects the connections that a client has left open, so that their warnings do not fail a later test."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture
def streams(monkeypatch):
    """The streams that servers of this process have sent."""
    sent, send_all = [], EventStream._send_all

    async def _send_all(stream, send):
        sent.append(stream)
        await send_all(stream, send)

    monkeypatch.setattr(EventStream, "_send_all", _send_all)
    return sent
