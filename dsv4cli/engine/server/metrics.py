"""The server's Prometheus metrics: load, tokens, latencies and HTTP statuses; no torch."""

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
    from dsv4cli.engine.runtime.request import Request
    from dsv4cli.engine.runtime.usage import Usage
    from dsv4cli.engine.server.engine_thread import Update

# seconds
FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1, 5)
# the status nginx logs for a client that disconnects before its response begins
DISCONNECTED = 499


class Metrics:
    """The counters and histograms of one server. Call its methods from the event loop only."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("dsv4_requests", "Requests that have ended", ["outcome"], registry=registry)
        self._http = Counter("dsv4_http_requests", "HTTP requests by path and status code", ["path", "status"],
                             registry=registry)  # fmt: skip
        self._prompt = Counter("dsv4_prompt_tokens", "Prompt tokens of HTTP requests that have ended; n answers to a "
                               "prompt count it once", registry=registry)  # fmt: skip
        self._cached = Counter("dsv4_cached_tokens", "Prompt tokens found in the prefix cache, of those in "
                               "dsv4_prompt_tokens", registry=registry)  # fmt: skip
        self._generated = Counter("dsv4_generated_tokens", "Tokens of answers, as usage reports them",
                                  registry=registry)  # fmt: skip
        self._first = Histogram(
            "dsv4_time_to_first_token_seconds", "Time from a request's arrival to its first token",
            registry=registry, buckets=FIRST_TOKEN,
        )  # fmt: skip
        self._between = Histogram(
            "dsv4_time_between_tokens_seconds", "Time between two steps in which a request received tokens",
            registry=registry, buckets=BETWEEN_TOKENS,
        )  # fmt: skip
        self._last: dict[Request, float] = {}  # arrival, or time of the last token
        self._drawing: set[Request] = set()  # requests that have tokens

    def begin(self, request: "Request") -> None:
        """Record when a request arrived."""
        self._last[request] = perf_counter()

    def note(self, update: "Update") -> None:
        """Record the latency of the tokens that a request received in a step."""
        request = update.request
        if not update.tokens:
            return
        passed, self._last[request] = update.time - self._last[request], update.time
        if request in self._drawing:
            self._between.observe(passed)
        else:
            self._first.observe(passed)
            self._drawing.add(request)

    def count_generated(self, tokens: int) -> None:
        """Count tokens that became part of an answer."""
        self._generated.inc(tokens)

    def count_http(self, path: str, status: int, usage: Mapping[str, Any] | None) -> None:
        """Count an HTTP request that has ended.

        Args:
            path: The path of its route.
            status: The status code, or 0 if the client disconnected before a response.
            usage: The token counts in OpenAI's shape, None if no model call was made.
        """
        self._http.labels(path, status or DISCONNECTED).inc()
        if usage is not None:
            self.count_usage(usage)

    def count_usage(self, usage: Mapping[str, Any]) -> None:
        """Count the prompt's tokens, with token counts in OpenAI's shape."""
        self._prompt.inc(usage["prompt_tokens"])
        self._cached.inc(usage["prompt_tokens_details"]["cached_tokens"])

    def end(self, request: "Request", outcome: str) -> None:
        """Count a request that has ended.

        Args:
            outcome: finished, cancelled or failed.
        """
        self._requests.labels(outcome).inc()
        self._last.pop(request, None)
        self._drawing.discard(request)

    def text(self, usage: "Usage", drafts: "DraftReport | None") -> bytes:
        """Return all metrics in Prometheus' text format."""
        held = CollectorRegistry()
        held.register(_Held(usage, drafts))
        return generate_latest(self._registry) + generate_latest(held)


class _Held:
    """Metrics that are read from the engine at each scrape."""

    def __init__(self, usage: "Usage", drafts: "DraftReport | None") -> None:
        self._usage, self._drafts = usage, drafts

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, as prometheus_client requires."""
        usage, drafts = self._usage, self._drafts
        yield GaugeMetricFamily("dsv4_requests_running", "Requests that are running", usage.running)
        yield GaugeMetricFamily("dsv4_requests_waiting", "Requests that are waiting in the queue", usage.waiting)
        yield GaugeMetricFamily("dsv4_cache_states", "Entries of the prefix cache", usage.states)
        yield GaugeMetricFamily(
            "dsv4_cache_device_bytes", "GPU memory of the prefix cache in bytes", usage.device_bytes
        )
        yield GaugeMetricFamily("dsv4_cache_host_bytes", "Host memory of the prefix cache in bytes", usage.host_bytes)
        yield CounterMetricFamily(
            "dsv4_cache_hits", "Requests that found a part of their prompt in the prefix cache", usage.hits
        )
        if drafts is not None:
            yield CounterMetricFamily("dsv4_drafts", "Draft tokens that were verified", drafts.drafted)
            yield CounterMetricFamily("dsv4_drafts_accepted", "Draft tokens that were accepted", drafts.accepted)
