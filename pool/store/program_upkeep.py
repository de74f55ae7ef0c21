"""What is due to Programs by time, by the loss of ranks and by their owners' word. Any process may do any of it.

A rank is lost in one step (`seat`): from then on whatever its former process does is refused. What it had is then moved
in small steps (`drain`), which anybody may go on with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import redis

from pool.rules.programs.facts import PauseReason
from pool.store import program_endings
from pool.store.connection import state_errors
from pool.store.entries import token_of
from pool.store.ids import JobRef
from pool.store.keys import GROUP
from pool.store.nodes import server_ms
from pool.store.program_endings import Declared, Terms, run_declared
from pool.store.program_keys import program_id_of
from pool.store.programs import ProgramStore
from pool.store.running import run, run_many
from pool.store.scripts import Command, script

FAILOVER = PauseReason.HEALTH_FAILOVER.value
#: Items looked at in one call.
BATCH = 100


@dataclass(frozen=True, slots=True)
class Look:
    """What a rank's engine held when it was looked at, and what the store said before: `rank_set` and `moved_tokens`
    are a snapshot's. `tokens`: resident ones, None for unknown; `gone`: Programs whose KV was leaving and is gone."""

    began_ms: int
    rank_set: int
    moved_tokens: int
    tokens: int | None
    waiting: int = 0
    running: int = 0
    gone: tuple[str, ...] = ()


class Expired(NamedTuple):
    """A timer that was carried out: the Program, its rank, and what became of it: paused or released."""

    program: str
    rank: str
    code: str


class ProgramUpkeep:
    """Upkeep of one model's Programs. All methods raise StateUnavailable."""

    def __init__(self, store: ProgramStore, terms: Terms) -> None:
        self._store = store
        self._client = store.client
        self._keys = store.keys
        self._terms = terms

    # -- ranks ------------------------------------------------------------------------------------------------------

    def join(self, rank: str, incarnation: str) -> bool:
        """A process takes a rank; whether a former one has lost it by that, so that it has to be drained."""
        code, *former = self._seat(rank, incarnation)
        return code == "ok" and former != [""]

    def lose(self, rank: str, incarnation: str, *, leaves: bool = False, why: str = FAILOVER) -> bool:
        """A process has lost its rank, because its registration ran out or, `leaves`, it gives it up; whether it had
        it. What a process that leaves has begun may still end there, while its leases hold. `why`: what Programs are
        paused for that lose their place by it."""
        return self._seat(rank, "", former=incarnation, leaves=leaves, why=why)[0] == "ok"

    def _seat(
        self, rank: str, incarnation: str, *, former: str = "", leaves: bool = False, why: str = FAILOVER
    ) -> list[str]:
        command = script("seat")(
            record=self._keys.rank(rank),
            members=self._keys.members,
            sweep=self._keys.sweep,
            at=self._keys.place(rank),
            rank=rank,
            incarnation=incarnation,
            former=former,
            leaves=int(leaves),
            why=why,
            lease=self._terms.lease_ms,
        )
        with state_errors():
            return [part.decode() for part in run(self._client, command)]

    def members(self) -> dict[str, int]:
        """The ranks of the ring, with the times at which they were last seen."""
        with state_errors():
            found = self._client.zrange(self._keys.members, 0, -1, withscores=True)
        return {rank.decode(): int(seen_ms) for rank, seen_ms in found}

    def up(self, ranks: Sequence[str]) -> dict[str, str]:
        """Those of these ranks that a process has, with its incarnation."""
        pipe = self._client.pipeline(transaction=False)
        for rank in ranks:
            pipe.hget(self._keys.place(rank)["book"], "incarnation")
        with state_errors():
            found = pipe.execute()
        return {rank: seat.decode() for rank, seat in zip(ranks, found, strict=True) if seat}

    def drain(self, rank: str) -> int:
        """Move what former processes of a rank had: jobs back to the pools of their Programs, and idle Programs off
        their places. How much was moved; repeat it until that is 0."""
        return len(self.drained(rank))

    def drained(self, rank: str) -> list[str]:
        """As `drain`: the Program of each job or place that was moved."""
        place = self._keys.place(rank)
        moved: list[str] = []
        end = "+"
        while True:
            # Newest first: each goes to the front of its pool.
            with state_errors():
                page = self._client.xrevrange(place["stream"], end, "-", count=BATCH)
            for entry, fields in page:
                program = fields.get(b"program", b"").decode()
                if self._take_back(place["stream"], entry, token_of(fields), program):
                    moved.append(program)
            if len(page) < BATCH:
                break
            end = f"({page[-1][0].decode()}"
        with state_errors():
            idle = [program.decode() for program in self._client.zrange(place["active"], 0, BATCH - 1)]
        return moved + [program for program in idle if self._store.displace(program, rank)]

    def note_drained(self, rank: str, incarnation: str) -> None:
        """Nothing of former processes is left at a rank that this one has."""
        with state_errors():
            self._client.hset(self._keys.place(rank)["book"], "drained", incarnation)

    def _take_back(self, stream: str, entry: bytes, token: str | None, program: str) -> bool:
        """One entry of a rank's stream, where the rank lost it; whether its job was moved or has ended."""
        with state_errors():
            if token is None:
                reply: list[bytes] = [b"ended"]
            else:
                reply = program_endings.take_back(self._client, self._keys, token, program, self._terms)
            if reply[0] == b"ended":
                self._client.xdel(stream, entry)
                self._client.xack(stream, GROUP, entry)
        if reply[0] not in (b"requeued", b"poison") or token is None:
            return False
        self._store.jobs.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return True

    def requeue_unbegun(self, rank: str, idle_ms: int) -> int:
        """Entries that a former process of a rank has read and cannot begin go back to the stream, for its present one;
        how many. `idle_ms`: how long nobody has touched them."""
        place = self._keys.place(rank)
        with state_errors():
            found = self._pending(place["stream"], idle_ms)
            pipe = self._client.pipeline(transaction=False)
            for item in found:
                pipe.xrange(place["stream"], item["message_id"], item["message_id"])
            entries = [entry for page in pipe.execute() for entry in page]
            commands = [self._return(rank, entry, fields) for entry, fields in entries if token_of(fields)]
            return sum(reply[0] == b"ok" for reply in run_many(self._client, commands))

    def _pending(self, stream: str, idle_ms: int) -> list[dict[str, bytes]]:
        try:
            pending: list[dict[str, bytes]] = self._client.xpending_range(stream, GROUP, "-", "+", BATCH, idle=idle_ms)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            # The worker makes it again, with all entries (`ProgramDelivery.heal`).
            return []
        return pending

    def _return(self, rank: str, entry: bytes, fields: Mapping[bytes, bytes]) -> Command:
        token, program = fields[b"job"].decode(), fields.get(b"program", b"").decode()
        return script("program_hand_back")(
            job=self._keys.job(token),
            leases=self._keys.leases,
            timers=self._keys.timers,
            tally=self._keys.tally,
            **self._keys.of(program),
            at=self._keys.place(rank),
            token=token,
            attempt="",
            nonce="",
            entry=entry,
            id=program,
            rank=rank,
        )

    def waiting_at(self, rank: str) -> list[str]:
        """Programs that wait for a rank, those first that are forced first; at most BATCH."""
        with state_errors():
            return [p.decode() for p in self._client.zrange(self._keys.place(rank)["waiting"], 0, BATCH - 1)]

    def forget(self, rank: str, gone_after_ms: int) -> str:
        """A rank that nobody has had for so long leaves the ring: gone; left (something is still bound to it), live or
        early otherwise."""
        command = script("unseat")(
            members=self._keys.members, at=self._keys.place(rank), rank=rank, gone_after=gone_after_ms
        )
        with state_errors():
            code: bytes = run(self._client, command)[0]
        return code.decode()

    # -- observations -----------------------------------------------------------------------------------------------

    def observe(self, rank: str, incarnation: str, look: Look) -> bool:
        """Install what an engine reported; False: it was dropped, being of another process, of other ranks, or late."""
        command = script("observe")(
            members=self._keys.members,
            at=self._keys.place(rank),
            rank=rank,
            incarnation=incarnation,
            rank_set=look.rank_set,
            began=look.began_ms,
            moved=look.moved_tokens,
            tokens="" if look.tokens is None else look.tokens,
            waiting=look.waiting,
            running=look.running,
            ids=look.gone[:BATCH],
        )
        with state_errors():
            return bool(run(self._client, command)[0] == b"ok")

    def leaving(self, rank: str) -> dict[str, int]:
        """Programs that have left a rank while its engine still holds their KV, with the tokens that count for it."""
        with state_errors():
            found = self._client.hgetall(self._keys.place(rank)["leaving"])
        return {program.decode(): int(tokens) for program, tokens in found.items()}

    # -- timers -----------------------------------------------------------------------------------------------------

    def expire(self) -> list[Expired]:
        """Carry out timers that are due, at most BATCH; those that did something."""
        with state_errors():
            now_ms = server_ms(self._client, self._keys.program_timers)
            due = self._client.zrangebyscore(self._keys.program_timers, "-inf", now_ms, start=0, num=BATCH)
            done = [self._carry_out(timer.decode()) for timer in due]
        return [expired for expired in done if expired.code in ("paused", "released")]

    def _carry_out(self, timer: str) -> Expired:
        kind, _, program = timer.partition(":")
        rank = ""

        def build(declared: Declared) -> Command:
            nonlocal rank
            rank = declared.rank
            return script("program_timer")(
                at=self._keys.place(declared.rank),
                **self._keys.of(program),
                sweep=self._keys.sweep,
                id=program,
                rank=declared.rank,
                kind=kind,
                lease=self._terms.lease_ms,
            )

        code: bytes = run_declared(self._client, self._keys, program, build)[0]
        return Expired(program, rank, code.decode())

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, tenant: str, name: str) -> str:
        """A Program is over, its owner says: gone (there was none), released, or ending: its jobs that wait are
        cancelled, and it is released when those that run have ended."""
        program = program_id_of(tenant, name)
        with state_errors():
            while True:
                code, *rest = run_declared(
                    self._client,
                    self._keys,
                    program,
                    lambda declared: script("release")(
                        at=self._keys.place(declared.rank), **self._keys.of(program), id=program, rank=declared.rank
                    ),
                )
                waiting = [ticket.split(b":")[0].decode() for ticket in rest[1:]]
                for token in waiting:
                    self._cancel(token, program)
                if len(waiting) < BATCH:
                    # With the last of them it was released, where none was running.
                    return "released" if waiting and not rest[0] else str(code.decode())

    def _cancel(self, token: str, program: str) -> None:
        model, _, shard = self._keys.tag.rpartition(":")
        ref = JobRef("gen", model, int(shard), token)
        code, *rest = program_endings.cancel(self._client, ref, program, self._terms.result_ttl_ms)
        if code == b"ok":
            self._store.jobs.notify(token, watch=rest[0].decode(), rank=rest[1].decode())
