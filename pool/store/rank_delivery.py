"""Both streams of a rank as one: the model's, which it shares with others, and its own, of Programs.

An entry says by `program`, a lease by `placement`, whose it is; each is handled by its side's verbs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Entry, Lease, Write, Written
from pool.store.program_delivery import ProgramDelivery
from pool.store.scripts import Command


@dataclass
class RankDelivery(ProgramDelivery):
    """A ProgramDelivery that takes the model's other jobs too.

    Neither kind starves the other: as long as there is room for two, each gets half of it in every read, and the last
    place goes to each in turn, or to whoever comes first while nobody waits. A read that waits holds no place.
    `seated`: whether this process has the rank's place, and reads its stream.
    """

    seated: bool = True
    plain: Delivery = field(init=False)
    _programs_first: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.plain = Delivery(
            reader=self.reader,
            writer=self.writer,
            model=self.model,
            rank=self.rank,
            lease_ms=self.lease_ms,
            result_ttl_ms=self.result_ttl_ms,
            shard=self.shard,
        )

    # -- reading ----------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """As Delivery's, both streams."""
        super().heal()
        self.plain.heal()

    def _pending(self) -> list[Entry]:
        return [*super()._pending(), *self.plain._pending()]

    def _read_new(self, server: Client, room: int, block_ms: int) -> list[Entry]:
        if not self.seated:
            return self._read_from(server, [self.plain], room, block_ms)
        if room == 1:
            self._programs_first = not self._programs_first
            found = self._read_from(server, [self if self._programs_first else self.plain], 1, None)
            if found:
                return found
        # So many of each; a read that has waited ends with what came into one of them.
        return self._read_from(server, [self, self.plain], max(room // 2, 1), block_ms)

    def _read_from(self, server: Client, sides: Sequence[Delivery], count: int, block_ms: int | None) -> list[Entry]:
        by_queue = {side.keys.queue: side for side in sides}
        entries: list[Entry] = []
        for queue, items in self._take(server, list(by_queue), count, block_ms, moves=self.plain in sides):
            entries += by_queue[queue]._entries(items)
        return entries

    # -- one or the other -------------------------------------------------------------------------------------------

    def _begin_command(self, entry: Entry, alone: int) -> Command:
        return super()._begin_command(entry, alone) if entry.program else self.plain._begin_command(entry, alone)

    def _command(self, write: Write) -> Command:
        return self.plain._command(write) if write.lease.placement is None else super()._command(write)

    def give_back(self, entries: Sequence[Entry]) -> None:
        """As Delivery's."""
        self.plain.give_back([entry for entry in entries if not entry.program])
        super().give_back([entry for entry in entries if entry.program])

    def hand_back(self, leases: Sequence[Lease]) -> int:
        """As Delivery's."""
        return super().hand_back(leases) + self.plain.hand_back([lease for lease in leases if lease.placement is None])

    def keep(self, entries: Iterable[Entry]) -> list[Entry]:
        """As Delivery's; those of Programs come first."""
        kept = list(entries)
        of_programs = super().keep([entry for entry in kept if entry.program])
        return of_programs + self.plain.keep([entry for entry in kept if not entry.program])

    def renew(self, leases: Sequence[Lease]) -> list[Written]:
        """As Delivery's."""
        mine = [lease for lease in leases if lease.placement is not None]
        others = [lease for lease in leases if lease.placement is None]
        answers = [*zip(mine, super().renew(mine), strict=True), *zip(others, self.plain.renew(others), strict=True)]
        by_token = {lease.token: answer for lease, answer in answers}
        return [by_token[lease.token] for lease in leases]
