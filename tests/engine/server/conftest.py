import pytest

from dsv4cli.engine.server.streaming import EventStream
from tests.support.serving import served


@pytest.fixture(scope="session")
def nano():
    """A server that all tests of a worker share."""
    with served() as one:
        yield one


@pytest.fixture
def streams(monkeypatch):
    """The streams that servers of this process have sent."""
    sent, send_all = [], EventStream._send_all

    async def _send_all(stream, send):
        sent.append(stream)
        await send_all(stream, send)

    monkeypatch.setattr(EventStream, "_send_all", _send_all)
    return sent
