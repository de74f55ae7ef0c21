"""How the replicas of a model fill evenly: each tells how full it is, and gives back what emptier ones should have.

Plain work is bound late: it lies in the model's stream until a replica with a free slot reads it. The state server
serves blocked readers in the order in which they blocked, whatever each has in flight, and one that comes back from
what it has just begun takes all that has gathered. So a replica that has read looks, in the script that would give the
work away (`lua/share.lua`), whether others have less in flight for their slots.

A replica that is told to be emptier and does not come, being dead, stopped or busy, costs a job no more than MOST_HOPS
hops and pauses: then whoever has it begins it. A replica with free slots never waits for longer than a pause.

A job whose entry names a session goes to the replica that pool/rules/affinity.py chooses for it, over what all have
told; whoever else reads it gives it back. There is no way to wake a certain replica, so the job passes those that
blocked before that one, each within a millisecond or so. Nobody gives the same job back more than MOST_RETURNS times,
since whoever reads it again knows that it has passed all who wait; after FARTHEST hops it is as one without a session.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from pool.rules.affinity import Load, chosen
from pool.store.connection import Client
from pool.store.handouts import Entry
from pool.store.keys import ModelKeys
from pool.store.running import run
from pool.store.scripts import script

#: How often a job may go back to the stream before somebody begins it.
MOST_HOPS = 3
#: How often a replica gives back the same job because it is another's by its session, and how often all of them do.
MOST_RETURNS = 2
FARTHEST = 32
#: Of so many jobs a replica remembers that it gave them back.
REMEMBERED = 1000
#: How long whoever gave work back leaves it to others before it reads again.
PAUSE_S = 0.005
#: What a replica has told is forgotten when none of the model tells anything for so long.
TOLD_MS = 3_600_000
#: What has not changed is told again after so long: it may have been forgotten.
TELL_AGAIN_S = 10.0


@dataclass
class Sharing:
    """One replica's. `has_others`: whether other replicas serve the model; while there are none, nothing is told or
    asked."""

    model: str
    rank: str
    has_others: Callable[[], bool] = lambda: False
    keys: ModelKeys = field(init=False)
    _told: tuple[int, int] | None = field(init=False, default=None)
    _tell_again_s: float = field(init=False, default=0.0)
    _has_left: bool = field(init=False, default=False)
    #: How often this replica gave back a job with a session, by its token.
    _returns: dict[str, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = ModelKeys(f"{self.model}:0")

    def tell(self, client: Client, in_flight: int, slots: int) -> None:
        """Let others know how full this replica is, if it has changed, and now and then. For several threads: the last
        one to tell may be wrong by a moment, until the next."""
        now = (in_flight, slots)
        if not self.has_others() or self._has_left:
            return
        if now == self._told and time.monotonic() < self._tell_again_s:
            return
        command = script("tell")(load=self.keys.load, rank=self.rank, inflight=in_flight, slots=slots, keep=TOLD_MS)
        run(client, command)
        self._told, self._tell_again_s = now, time.monotonic() + TELL_AGAIN_S

    def leave(self, client: Client) -> None:
        """This replica takes nothing any more."""
        self._has_left = True
        run(client, ["HDEL", self.keys.load, self.rank])

    def kept(self, client: Client, entries: Sequence[Entry], in_flight: int, slots: int) -> list[Entry]:
        """Of what was read just now by a replica with so much in flight, what it begins; the rest went back."""
        plain = [entry for entry in entries if not entry.program]
        has_sessions = any(entry.session for entry in plain)
        if not self.has_others() or not plain or (in_flight == 0 and len(entries) == 1 and not has_sessions):
            return list(entries)
        begun = in_flight + len(entries) - len(plain)
        ranks = self._chosen(client, plain, Load(begun, slots)) if has_sessions else [""] * len(plain)
        command = script("share")(
            queue=self.keys.queue,
            ranks=self.keys.ranks,
            load=self.keys.load,
            jobs=[self.keys.job(entry.token) for entry in plain],
            rank=self.rank,
            inflight=begun,
            slots=slots,
            most=MOST_HOPS,
            tokens=[entry.token for entry in plain],
            entries=[entry.id for entry in plain],
            hops=[entry.hops for entry in plain],
            guesses=[entry.guess_ms for entry in plain],
            sessions=[entry.session for entry in plain],
            chosen=ranks,
        )
        given = {entry.id for entry, went in zip(plain, run(client, command), strict=True) if went}
        self._remember(entry for entry in plain if entry.session and entry.id in given)
        return [entry for entry in entries if entry.program or entry.id not in given]

    def _chosen(self, client: Client, entries: Sequence[Entry], own: Load) -> list[str]:
        """The replica for each of them, "" for the emptiest."""
        told = run(client, script("occupancy")(ranks=self.keys.ranks, load=self.keys.load))
        loads = {told[at].decode(): Load(told[at + 1], told[at + 2]) for at in range(0, len(told), 3)}
        sessions = [entry.session if entry.hops < FARTHEST else "" for entry in entries]
        ranks = chosen(sessions, loads | {self.rank: own})
        # What has come back too often stays.
        stays = [self._returns.get(entry.token, 0) >= MOST_RETURNS for entry in entries]
        return [self.rank if stay else rank for stay, rank in zip(stays, ranks, strict=True)]

    def _remember(self, given: Iterable[Entry]) -> None:
        for entry in given:
            self._returns[entry.token] = self._returns.pop(entry.token, 0) + 1
        while len(self._returns) > REMEMBERED:
            del self._returns[next(iter(self._returns))]
