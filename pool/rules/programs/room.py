"""Who gives way for a waiting Program that lacks room. Idle Programs within their TTL never do; those below do.

| who | for whom | when |
|---|---|---|
| idle ones that only a hint keeps, beyond the automatic TTL | whoever lacks KV that they hold | now |
| idle ancestors of a blocking child, farthest first | that child: they cannot go on without it | now |
| running ones, in the order of a repair | one that resumes by force and lacks KV | marked: when idle |

What leaves already, or is marked, is counted first, so that nobody gives way twice for the same need.
"""

from __future__ import annotations

from collections.abc import Sequence

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import LACKING_ROOM, Decision, Reason
from pool.rules.programs.facts import PauseReason, Program, Rank
from pool.rules.programs.holds import given_up, held, is_idle
from pool.rules.programs.repair import Victim, fewest, is_marked, is_running, victims
from pool.rules.programs.tokens import private_tokens

Pause = tuple[str, PauseReason]


class Room:
    """Gathers what gives way on one rank. `going_tokens`: what will be free of it; `places`: active Programs less."""

    def __init__(self, rank: Rank, settings: ProgramSettings) -> None:
        self._rank = rank
        self._buffer_tokens = settings.decode_buffer_tokens
        self._settings = settings
        self._idle = {program.id: program for program in rank.programs if is_idle(program)}
        self.going_tokens = rank.leaving_tokens
        self.places = 0
        self.pauses: list[Pause] = []

    def _pause(self, program: Program) -> None:
        del self._idle[program.id]
        self.going_tokens += private_tokens(program, self._buffer_tokens)
        self.places += 1
        self.pauses.append((program.id, PauseReason.CAPACITY_REPAIR))

    def end_holds(self, decision: Decision, now_ms: int) -> None:
        """Ends holds beyond the automatic TTL, longest first, until a candidate that lacks KV would have it."""
        for hold in given_up(held(self._rank, self._settings, now_ms), decision.lacking_tokens - self.going_tokens):
            self._pause(self._idle[hold.id])

    def pause_ancestors(self, child: Program, decision: Decision) -> None:
        """Pauses those idle Programs that wait for `child`, farthest first, until it would have room."""
        for ancestor in reversed(child.awaited_by):
            if not self._is_lacking(decision):
                return
            if ancestor in self._idle:
                self._pause(self._idle[ancestor])

    def _is_lacking(self, decision: Decision) -> bool:
        """Whether a candidate stays without room. Behind a reservation it does, whatever it needs itself."""
        if decision.reason is Reason.OVERTAKING:
            return True
        if decision.limit_tokens is not None and decision.lacking_tokens > self.going_tokens:
            return True
        crowded = decision.active + 1 - self._settings.max_active_programs_per_target
        return decision.reason is Reason.ACTIVE_PROGRAMS and crowded > self.places

    def marks(self, decision: Decision, now_ms: int) -> tuple[str, ...]:
        """The running Programs that must pause when idle for a forced candidate to have the KV it lacks."""
        marked = (program for program in self._rank.programs if is_marked(program))
        freed = self.going_tokens + sum(private_tokens(program, self._buffer_tokens) for program in marked)
        running = [
            Victim(victim.program, private_tokens(victim.program, self._buffer_tokens))
            for victim in victims(self._rank, self._settings, now_ms, without=set())
            if is_running(victim.program)
        ]
        chosen = fewest(running, decision.lacking_tokens - freed, at_most=len(running))
        return tuple(victim.program.id for victim in chosen)


def make_room(
    rank: Rank,
    refused: Sequence[tuple[Program, Decision]],
    holder: Program | None,
    settings: ProgramSettings,
    now_ms: int,
) -> tuple[tuple[Pause, ...], tuple[str, ...]]:
    """Pauses and marks for candidates that were refused, in the order in which they were; running Programs are marked
    for the `holder` of the reservation alone. Cost: linear in the refused and their ancestors, and once that of a
    repair."""
    room = Room(rank, settings)
    lacking = [(program, decision) for program, decision in refused if decision.reason in LACKING_ROOM]
    without_kv = [(program, decision) for program, decision in lacking if decision.reason is Reason.NO_KV]
    for _, decision in without_kv[:1]:
        room.end_holds(decision, now_ms)
    for program, decision in lacking:
        room.pause_ancestors(program, decision)
    marks: tuple[str, ...] = ()
    for program, decision in without_kv:
        if program is holder and program.waiting is not None and program.waiting.force_ms <= now_ms:
            marks = room.marks(decision, now_ms)
    return tuple(room.pauses), marks
