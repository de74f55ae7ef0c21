"""The workers' side of the store for Programs: the stream of one rank, and the fence of places.

As Delivery, but every attempt and every end also checks that the job's Program still has its place with this process.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.entries import drop, token_of
from pool.store.handouts import Entry, Handout, Lease, Write, Written, written_of
from pool.store.log import pack
from pool.store.placements import NOTHING, Placement, placement_of
from pool.store.program_keys import RankKeys
from pool.store.rebuilding import heal, rebuild_rank
from pool.store.running import run_many
from pool.store.scripts import Command, script
from pool.store.trials import AMONG_OTHERS


@dataclass
class ProgramDelivery(Delivery):
    """Program work of one model for one rank. `incarnation`: of this process, as it is seated."""

    incarnation: str = ""
    _placements: dict[str, Placement] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.keys: RankKeys = RankKeys(f"{self.model}:{self.shard}", self.rank)

    def _entries(self, items: Iterable[tuple[bytes, dict[bytes, bytes]]]) -> list[Entry]:
        named = [
            (entry, token_of(fields) if b"program" in fields else None, fields.get(b"program", b"").decode())
            for entry, fields in items
        ]
        drop(self.reader, self.keys, [entry for entry, token, _ in named if token is None])
        return [
            Entry(entry.decode(), token, secrets.token_hex(8), of) for entry, token, of in named if token is not None
        ]

    def _read_new(self, server: Client, room: int, block_ms: int) -> list[Entry]:
        found = self._take(server, [self.keys.queue], room, block_ms, moves=False)
        return self._entries(found[0][1]) if found else []

    def heal(self) -> None:
        """Make the rank's stream and its group, from the jobs that were sent there; nothing while both are there."""
        heal(self.writer, self.keys, lambda: rebuild_rank(self.writer, self.keys))

    def begin(self, entries: Sequence[Entry], *, alone: int = AMONG_OTHERS) -> Iterator[Handout | Entry]:
        """As Delivery's. Jobs whose Program no longer has its place here are left to whoever takes over the place."""
        for found in super().begin(entries, alone=alone):
            if isinstance(found, Handout):
                found.lease.placement = self._placements.pop(found.lease.token, None)
            yield found

    def _run_begins(self, entries: Sequence[Entry], commands: Iterable[Command]) -> Iterator[list[Any]]:
        for entry, reply in zip(entries, self._stream(commands), strict=True):
            if reply[0] != b"ok" or not entry.program:
                yield reply
                continue
            self._placements[entry.token] = placement_of(entry.program, self.rank, reply)
            yield reply[1]

    def _begin_command(self, entry: Entry, alone: int) -> Command:
        return script("program_begin")(
            job=self.keys.job(entry.token),
            queue=self.keys.queue,
            leases=self.keys.leases,
            timers=self.keys.timers,
            model=self.keys.model,
            program=self.keys.record(entry.program),
            book=self.keys.place(self.rank)["book"],
            token=entry.token,
            entry=entry.id,
            rank=self.rank,
            incarnation=self.incarnation,
            nonce=entry.nonce,
            lease=self.lease_ms,
            alone=alone,
        )

    def write_each(self, writes: Iterable[Write]) -> Iterator[Written]:
        """As Delivery's. An end that has to declare another key first is answered `resend`: the next try does."""
        sent: deque[Write] = deque()

        def commands() -> Iterator[Command]:
            for write in writes:
                sent.append(write)
                yield self._command(write)

        for reply in self._line.run_stream(commands()):
            yield self._answer(sent.popleft(), reply)

    def _answer(self, write: Write, reply: Sequence[Any]) -> Written:
        placement = write.lease.placement
        if placement is None or reply[0] not in (b"front", b"moved"):
            return written_of(reply)
        if reply[0] == b"moved":
            # A place that is elsewhere is none of ours.
            return Written("stale", detail="running")
        placement.front = reply[1].decode()
        return Written("resend", log_end=int(reply[2]))

    def _command(self, write: Write) -> Command:
        keys, lease, placement = self.keys, write.lease, write.lease.placement
        if write.ending is None or placement is None:
            return super()._command(write)
        outcome = write.ending.outcome or NOTHING
        return script("program_complete")(
            keys=keys.ended(lease.token, self.rank),
            lanes=keys.lanes,
            **keys.of(placement.program),
            at=keys.place(self.rank),
            front=keys.job(placement.front or lease.token),
            coefficients=keys.coefficients,
            blocks=[keys.input(block) for block in lease.blocks],
            token=lease.token,
            attempt=lease.attempt,
            nonce=lease.nonce,
            first_seq=write.first_seq,
            count=write.count,
            entries=[pack(entry) for entry in write.entries],
            state=write.ending.state,
            ttl=self.result_ttl_ms,
            fields=write.ending.fields(),
            outcome=outcome.fields(),
            sample=outcome.packed_sample(),
            id=placement.program,
            rank=self.rank,
            front_token=placement.front,
        )

    def give_back(self, entries: Sequence[Entry]) -> None:
        """As Delivery's."""
        run_many(
            self.reader, [self._return(entry.token, "", entry.nonce, entry.id, entry.program) for entry in entries]
        )

    def hand_back(self, leases: Sequence[Lease]) -> int:
        """As Delivery's."""
        commands = [
            self._return(lease.token, str(lease.attempt), lease.nonce, "", lease.placement.program)
            for lease in leases
            if lease.placement is not None
        ]
        return sum(reply[0] == b"ok" for reply in run_many(self.writer, commands))

    def _return(self, token: str, attempt: str, nonce: str, entry: str, program: str) -> Command:
        keys = self.keys
        return script("program_hand_back")(
            job=keys.job(token),
            leases=keys.leases,
            timers=keys.timers,
            tally=keys.tally,
            **keys.of(program),
            at=keys.place(self.rank),
            token=token,
            attempt=attempt,
            nonce=nonce,
            entry=entry,
            id=program,
            rank=self.rank,
        )
