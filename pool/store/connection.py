"""Connections to the state server, made in one place because redis-py's defaults are wrong for us.

redis-py 8 sets a 5 s socket timeout (shorter than our blocking reads) and re-sends commands on its own; a re-sent write
may run twice. So every client here has an explicit timeout and no silent retry: what is safe to repeat is repeated by
the caller who knows that it is. RESP2 is pinned because reply shapes differ between protocols.
"""

from __future__ import annotations

import queue
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from pool.errors import StateUnavailable
from pool.store.cluster_client import cluster_client
from pool.store.slot_map import cluster_address

#: A `redis.Redis` of bytes. redis-py types each reply as the union of both protocols' and both decodings' shapes, which
#: fits no caller; replies are decoded next to the command that asked for them.
Client: TypeAlias = Any

#: A command that has no reply after this long failed; no verb comes near it on a healthy server.
COMMAND_TIMEOUT_S = 5.0


class _FreeConnections(queue.LifoQueue[Any]):
    """The free connections of a pool. Busy is not away: whoever waits for one gives up only when none came back in
    working order during all of its timeout, however many others wait."""

    _came_back_s = 0.0

    def _put(self, item: Any) -> None:
        if item is not None and item.is_connected:
            self._came_back_s = time.monotonic()
        super()._put(item)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """As LifoQueue's."""
        while True:
            asked_s = time.monotonic()
            try:
                return super().get(block, timeout)
            except queue.Empty:
                if not block or self._came_back_s < asked_s:
                    raise


def connect(
    url: str, *, max_connections: int = 8, timeout_s: float = COMMAND_TIMEOUT_S, read_timeout_s: float | None = None
) -> Client:
    """A client whose callers wait for a free connection instead of opening ever more.

    `timeout_s`: for a free connection (while none comes back), for connecting, and for a reply; `read_timeout_s`: for
    a reply, if that takes longer. It must exceed every BLOCK the client uses. `max_connections`: to each node, where
    `url` names a cluster.
    """

    def pool(server_url: str) -> redis.ConnectionPool:
        return redis.BlockingConnectionPool.from_url(
            server_url,
            max_connections=max_connections,
            timeout=timeout_s,
            queue_class=_FreeConnections,
            socket_timeout=timeout_s if read_timeout_s is None else read_timeout_s,
            socket_connect_timeout=timeout_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            health_check_interval=0,
        )

    cluster = cluster_address(url)
    return redis.Redis.from_pool(pool(url)) if cluster is None else cluster_client(cluster, pool)


#: First words of error replies that say nothing of the command: the server serves nobody, or takes no writes, for now.
_UNABLE = re.compile(r"(NOREPLICAS|MISCONF|BUSY|UNKILLABLE|TRYAGAIN) ")
_UNABLE_TYPES = (
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.MasterDownError,
    redis.exceptions.TryAgainError,
)


def unable(error: redis.exceptions.ResponseError) -> bool:
    """Whether an error reply only says that the server cannot serve at the moment: the same command may pass later."""
    return isinstance(error, _UNABLE_TYPES) or _UNABLE.match(str(error)) is not None


@contextmanager
def state_errors() -> Iterator[None]:
    """Translate what the client library raises when the server is away, read-only, full or otherwise unable."""
    try:
        yield
    except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError) as error:
        raise StateUnavailable("The state server cannot be reached.") from error
    except redis.exceptions.AskError as error:
        raise StateUnavailable(
            "The state server is a node of a cluster: state.url must name it as redis+cluster://HOST:PORT."
        ) from error
    except redis.exceptions.ResponseError as error:
        if not unable(error):
            raise
        raise StateUnavailable("The state server takes no writes at the moment.") from error
