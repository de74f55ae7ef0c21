"""How a rank gets at work: its next jobs move from their lanes into the model's stream, and from there into its pending
list. Callers never see a stream."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from pool.store import rebuilding
from pool.store.connection import Client
from pool.store.entries import drop, sorted_out
from pool.store.handouts import Entry
from pool.store.keys import GROUP, ModelKeys
from pool.store.nodes import learn
from pool.store.reading import Reading
from pool.store.running import run_stream
from pool.store.scripts import Command, script

#: A script touches at most this many items; longer work continues in further calls.
BATCH = 100
#: How long a read waits while its slot is on the way to another node of a cluster.
MOVING_BLOCK_MS = 100
#: How often a rank takes that was given nothing.
TAKE_TRIES = 2
#: How much longer than it waits a rank is noted as waiting.
STANDS_MS = 2000

#: A stream, and its entries with their fields.
Batch = tuple[str, list[tuple[bytes, dict[bytes, bytes]]]]


@dataclass
class Taking:
    """What one rank reads of one model. `reader` must be a client of one connection (to a node), for `unblock`."""

    reader: Client
    writer: Client
    model: str
    rank: str
    lease_ms: int
    result_ttl_ms: int
    shard: int = 0
    keys: ModelKeys = field(init=False)
    _reading: Reading = field(init=False)
    #: Whether the state may still say that this rank waits for work.
    _is_noted: bool = field(init=False, default=False)
    _model_queue: str = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ModelKeys(f"{self.model}:{self.shard}")
        self._model_queue = self.keys.queue
        self._reading = Reading(self.reader, self.writer, self._model_queue)

    def heal(self) -> None:
        """Make the stream and its group, from the index; nothing while both are there."""
        rebuilding.heal(self.writer, self.keys)

    def read(self, room: int, block_ms: int) -> list[Entry]:
        """Read at most `room` (>= 1) entries into this rank's pending list, waiting up to `block_ms`.

        A stream or group that was lost is made again from the index, and nothing is read this time. On a new connection
        the pending list comes first: it may hold entries that got lost on the old one. What runs does not begin again.
        """
        try:
            if self._reading.is_new():
                pending = self._pending()
                self._reading.settle()
                # A read beside a verb that is loaded first would come before it.
                self._reading.server.script_load(script("take").source)
                if pending:
                    return pending
            return self._read_new(self._reading.server, room, block_ms)
        except redis.exceptions.AskError as error:
            # A read that follows its stream to another node cannot be woken there, and so must not wait.
            learn(self.reader, error)
            return self._read_new(self.reader, room, MOVING_BLOCK_MS)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith(("NOGROUP", "UNBLOCKED")):
                raise
            if str(error).startswith("NOGROUP"):
                # It may have cost the connection; and what was pending is lost with the group.
                self._reading.forget()
            self.heal()
            return []
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            self._reading.forget()
            raise

    def _read_new(self, server: Client, room: int, block_ms: int) -> list[Entry]:
        """The next jobs, or the first that comes."""
        found = self._take(server, [self.keys.queue], room, block_ms)
        return self._entries(found[0][1]) if found else []

    def _take(
        self, server: Client, streams: Sequence[str], count: int, block_ms: int | None, *, moves: bool = True
    ) -> list[Batch]:
        """At most `count` entries of each stream. `moves`: the model's own is one of them, into which the next jobs are
        moved from their lanes; `block_ms`: how long to wait for an entry, None: not at all.

        One that waits is noted, so that a submit wakes it; the note goes with what it does next. Another rank may read
        what was moved for this one, or the server knew the verb no longer: then once more.
        """
        count = min(count, BATCH)
        names = [*streams, *(">" for _ in streams)]
        read: Command = ["XREADGROUP", "GROUP", GROUP, self.rank, "COUNT", count, "STREAMS", *names]
        commands = [self._take_command(count, block_ms), read] if moves else [read]
        for _ in range(TAKE_TRIES):
            *noted, found = run_stream(self.reader, commands, key=self._model_queue)
            self._is_noted = self._is_noted or noted == [1]
            if found or noted != [0]:
                break
        if found or block_ms is None or noted == [0]:
            return [(stream.decode(), _named(items)) for stream, items in found or ()]
        reply = server.xreadgroup(GROUP, self.rank, dict.fromkeys(streams, ">"), count=count, block=block_ms)
        return [(stream.decode(), items) for stream, items in reply or ()]

    def _take_command(self, room: int, block_ms: int | None) -> Command:
        return script("take")(
            queue=self._model_queue,
            hungry=self.keys.hungry,
            lanes=self.keys.lanes,
            rank=self.rank,
            room=room,
            stand=0 if block_ms is None else block_ms + STANDS_MS,
        )

    def _pending(self) -> list[Entry]:
        """This rank's pending list; entries that were deleted from the stream are left out."""
        entries: list[Entry] = []
        last = b"0"
        while True:
            ((_, page),) = self.reader.xreadgroup(GROUP, self.rank, {self.keys.queue: last}, count=BATCH)
            entries += self._entries(item for item in page if item[1])
            if len(page) < BATCH:
                return entries
            last = page[-1][0]

    def _entries(self, items: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[Entry]:
        """The entries that were read; what names no job is dropped."""
        entries, nameless = sorted_out(items)
        drop(self.reader, self.keys, nameless)
        return entries

    def unblock(self) -> None:
        """Wake a blocked `take`; it then returns nothing. Called from another thread than its own."""
        self._reading.unblock()

    def _stream(self, commands: Iterable[Command]) -> Iterator[Any]:
        """`run_stream` on the reader's connection; before all else it is told that this rank waits no longer."""
        if not self._is_noted:
            return run_stream(self.reader, commands, key=self.keys.queue)
        self._is_noted = False
        replies = run_stream(
            self.reader, itertools.chain([["ZREM", self.keys.hungry, self.rank]], commands), key=self.keys.queue
        )
        return itertools.islice(replies, 1, None)


def _named(items: Iterable[tuple[bytes, list[bytes]]]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries as the server gives them, in the form in which the client's own command does."""
    return [(entry, dict(zip(fields[::2], fields[1::2], strict=True))) for entry, fields in items]
