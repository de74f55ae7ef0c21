"""The broker as genpool consumes it: whatever lies in a list or arrives on a channel, the consumer goes on.

kombu's Redis transport takes a payload off its list and decodes it inside the event loop; what cannot be decoded (no
JSON, no properties, broken base64, ...) raises there and ends the worker. The payload is gone from the list by then, so
nothing is won by dying: here it is dropped, with one line in the log that never holds any of it.

Only the application of `tasks.celery` uses this, through `AMQP.Connection`; brokers other than plain Redis keep their
own transport.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from threading import Lock
from typing import Any

import redis
from celery.app import amqp
from kombu import connection
from kombu.transport import redis as kombu_redis
from kombu.utils import json as kombu_json

log = logging.getLogger("genpool.broker")

#: kombu's reading of JSON: it also revives dates, uuids and the like, and may fail at that.
_loads: Callable[[str], Any] = kombu_json.loads

#: At most one line in this time: a list full of garbage must not become a log full of it.
QUIET_S = 5.0


class Drops:
    """Says in the log that messages were dropped: where, why, how long they were, and a hash to find them again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = Lock()
        self._quiet_until_s = 0.0
        self._unsaid = 0

    def note(self, source: str, why: str, payload: bytes | str | None) -> None:
        """Report one; those in the next QUIET_S are only counted. `source` and `why` hold nothing of the payload."""
        with self._lock:
            if self._clock() < self._quiet_until_s:
                self._unsaid += 1
                return
            self._quiet_until_s = self._clock() + QUIET_S
            unsaid, self._unsaid = self._unsaid, 0
        raw = payload.encode("utf-8", "surrogatepass") if isinstance(payload, str) else payload or b""
        digest = hashlib.sha256(raw).hexdigest()[:12]
        more = f" ({unsaid} more before it)" if unsaid else ""
        log.error("dropped a message from %s: %s; %d bytes, sha256 %s...%s", source, why, len(raw), digest, more)


#: One for the process: all of its consumers share the quiet time.
DROPS = Drops()


class _Client(redis.Redis):
    """Remembers the payload of the last BRPOP, for the channel to describe it when it cannot be read."""

    popped: tuple[bytes, bytes] | None = None

    def parse_response(self, connection: Any, command_name: Any, **options: Any) -> Any:
        """redis-py's reply, kept."""
        base: Any = super()
        reply = base.parse_response(connection, command_name, **options)
        if command_name == "BRPOP" and reply:
            self.popped = reply
        return reply


class Channel(kombu_redis.Channel):
    """kombu's Redis channel, which outlives what it reads."""

    def _get_client(self) -> Any:
        base: Any = super()
        made = base._get_client()
        return _Client if made is redis.Redis else made

    def _brpop_read(self, **options: Any) -> Any:
        """Read and deliver one message of a list."""
        base: Any = super()
        self.client.popped = None
        try:
            return base._brpop_read(**options)
        except Exception as error:
            popped = self.client.popped
            if popped is None or self._is_the_connections(error):
                raise
            queue, payload = popped
            DROPS.note(f"queue {_text(queue).split(self.sep, 1)[0]}", type(error).__name__, payload)
            return True

    def _handle_message(self, client: Any, r: Any) -> Any:
        """A message of a channel (control commands, events). What is no JSON becomes no message: kombu would write it
        into the log."""
        base: Any = super()
        message = base._handle_message(client, r)
        if _text(message["type"]).endswith("message"):
            try:
                _loads(_text(message["data"]))
            except Exception as error:  # noqa: BLE001 - it comes from outside; nothing in it may end the consumer
                DROPS.note("a channel", type(error).__name__, message["data"])
                message["data"] = None
        return message

    def _deliver_fanout_message(self, message: Any, exchange: str) -> Any:
        base: Any = super()
        try:
            return base._deliver_fanout_message(message, exchange)
        except Exception as error:
            if self._is_the_connections(error):
                raise
            DROPS.note(f"exchange {exchange}", type(error).__name__, repr(message))
            return True

    def _is_the_connections(self, error: Exception) -> bool:
        """Whether it tells of the connection. kombu counts KeyError among those; with a message at hand, one comes from
        a field that the message lacks."""
        return isinstance(error, self.connection_errors) and not isinstance(error, KeyError)


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


class Transport(kombu_redis.Transport):
    """kombu's Redis transport with that channel."""

    Channel = Channel


class Connection(connection.Connection):
    """A connection that uses it wherever kombu would use its own."""

    def get_transport_cls(self) -> Any:
        """The transport's class."""
        base: Any = super()
        chosen = base.get_transport_cls()
        return Transport if chosen is kombu_redis.Transport else chosen


class AMQP(amqp.AMQP):
    """Makes the application's connections of that class."""

    Connection = Connection
