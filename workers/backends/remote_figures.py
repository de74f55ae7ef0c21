"""Figures of a runner over HTTP, under the names that the batching loop uses for the same things."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from workers.telemetry import INTER_TOKEN_SECONDS, Histogram, Rate


@dataclass
class RemoteFigures:
    """Written by the runner's thread alone, read by any."""

    clock: Callable[[], float] = time.monotonic
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    given_back: int = 0
    requests: int = 0
    retries: int = 0
    restarts: int = 0
    decoded_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    gaps: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_SECONDS))

    def __post_init__(self) -> None:
        self._rate = Rate(self.clock())

    def told(self, tokens: int, gap_s: float | None) -> None:
        """Tokens of one choice came; how long after the ones before, None for its first, which prefill has made."""
        decoded = tokens if gap_s is not None else tokens - 1
        self.decoded_tokens += decoded
        self._rate.add(decoded, self.clock())
        if gap_s is not None:
            self.gaps.observe(gap_s)

    def data(self) -> dict[str, Any]:
        """JSON-safe."""
        return {
            "decode_tokens_total": self.decoded_tokens,
            "decode_tokens_per_sec": round(self._rate.per_second(self.clock()), 4),
            "prompt_tokens_total": self.prompt_tokens,
            "prompt_tokens_cached_total": self.cached_tokens,
            "completed_sessions": self.completed,
            "cancelled_sessions": self.cancelled,
            "failed_sessions": self.failed,
            "inter_token_seconds": self.gaps.data(),
            "upstream_requests_total": self.requests,
            "upstream_retries_total": self.retries,
            "upstream_given_back_total": self.given_back,
            "upstream_restarts_total": self.restarts,
        }
