"""The gateway's numbers as Prometheus text: what was asked, how it ended, how long it took, and the engine's own gauges."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

__all__ = ["GatewayMetrics"]

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class GatewayMetrics:
    """A registry of its own, so that two gateways in one process do not mix."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("driftline_gateway_requests", "Requests by route and status.", ("route", "status"), registry=registry)
        self.cancelled = Counter("driftline_gateway_cancelled", "Requests whose client went away.", ("route",), registry=registry)
        self.prompt_tokens = Counter("driftline_gateway_prompt_tokens", "Prompt tokens of answered requests.", registry=registry)
        self.cached_tokens = Counter("driftline_gateway_cached_tokens", "Prompt tokens that needed no computing.", registry=registry)
        self.sampled_tokens = Counter("driftline_gateway_sampled_tokens", "Tokens of answered requests.", registry=registry)
        self.first_s = Histogram("driftline_gateway_first_token_seconds", "From the request to its first token.", registry=registry, buckets=SECONDS)
        self.whole_s = Histogram("driftline_gateway_request_seconds", "From the request to its end.", registry=registry, buckets=SECONDS)
        self._engine: dict[str, Gauge] = {}

    def page(self, engine: Mapping[str, float]) -> bytes:
        for key, value in engine.items():
            name = "driftline_engine_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
            if name not in self._engine:
                self._engine[name] = Gauge(name, f"The engine's {key}.", registry=self._registry)
            self._engine[name].set(value)
        return generate_latest(self._registry)
