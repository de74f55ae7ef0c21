"""What callers of Celery get."""

from __future__ import annotations

from typing import Any

from celery.result import AsyncResult


def answer(result: AsyncResult, *, timeout_s: float = 20) -> Any:
    """What the result gives. Afterwards it has no backend: its destructor would talk to a server that may be gone."""
    try:
        return result.get(timeout=timeout_s)
    finally:
        result.backend.remove_pending_result(result)
        result.backend = None
