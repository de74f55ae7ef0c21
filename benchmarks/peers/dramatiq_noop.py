"""dramatiq on Redis: an actor that does nothing. As a program, the client; the worker is `dramatiq dramatiq_noop`."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.peers.dialogue import CALL, RESULT, serve

broker = RedisBroker(url=os.environ["BENCH_BROKER"])
broker.add_middleware(Results(backend=RedisBackend(url=os.environ["BENCH_RESULTS"])))
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True, queue_name="generations")
def generate(model: str, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:  # noqa: ARG001 - does nothing
    """Generate nothing."""
    return RESULT


if __name__ == "__main__":
    serve(lambda: generate.send(**CALL), lambda: generate.send(**CALL).get_result(block=True, timeout=60_000))
