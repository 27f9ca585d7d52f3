"""What the server counts, for Prometheus."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """The counters of one server; `waiting`, `hot_bytes` and `store_bytes` are given functions that measure."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        shared: dict[str, Any] = {"registry": self.registry}
        seconds = {"buckets": _SECONDS, **shared}
        self.requests = Counter("kvcli_requests", "Requests, by endpoint and status", ("endpoint", "status"), **shared)
        self.tokens = Counter("kvcli_tokens", "Tokens, by kind: prompt, cached, generated", ("kind",), **shared)
        self.prefixes = Counter("kvcli_prefixes", "Prompts, by where their prefix was", ("source",), **shared)
        self.stored = Counter("kvcli_contexts_stored", "Contexts, by whether they were written", ("written",), **shared)
        self.load = Histogram("kvcli_load_seconds", "Finding and loading a prefix", **seconds)
        self.prefill = Histogram("kvcli_prefill_seconds", "Reading what is new of a prompt", **seconds)
        self.first = Histogram("kvcli_first_token_seconds", "From request to first token", **seconds)
        self.waiting = Gauge("kvcli_waiting_requests", "Requests that wait", **shared)
        cache = Gauge("kvcli_cache_bytes", "Bytes of contexts, by place: hot, disk", ("place",), **shared)
        self.hot_bytes, self.store_bytes = cache.labels("hot"), cache.labels("disk")

    def count_stored(self, written: bool) -> None:
        """Counts a context that was written, or could not be."""
        self.stored.labels(str(written).lower()).inc()

    def text(self) -> bytes:
        """All of them, in the text format of Prometheus."""
        return generate_latest(self.registry)
