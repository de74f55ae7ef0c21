"""Waiting in tests: poll a predicate until it holds, or fail with what was awaited."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(predicate: Callable[[], T], *, description: str, timeout_s: float = 10.0, every_s: float = 0.02) -> T:
    """Return the predicate's first truthy value; AssertionError naming `description` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = predicate()
        if value:
            return value
        if time.monotonic() >= deadline:
            raise AssertionError(f"timed out after {timeout_s} s waiting for: {description}")
        time.sleep(every_s)
