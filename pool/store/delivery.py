"""The workers' side of the store: take, begin, append, complete, renew, hand back.

One Delivery belongs to one rank (consumer). Its calls come from that rank's two I/O threads, each with a connection of
its own: the blocking read must not hold up the writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pool.errors import GenerationFailed
from pool.store.handouts import Entry, Handout, Lease, Taken, Write, Written, handout_of, written_of
from pool.store.hints import MOST_BYTES
from pool.store.inputs import fetch
from pool.store.keys import node_channel
from pool.store.log import pack
from pool.store.running import Line, run_many
from pool.store.scripts import Command, script
from pool.store.taking import BATCH, Taking
from pool.store.trials import ALL_ALONE, AMONG_OTHERS, keep

#: Position of the logged tokens in begin's reply.
_LOGGED = 8
#: Length of begin's reply for a job whose input lies in its record; where blocks are named, they follow.
_WHOLE = 14


@dataclass
class Delivery(Taking):
    """The hand-outs of one model to one rank."""

    _line: Line = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
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
        return self._stream(commands)

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
            guess=entry.guess_ms,
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
            lanes=keys.lanes,
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
