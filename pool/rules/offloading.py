"""When KV that was moved out of an engine is put back, and when its prompt is computed again instead.

Pure. Units are tokens (positions), bytes and seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

#: What a new measurement counts: what a machine does changes with what else runs on it.
WEIGHT = 0.5


@dataclass(slots=True)
class Pace:
    """How fast bytes are moved, as measured; None before the first measurement."""

    seconds_per_byte: float | None = None

    def learn(self, size_bytes: int, took_s: float) -> None:
        """So many bytes (> 0) took so long."""
        measured = max(took_s, 0.0) / size_bytes
        former = self.seconds_per_byte
        self.seconds_per_byte = measured if former is None else (1 - WEIGHT) * former + WEIGHT * measured

    def seconds(self, size_bytes: int) -> float:
        """What so many bytes take; infinitely long before the first measurement."""
        return float("inf") if self.seconds_per_byte is None else size_bytes * self.seconds_per_byte


def is_cheaper(
    prompt_tokens: int,
    *,
    resident: int,
    restored: int,
    restore_seconds: float,
    prefill_seconds: Callable[[float], float],
) -> bool:
    """Whether a prompt's first token comes sooner when `restored` leading positions are put back, than with the
    `resident` ones that are there. `prefill_seconds`: the cost of so many uncached tokens."""
    if restored <= resident:
        return False
    return restore_seconds + prefill_seconds(prompt_tokens - restored) < prefill_seconds(prompt_tokens - resident)
