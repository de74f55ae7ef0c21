"""What becomes of Programs when ranks come and go. Any process does any of it, and goes on where another one died.

| a rank | what is done |
|---|---|
| whose registration ran out | it is lost: one write fences all that its process had |
| that is away, or another process than before | jobs go back to the pools, idle Programs off their places |
| that is away, while another is up | Programs that wait for it are bound to one that is up |
| that is away for `rank_gone_seconds` | it leaves the ring |
| that is up | entries that were read, whose reply was lost, go back to its stream |
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pool.rules.programs.facts import PauseReason
from pool.rules.programs.tokens import private_tokens
from pool.store.program_records import Stored
from pool.store.program_sights import Sight
from pool.store.program_upkeep import BATCH, ProgramUpkeep
from pool.store.program_views import Outline
from pool.store.programs import ProgramStore
from pool.store.standing import lost_why
from tasks.program_homes import Homes, Newcomer
from tasks.program_log import Teller

#: Steps for one rank in one turn; what is left is the next one's.
STEPS = 10


class RankKeeper:
    """Upkeep of one model's ranks. `lease_ms`: how long a process is taken for living after it has shown so."""

    def __init__(
        self, store: ProgramStore, upkeep: ProgramUpkeep, homes: Homes, teller: Teller, *, lease_ms: int
    ) -> None:
        self._store = store
        self._upkeep = upkeep
        self._homes = homes
        self._teller = teller
        self._lease_ms = lease_ms

    def keep(self, sight: Sight, seen: Sequence[Outline]) -> bool:
        """Do what is to be done for the ranks of a model, as they were seen; whether there is more. Raises
        StateUnavailable."""
        away = [outline for outline in seen if not outline.incarnation or self._lose(outline)]
        up = [outline for outline in seen if outline not in away]
        more = [self._drain_away(outline) for outline in away]
        more += [self._restore(outline) for outline in up]
        if up:
            more += [self._move(outline.rank.id, sight, up) for outline in away]
        for outline in away:
            self._forget(outline.rank.id, sight)
        return any(more)

    def _lose(self, outline: Outline) -> bool:
        """Whether the rank is lost now, because its registration has run out."""
        if outline.is_registered or not self._upkeep.lose(outline.rank.id, outline.incarnation):
            return False
        self._teller.lost(outline.rank.id)
        return True

    def _drain_away(self, outline: Outline) -> bool:
        has_something = bool(outline.rank.active or outline.entries)
        return has_something and not self._drain(outline.rank.id)

    def _restore(self, outline: Outline) -> bool:
        rank = outline.rank.id
        if not outline.is_drained:
            if not self._drain(rank):
                return True
            self._upkeep.note_drained(rank, outline.incarnation)
        if outline.entries:
            self._upkeep.requeue_unbegun(rank, self._lease_ms)
        return False

    def _drain(self, rank: str) -> bool:
        """Whether nothing is left of what former processes had."""
        for _ in range(STEPS):
            moved = self._upkeep.drained(rank)
            why = lost_why(self._store.client, self._store.keys, rank) if moved else PauseReason.HEALTH_FAILOVER
            for program in dict.fromkeys(moved):
                self._teller.paused(program, rank, why)
            if not moved:
                return True
        return False

    def _move(self, rank: str, sight: Sight, up: list[Outline]) -> bool:
        """Programs that wait for a rank that is away are bound to others; `up` is kept as they fill up."""
        to: Counter[str] = Counter()
        more = True
        for _ in range(STEPS):
            before = to.total()
            waiting = self._upkeep.waiting_at(rank)
            for program in waiting:
                stored = self._store.read(program)
                if stored is not None and (other := self._rebind(stored, rank, sight, up)):
                    to[other] += 1
            more = len(waiting) == BATCH and to.total() > before
            if not more:
                break
        for other, count in to.items():
            self._teller.moved(rank, other, count)
        return more

    def _rebind(self, stored: Stored, rank: str, sight: Sight, up: list[Outline]) -> str:
        """The rank that it waits for now, "" where nothing has changed."""
        program = stored.program()
        newcomer = Newcomer(stored.text("key") or stored.text("name"), program.context_tokens, stored.id)
        other, _ = self._homes.among(newcomer, list(sight.members), up)
        if self._store.rebind(stored.id, rank, other, "failover") is None:
            return ""
        needed = private_tokens(program, self._store.settings.decode_buffer_tokens)
        for at, outline in enumerate(up):
            if outline.rank.id == other:
                fuller = replace(outline.rank, ledger_tokens=outline.rank.ledger_tokens + needed)
                up[at] = replace(outline, rank=fuller, waiting=outline.waiting + 1)
        return other

    def _forget(self, rank: str, sight: Sight) -> None:
        gone_ms = round(self._store.settings.rank_gone_seconds * 1000)
        if rank in sight.members and sight.now_ms - sight.members[rank] < gone_ms:
            return
        if self._upkeep.forget(rank, gone_ms) == "gone" and rank in sight.members:
            self._teller.gone(rank)
