"""`Metrics`: what a server counts, for Prometheus.

Counters and histograms of requests are filled by the servicer; gauges are read from the engine's load snapshot when
somebody scrapes. Owns names and buckets. Does not own serving them (server.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from openengine import Engine, GenerateEvent, Handle, OpenEngineError, TaskUsage, TokenOutput, Usage

__all__ = ["Metrics", "RequestMetrics", "usage_of"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GAUGES = {
    "openengine_requests_running": ("running_requests", "Requests that hold a slot."),
    "openengine_requests_waiting": ("queued_requests", "Accepted requests that wait for a slot."),
    "openengine_kv_blocks_used": ("used_kv_blocks", "KV blocks that running requests hold."),
    "openengine_kv_blocks": ("total_kv_blocks", "KV blocks in the pool."),
    "openengine_tokens_running": ("running_tokens", "Tokens of running requests in the KV cache."),
    "openengine_tokens_waiting": ("waiting_tokens", "Prompt tokens that wait."),
}


class Metrics:
    """The metrics of one server in a registry of its own."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadGauges(engine))
        self.requests = self._counter(
            "requests", "Requests by how they ended: finish reason, DONE for a task, or error code.", "end"
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests.")
        self.cached_tokens = self._counter("cached_prompt_tokens", "Prompt tokens taken from the prefix cache.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens drawn in ended generations.")
        self.request_seconds = self._histogram(
            "request_duration_seconds", "Acceptance to the end of an accepted request.", _SECONDS
        )
        self.first_token_seconds = self._histogram(
            "time_to_first_token_seconds", "Acceptance to first token.", _SECONDS
        )
        self.token_seconds = self._histogram(
            "time_per_output_token_seconds", "Between later tokens, on average over a request.", _TOKEN_SECONDS
        )

    def refuse(self, code: str) -> None:
        """A request was not accepted: it is counted by its error and has no duration."""
        self.requests.labels(code).inc()

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"openengine_{name}", help_text, labels, registry=self.registry)

    def _histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"openengine_{name}", help_text, buckets=buckets, registry=self.registry)


class RequestMetrics:
    """Follows one request from its acceptance on. Does nothing for a server without metrics."""

    def __init__(self, metrics: Metrics | None) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._first: float | None = None

    def see(self, event: GenerateEvent) -> None:
        if self._metrics is None:
            return
        if self._first is None and isinstance(event, TokenOutput):
            self._first = time.monotonic()
            self._metrics.first_token_seconds.observe(self._first - self._start)
        usage = getattr(event, "usage", None)
        if usage is not None:
            self.end(str(getattr(event, "reason", "prefill")).upper(), usage)

    def end_task(self, usage: TaskUsage) -> None:
        """An embed, classify or score request is over."""
        tokens = usage.input_tokens
        self.end("DONE", Usage(tokens, 0, tokens, usage.cached_input_tokens))

    def end_with(self, handle: Handle, how: str) -> None:
        """Nobody follows the request any more: unless it was over, it is when the engine has stopped working for it."""
        if self._metrics is not None:
            handle.on_done(lambda: self.end(how, usage_of(handle)))

    def end(self, how: str, usage: Usage | None = None) -> None:
        """The request is over; only the first call counts."""
        metrics, self._metrics = self._metrics, None
        if metrics is None:
            return
        now = time.monotonic()
        metrics.requests.labels(how).inc()
        metrics.request_seconds.observe(now - self._start)
        if usage is None:
            return
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.cached_tokens.inc(usage.cached_prompt_tokens or 0)
        metrics.generated_tokens.inc(usage.completion_tokens)
        if self._first is not None and usage.completion_tokens > 1:
            metrics.token_seconds.observe((now - self._first) / (usage.completion_tokens - 1))


def usage_of(handle: Handle) -> Usage | None:
    """What a generation has used that has ended."""
    try:
        return handle.result().usage
    except OpenEngineError:
        return handle.usage


class _LoadGauges:
    """The engine's load at the time of a scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = self._engine.load_info()
        for name, (field, help_text) in _GAUGES.items():
            value = getattr(load, field)
            if value is not None:
                yield GaugeMetricFamily(name, help_text, value=value)
