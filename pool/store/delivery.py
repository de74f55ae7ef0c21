"""The workers' side of the store: take, begin, append, complete, renew, hand back.

One Delivery belongs to one rank (consumer). Its calls come from that rank's two I/O threads, each with a connection of
its own: the blocking read must not hold up the writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from pool.errors import GenerationFailed
from pool.store import rebuilding
from pool.store.connection import Client
from pool.store.entries import drop, sorted_out
from pool.store.handouts import Entry, Handout, Lease, Taken, Write, Written, handout_of, written_of
from pool.store.hints import MOST_BYTES
from pool.store.inputs import fetch
from pool.store.keys import GROUP, ModelKeys, node_channel
from pool.store.log import pack
from pool.store.nodes import learn
from pool.store.reading import Reading
from pool.store.running import Line, run_many, run_stream
from pool.store.scripts import Command, script
from pool.store.trials import ALL_ALONE, AMONG_OTHERS, keep

#: Position of the logged tokens in begin's reply.
_LOGGED = 8
#: Length of begin's reply for a job whose input lies in its record; where blocks are named, they follow.
_WHOLE = 14
#: How long a read waits while its slot is on the way to another node of a cluster.
MOVING_BLOCK_MS = 100
#: A script touches at most this many items; longer work continues in further calls.
BATCH = 100


@dataclass
class Delivery:
    """The hand-outs of one model to one rank. `reader` is a client of one connection (to a node), for `unblock`."""

    reader: Client
    writer: Client
    model: str
    rank: str
    lease_ms: int
    result_ttl_ms: int
    shard: int = 0
    keys: ModelKeys = field(init=False)
    _reading: Reading = field(init=False)
    _line: Line = field(init=False)

    def __post_init__(self) -> None:
        self.keys = ModelKeys(f"{self.model}:{self.shard}")
        self._reading = Reading(self.reader, self.writer, self.keys.queue)
        self._line = Line(self.writer, self.keys.queue)

    def close(self) -> None:
        """Close the connections."""
        self._line.close()
        self.reader.connection_pool.disconnect()
        self.writer.connection_pool.disconnect()

    def take(self, room: int, block_ms: int) -> Taken:
        """Read at most `room` (>= 1) jobs, waiting up to `block_ms`, and begin each; all at once."""
        taken = Taken()
        for found in self.begin(self.read(room, block_ms)):
            if isinstance(found, Handout):
                taken.handouts.append(found)
            else:
                taken.alone.append(found)
        return taken

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
            self.heal()
            return []
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            self._reading.forget()
            raise

    def _read_new(self, server: Client, room: int, block_ms: int) -> list[Entry]:
        """What nobody has read yet."""
        reply = server.xreadgroup(GROUP, self.rank, {self.keys.queue: ">"}, count=min(room, BATCH), block=block_ms)
        return self._entries(reply[0][1]) if reply else []

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

    def begin(self, entries: Sequence[Entry], *, alone: int = AMONG_OTHERS) -> Iterator[Handout | Entry]:
        """Begin the jobs of these entries, one after the other as they are asked for.

        Yields a hand-out for each that began, and the entry of each that is on trial and needs this rank emptier than
        `alone` says; the rest went elsewhere meanwhile. When the connection fails, begin again what was not yielded:
        for the server it may have begun.
        """
        commands = (self._begin_command(entry, alone) for entry in entries)
        unread: list[tuple[Entry, list[Any]]] = []
        for entry, reply in zip(entries, self._run_begins(entries, commands), strict=True):
            if reply[0] == b"alone":
                yield entry
            elif reply[0] == b"ok" and (reply[_LOGGED] or len(reply) > _WHOLE):
                unread.append((entry, reply))
            elif reply[0] == b"ok":
                yield handout_of(entry, reply, [])
        for entry, reply in unread:
            log = self.reader.lrange(self.keys.log(entry.token), 0, -1) if reply[_LOGGED] else []
            handout = handout_of(entry, reply[:_WHOLE], log)
            if len(reply) > _WHOLE:
                self._read_input(handout, *reply[_WHOLE:])
            yield handout

    def _run_begins(self, entries: Sequence[Entry], commands: Iterable[Command]) -> Iterator[list[Any]]:  # noqa: ARG002
        """The replies of these commands, which begin these entries."""
        return run_stream(self.reader, commands, key=self.keys.queue)

    def begin_alone(self, entry: Entry, alone: int = ALL_ALONE) -> Handout | Entry | None:
        """Begin a job on trial by itself. The entry again: the rank must be emptier; None: it went elsewhere."""
        return next(iter(list(self.begin([entry], alone=alone))), None)

    def keep(self, entries: Iterable[Entry]) -> list[Entry]:
        """Hold on to entries that were read and cannot begin yet; those that are still this rank's, in order."""
        return keep(self.reader, self.keys, self.rank, entries)

    def _read_input(self, handout: Handout, blocks: bytes, prompt_blocks: bytes) -> None:
        """Complete a hand-out whose input lies in blocks: the prompt, or else the input as it was given."""
        ids, of_prompt = blocks.decode().split(), int(prompt_blocks)
        handout.lease.blocks = tuple(ids)
        try:
            content = fetch(self.reader, self.keys, handout.tenant, ids[:of_prompt] if of_prompt else ids)
        except GenerationFailed:
            handout.lost = True
        else:
            handout.prompt, handout.input = (content, b"") if of_prompt else (b"", content)

    def _begin_command(self, entry: Entry, alone: int) -> Command:
        return script("begin")(
            job=self.keys.job(entry.token),
            queue=self.keys.queue,
            leases=self.keys.leases,
            timers=self.keys.timers,
            model=self.keys.model,
            token=entry.token,
            entry=entry.id,
            rank=self.rank,
            nonce=entry.nonce,
            lease=self.lease_ms,
            alone=alone,
        )

    def give_back(self, entries: Sequence[Entry]) -> None:
        """Give unbegun entries back to the queue, and those whose begin was never answered. Costs the jobs nothing."""
        commands = [
            script("requeue_unbegun")(
                job=self.keys.job(entry.token),
                queue=self.keys.queue,
                leases=self.keys.leases,
                timers=self.keys.timers,
                tally=self.keys.tally,
                token=entry.token,
                entry=entry.id,
                idle=0,
                nonce=entry.nonce,
            )
            for entry in entries
        ]
        run_many(self.reader, commands)

    def unblock(self) -> None:
        """Wake a blocked `take`; it then returns nothing. For any thread."""
        self._reading.unblock()

    def write(self, writes: Iterable[Write]) -> list[Written]:
        """Append to logs and end jobs. Safe to repeat after a connection failure. Who follows a job is told of what is
        appended; of ends, `hint` tells."""
        return list(self.write_each(writes))

    def write_each(self, writes: Iterable[Write]) -> Iterator[Written]:
        """As `write`, but each write is built, and each answer given, while the server works on others. Nothing happens
        unless the answers are asked for."""
        return map(written_of, self._line.run_stream(map(self._command, writes)))

    def _command(self, write: Write) -> Command:
        keys, lease = self.keys, write.lease
        entries = [pack(entry) for entry in write.entries]
        if write.ending is None:
            return script("append")(
                job=keys.job(lease.token),
                log=keys.log(lease.token),
                token=lease.token,
                attempt=lease.attempt,
                nonce=lease.nonce,
                first_seq=write.first_seq,
                count=write.count,
                entries=entries,
                channels=node_channel(""),
                most=MOST_BYTES,
            )
        return script("complete")(
            **keys.ending(lease.token, lease.blocks),
            token=lease.token,
            attempt=lease.attempt,
            nonce=lease.nonce,
            first_seq=write.first_seq,
            count=write.count,
            entries=entries,
            state=write.ending.state,
            ttl=self.result_ttl_ms,
            fields=write.ending.fields(),
        )

    def hint(self, news: dict[str, list[str]]) -> None:
        """Tell each node, in one message, which job tokens have news (node -> tokens)."""
        if news:
            pipe = self.writer.pipeline(transaction=False)
            for node, tokens in news.items():
                pipe.publish(node_channel(node), " ".join(tokens))
            pipe.execute()

    def renew(self, leases: Sequence[Lease]) -> list[Written]:
        """Extend leases. For each, in order: `ok` with the nodes to hint to, or `stale` with the job's state."""
        answers: list[Written] = []
        for start in range(0, len(leases), BATCH):
            part = leases[start : start + BATCH]
            command = script("renew")(
                leases=self.keys.leases,
                queue=self.keys.queue,
                jobs=[self.keys.job(lease.token) for lease in part],
                rank=self.rank,
                lease=self.lease_ms,
                tokens=[lease.token for lease in part],
                attempts=[lease.attempt for lease in part],
                nonces=[lease.nonce for lease in part],
            )
            for item in run_many(self.writer, [command])[0]:
                lost = isinstance(item, list)
                answers.append(
                    Written("stale", detail=item[0].decode()) if lost else Written("ok", watch=item.decode())
                )
        return answers

    def hand_back(self, leases: Sequence[Lease]) -> int:
        """Give begun jobs back to the queue, with their logged tokens; those no longer ours are left alone. Returns how
        many went back."""
        commands = [
            script("hand_back")(
                job=self.keys.job(lease.token),
                queue=self.keys.queue,
                leases=self.keys.leases,
                timers=self.keys.timers,
                tally=self.keys.tally,
                token=lease.token,
                attempt=lease.attempt,
                nonce=lease.nonce,
            )
            for lease in leases
        ]
        return sum(reply[0] == b"ok" for reply in run_many(self.writer, commands)) if commands else 0
