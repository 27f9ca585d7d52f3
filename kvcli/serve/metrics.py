"""What the server counts, for Prometheus: under vLLM's names what vLLM counts, too, else under names of kvcli."""

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = [float(f"{x}e{k}") for k in range(-3, 3) for x in (1, 2, 5)]
_TOKENS = [x * 10**k for k in range(6) for x in (1, 2, 5)]
_PREFIX = ("prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries", "external_prefix_cache_hits")
_COUNTERS = ("prompt_tokens", "generation_tokens", *_PREFIX)
_PHASES = ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
_LATENCIES = ("time_to_first_token", "inter_token_latency", "e2e_request_latency", *_PHASES)


class Metrics:
    """The figures of a server of a model; `hot_bytes` and `store_bytes` are given functions."""

    def __init__(self, model: str) -> None:
        self.registry, self._vllm = CollectorRegistry(), {"model_name": model, "engine": "0"}
        shared: dict[str, Any] = {"registry": self.registry}
        buckets = {f"{x}_seconds": _SECONDS for x in _LATENCIES} | {f"request_{x}": _TOKENS for x in _COUNTERS[:2]}
        self._add = {name: self.of_vllm(Counter, name).inc for name in _COUNTERS}
        self._add |= {name: self.of_vllm(Histogram, name, buckets=x).observe for name, x in buckets.items()}
        ended = Counter("vllm:request_success", "request success", (*self._vllm, "finished_reason"), **shared)
        self.ended = {x: ended.labels(**self._vllm, finished_reason=x) for x in ("stop", "length", "abort", "error")}
        self.requests = Counter("kvcli_requests", "Requests, by endpoint and status", ("endpoint", "status"), **shared)
        stored = Counter("kvcli_contexts_stored", "Contexts, by whether they were written", ("written",), **shared)
        self.count_stored: Callable[[bool], None] = lambda written: stored.labels(str(written).lower()).inc()
        self.load = Histogram("kvcli_load_seconds", "Loading a context from disk", buckets=_SECONDS, **shared)
        cache = Gauge("kvcli_cache_bytes", "Bytes of contexts, by place: hot, disk", ("place",), **shared)
        self.hot_bytes, self.store_bytes = cache.labels("hot"), cache.labels("disk")

    def add(self, **values: float) -> None:
        """Adds to counters and histograms of vLLM, by their names."""
        for name, value in values.items():
            self._add[name](value)

    def text(self) -> bytes:
        """All of them, in the text format of Prometheus."""
        return generate_latest(self.registry)

    def of_vllm(self, kind: type[Any], name: str, **options: Any) -> Any:
        """A new figure that vLLM has, too."""
        made = kind(f"vllm:{name}", name.replace("_", " "), [*self._vllm], registry=self.registry, **options)
        return made.labels(**self._vllm)
