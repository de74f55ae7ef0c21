"""Celery: a task that does nothing. As a program it is the client; `celery -A celery_noop worker` is the worker."""

from __future__ import annotations

import os

from celery import Celery
from dialogue import CALL, RESULT, serve

app = Celery("noop", broker=os.environ["BENCH_BROKER"], backend=os.environ["BENCH_RESULTS"])
app.conf.update(task_serializer="json", result_serializer="json", accept_content=["json"])


@app.task
def generate(model: str, prompt: str, max_tokens: int, temperature: float) -> dict[str, object]:  # noqa: ARG001 - does nothing
    """Generate nothing."""
    return RESULT


if __name__ == "__main__":
    # Under the name by which the worker imports this module, else the task would be called `__main__.generate`.
    from celery_noop import generate as task

    serve(lambda: task.delay(**CALL), lambda: task.delay(**CALL).get(timeout=60))
