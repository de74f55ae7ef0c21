"""What an API process is told over its channel, and how it listens.

    TOKEN TOKEN ...                              these jobs have news: read them
    TOKEN FIRST LENGTH LENGTH ... \\n ENTRIES     entries of one job, from index FIRST of its log on, packed, one after
                                                 the other (pool/store/log.py), each of so many bytes

The second form spares its reader a round trip for each token. It is no more than a hint: whoever misses one sees by
FIRST that entries are missing, and reads them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import redis

from pool.store.connection import Client
from pool.store.log import LogEntry, unpack

#: Entries that go with a hint, in bytes. What is larger is read: each waiting process gets all that is sent.
MOST_BYTES = 16_384
#: For the answer to SUBSCRIBE.
SUBSCRIBE_S = 2.0


@dataclass(slots=True)
class Pushed:
    """Entries of a job's log that came with a hint; `first`: index of the first of them."""

    token: str
    first: int
    entries: tuple[LogEntry, ...]


def hint_of(data: bytes) -> Pushed | list[str]:
    """Decode a message: entries, or tokens of jobs that have news. Entries that cannot be decoded are left to whoever
    reads the job."""
    head, line, blobs = data.partition(b"\n")
    words = head.decode("ascii", "replace").split()
    if not line:
        return words
    token, first, *lengths = words
    ends = accumulate(map(int, lengths), initial=0)
    try:
        return Pushed(token, int(first), tuple(unpack(blobs[start:end]) for start, end in pairwise(ends)))
    except ValueError:
        return [token]


class Subscription:
    """One channel over one connection. redis-py's own PubSub takes a dozen calls and five system calls for a message,
    which a process with one stream would spend for each token."""

    def __init__(self, client: Client, channel: str) -> None:
        """Raises what the client library raises when the server is away."""
        self._pool = client.connection_pool
        self._connection = self._pool.get_connection()
        try:
            self._connection.send_command("SUBSCRIBE", channel)
            self._connection.read_response(timeout=SUBSCRIBE_S)
        except BaseException:
            self.close()
            raise

    def message(self, timeout_s: float) -> bytes | None:
        """The next message, None when there was none in time."""
        try:
            message: bytes = self._connection.read_response(timeout=timeout_s, disconnect_on_error=False)[2]
        except redis.exceptions.TimeoutError:
            return None
        return message

    def has_more(self) -> bool:
        """Whether another message is there."""
        return bool(self._connection.can_read(0))

    def close(self) -> None:
        """End it. The connection cannot serve anybody else: messages may still come."""
        self._connection.disconnect()
        self._pool.release(self._connection)
