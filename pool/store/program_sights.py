"""What there is to do for the Programs of models, in one trip: every process asks that all the time, for ever."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pool.store.connection import Client, state_errors
from pool.store.program_keys import ProgramKeys

#: Ranks of which a sight tells that they changed, longest ago first.
MOST_DIRTY = 1000
#: Commands of a look at one model.
LOOKS = 4


@dataclass(frozen=True, slots=True)
class Sight:
    """One model at `now_ms`, the state server's time. `members`: the ranks of the ring, with when they were last seen;
    `dirty`: ranks where something has changed that nobody has planned for; `due_in_ms`: in how much time the first
    timer of a Program is due, 0 or less: it is; None without one."""

    members: Mapping[str, int]
    dirty: tuple[str, ...]
    due_in_ms: int | None
    now_ms: int

    @property
    def is_due(self) -> bool:
        """Whether a timer of a Program is due."""
        return self.due_in_ms is not None and self.due_in_ms <= 0

    @property
    def is_quiet(self) -> bool:
        """Whether there is nothing at all to look after."""
        return not self.members and not self.dirty and not self.is_due

    @property
    def ranks(self) -> list[str]:
        """All ranks that anything is known of."""
        return list(dict.fromkeys([*self.members, *self.dirty]))


def sights(client: Client, models: Sequence[ProgramKeys]) -> list[Sight]:
    """These models, in order. Raises StateUnavailable."""
    pipe = client.pipeline(transaction=False)
    for keys in models:
        pipe.zrange(keys.members, 0, -1, withscores=True)
        pipe.zrange(keys.dirty, 0, MOST_DIRTY - 1)
        pipe.zrange(keys.program_timers, 0, 0, withscores=True)
        pipe.time()
    with state_errors():
        replies = pipe.execute()
    found = []
    for start in range(0, len(replies), LOOKS):
        members, dirty, timers, clock = replies[start : start + LOOKS]
        now_ms = clock[0] * 1000 + clock[1] // 1000
        found.append(
            Sight(
                {rank.decode(): int(seen_ms) for rank, seen_ms in members},
                tuple(rank.decode() for rank in dirty),
                next((int(due_ms) - now_ms for _, due_ms in timers), None),
                now_ms,
            )
        )
    return found
