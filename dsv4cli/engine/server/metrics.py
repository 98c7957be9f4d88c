"""What Prometheus reads of the server: how busy it is, what it has done, how long clients have waited; no torch."""

from collections.abc import Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.draft_report import DraftReport
    from dsv4cli.engine.runtime.request import Request
    from dsv4cli.engine.runtime.usage import Usage
    from dsv4cli.engine.server.engine_thread import Update

# seconds
FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1, 5)


class Metrics:
    """The numbers of one server; its methods are called in the event loop."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("dsv4_requests", "Requests that have ended", ["outcome"], registry=registry)
        self._prompt = Counter(
            "dsv4_prompt_tokens", "Tokens of the prompts of requests that have ended", registry=registry
        )
        self._drawn = Counter("dsv4_generated_tokens", "Tokens of answers", registry=registry)
        self._first = Histogram(
            "dsv4_time_to_first_token_seconds", "From a request's arrival to its first token",
            registry=registry, buckets=FIRST_TOKEN,
        )  # fmt: skip
        self._between = Histogram(
            "dsv4_time_between_tokens_seconds", "From a step that gave a request tokens to the next one",
            registry=registry, buckets=BETWEEN_TOKENS,
        )  # fmt: skip
        self._last: dict[Request, float] = {}  # when it came, or its last token
        self._drawing: set[Request] = set()  # those that have tokens

    def begin(self, request: "Request") -> None:
        """A request has come."""
        self._last[request] = perf_counter()

    def note(self, update: "Update") -> None:
        """A request has got something."""
        request = update.request
        if not update.tokens:
            return
        passed, self._last[request] = update.time - self._last[request], update.time
        if request in self._drawing:
            self._between.observe(passed)
        else:
            self._first.observe(passed)
            self._drawing.add(request)
        self._drawn.inc(len(update.tokens))

    def end(self, request: "Request", outcome: str) -> None:
        """A request has ended: it is finished, cancelled or failed."""
        self._requests.labels(outcome).inc()
        self._prompt.inc(len(request.prompt))
        self._last.pop(request, None)
        self._drawing.discard(request)

    def text(self, usage: "Usage", drafts: "DraftReport | None") -> bytes:
        """All of them, in Prometheus' format. usage: what the engine holds; drafts: what they have come to."""
        held = CollectorRegistry()
        held.register(_Held(usage, drafts))
        return generate_latest(self._registry) + generate_latest(held)


class _Held:
    """What is as it is when somebody reads it."""

    def __init__(self, usage: "Usage", drafts: "DraftReport | None") -> None:
        self._usage, self._drafts = usage, drafts

    def collect(self) -> Iterator[Metric]:
        """As Prometheus' client asks."""
        usage, drafts = self._usage, self._drafts
        yield GaugeMetricFamily("dsv4_requests_running", "Requests that have a place in the cache", usage.running)
        yield GaugeMetricFamily("dsv4_requests_waiting", "Requests that wait for one", usage.waiting)
        yield GaugeMetricFamily("dsv4_cache_states", "States kept for prompts that begin alike", usage.states)
        yield GaugeMetricFamily("dsv4_cache_device_bytes", "What they take of the device", usage.device_bytes)
        yield GaugeMetricFamily("dsv4_cache_host_bytes", "What they take of host memory", usage.host_bytes)
        yield CounterMetricFamily("dsv4_cache_hits", "Prompts whose beginning was held", usage.hits)
        yield CounterMetricFamily("dsv4_cached_tokens", "Tokens of prompts that were held", usage.found)
        if drafts is not None:
            yield CounterMetricFamily("dsv4_drafts", "Drafts that were verified", drafts.drafted)
            yield CounterMetricFamily("dsv4_drafts_accepted", "Those that the model drew itself", drafts.accepted)
