"""The connection pool: few connections, whose waiters give up when the server is away, not when it is busy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from pool.store.connection import connect
from pool.store.nodes import node_of

KEY = "gp:{tiny:0}:nothing"


def test_a_busy_pool_serves_everybody(redis_url: str) -> None:
    """Forty callers share one connection for five times as long as each may wait for one: all are served."""
    client = connect(redis_url, max_connections=1, timeout_s=0.2)

    def call(_: int) -> object:
        return client.blpop([KEY], timeout=0.025)

    with ThreadPoolExecutor(40) as callers:
        assert list(callers.map(call, range(40))) == [None] * 40
    client.connection_pool.disconnect()


def test_nobody_waits_for_a_server_that_is_away(redis_url: str) -> None:
    """A command hangs: those behind it give up after their own wait, and connections that failed count for nothing."""
    holder = connect(redis_url, max_connections=1)
    client = connect(redis_url, max_connections=1, timeout_s=0.3)
    client.exists(KEY)
    pause = threading.Thread(target=lambda: node_of(holder, KEY).execute_command("CLIENT", "PAUSE", 3000, "ALL"))
    pause.start()
    pause.join()
    began_s = time.monotonic()

    def call(_: int) -> type[BaseException] | None:
        try:
            client.exists(KEY)
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
            return type(error)
        return None

    with ThreadPoolExecutor(8) as callers:
        found = list(callers.map(call, range(8)))
    assert time.monotonic() - began_s < 2.9
    assert None not in found
    time.sleep(max(0.0, began_s + 3.2 - time.monotonic()))
    for each in (holder, client):
        each.connection_pool.disconnect()


@pytest.mark.parametrize("connections", [1, 3])
def test_it_never_opens_more_than_its_connections(redis_url: str, connections: int) -> None:
    """However many callers there are."""
    client = connect(redis_url, max_connections=connections)
    seen: set[int] = set()
    with ThreadPoolExecutor(20) as callers:
        seen.update(callers.map(lambda _: int(node_of(client, KEY).client_id()), range(100)))
    assert len(seen) <= connections
    client.connection_pool.disconnect()
