"""The server's Prometheus metrics: load, tokens, latencies and HTTP statuses; no torch."""

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dsv4cli.engine.config.capacity import BLOCK_TOKENS

if TYPE_CHECKING:
    from dsv4cli.engine.runtime.drafts.draft_report import DraftReport
    from dsv4cli.engine.runtime.request import Request
    from dsv4cli.engine.runtime.usage import Usage
    from dsv4cli.engine.server.engine_thread import Update

# seconds
FIRST_TOKEN = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300)
WHOLE = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600)
BETWEEN_TOKENS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1, 5)
# what the metrics dsv4_capacity_* are
CAPACITY = {
    "running_requests": "Requests that can run at the same time",
    "queued_requests": "Requests that can wait in the queue",
    "context_tokens": "Tokens of a prompt and its answer, at most",
    "cache_tokens": "Tokens of all running requests and cached prefixes that the KV cache on the device holds",
}
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
        self._refusals = Counter("dsv4_refusals", "Refused HTTP requests, and those that failed during their stream, "
                                 "by path and status code", ["path", "status"], registry=registry)  # fmt: skip
        self._queue = Histogram(
            "dsv4_queue_seconds", "Time from a request's arrival to the start of its first step",
            registry=registry, buckets=FIRST_TOKEN,
        )  # fmt: skip
        self._whole = Histogram(
            "dsv4_request_seconds", "Time from a request's arrival to its end, by outcome", ["outcome"],
            registry=registry, buckets=WHOLE,
        )  # fmt: skip
        self._arrived: dict[Request, float] = {}
        self._last: dict[Request, float] = {}  # time of the last token, arrival before the first
        self._stepped: set[Request] = set()  # requests that have been in a step
        self._drawing: set[Request] = set()  # requests that have tokens

    def describe(self, info: Mapping[str, str], capacity: Mapping[str, int]) -> None:
        """Add metrics that stay the same: labels of `dsv4_info`, and `CAPACITY` limits."""
        Info("dsv4", "This server", registry=self._registry).info(dict(info))
        for name, value in capacity.items():
            Gauge(f"dsv4_capacity_{name}", CAPACITY[name], registry=self._registry).set(value)

    def begin(self, request: "Request") -> None:
        """Record when a request arrived."""
        self._last[request] = self._arrived[request] = perf_counter()

    def note(self, update: "Update") -> None:
        """Record how long a request was queued, and the latency of the tokens that it received in a step."""
        request = update.request
        if request not in self._stepped and update.error is None:
            self._stepped.add(request)
            self._queue.observe(max(update.began - self._arrived[request], 0.0))
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

    def count_refusal(self, path: str, status: int) -> None:
        """Count an HTTP request that was refused, or that failed during its stream.

        Args:
            path: The path of its route.
            status: The status code of the refusal.
        """
        self._refusals.labels(path, status).inc()

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
        self._whole.labels(outcome).observe(perf_counter() - self._arrived.pop(request))
        self._last.pop(request, None)
        self._stepped.discard(request)
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
        yield GaugeMetricFamily(
            "dsv4_cache_used_tokens", "Used part of the KV cache on the device, in tokens", usage.blocks * BLOCK_TOKENS
        )
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
