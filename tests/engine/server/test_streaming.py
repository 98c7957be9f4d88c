"""How long a client has been sent nothing."""

from types import SimpleNamespace

from dsv4cli.engine.server import streaming
from dsv4cli.engine.server.async_engine import IDLE_SECONDS
from dsv4cli.engine.server.streaming import Silence


def test_an_event_ends_the_silence(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(streaming, "monotonic", lambda: clock.now)
    silence = Silence()
    clock.now += IDLE_SECONDS
    assert silence.long
    assert silence.ended_by(b"event") == b"event"
    assert not silence.long
    clock.now += IDLE_SECONDS
    assert silence.long
