"""taskiq on Redis streams: a task that does nothing. As a program it is the client; `taskiq worker taskiq_noop:broker`
is the worker."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from benchmarks.peers.dialogue import CALL, RESULT, serve

broker = RedisStreamBroker(os.environ["BENCH_BROKER"]).with_result_backend(
    RedisAsyncResultBackend(os.environ["BENCH_RESULTS"])
)
#: How often the client looks for a result: taskiq has no push.
POLL_S = 0.001


@broker.task(task_name="generate")
async def generate(model: str, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:  # noqa: ARG001 - does nothing
    """Generate nothing."""
    return RESULT


async def enqueue() -> None:
    """Submit one job."""
    await generate.kiq(**CALL)


async def round_trip() -> None:
    """Submit one job and wait for its result."""
    task = await generate.kiq(**CALL)
    await task.wait_result(check_interval=POLL_S, timeout=60)


if __name__ == "__main__":
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(broker.startup())
    serve(lambda: loop.run_until_complete(enqueue()), lambda: loop.run_until_complete(round_trip()))
