"""Celery: a task that does nothing. As a program it is the client; `celery -A celery_noop worker` is the worker."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery

from benchmarks.peers.dialogue import CALL, RESULT, serve

app = Celery("noop", broker=os.environ["BENCH_BROKER"], backend=os.environ["BENCH_RESULTS"])
app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"])


# Named, because the client's module is `__main__` and the worker's is not.
@app.task(name="generate")
def generate(model: str, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:  # noqa: ARG001 - does nothing
    """Generate nothing."""
    return RESULT


if __name__ == "__main__":
    serve(lambda: generate.delay(**CALL), lambda: generate.delay(**CALL).get(timeout=60))
