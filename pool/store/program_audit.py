"""The part of the audit that is about Programs; `pool/store/audit.py` runs it, twice.

I4  a rank's book: its tokens are the private tokens of its active Programs, what leaves is what is listed as
    leaving, and the numbers of active and of reasoning Programs are right; so is how many Programs a tenant has
I5  a Program is in one place: active, with the jobs that are with its rank; or waiting, with the front of its pool;
    or idle, with a timer that ends it
I7  no list, timer or pool names a Program that is gone
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from pool.store.connection import Client
from pool.store.program_keys import ProgramKeys
from pool.store.program_records import Stored, stored_of
from pool.store.program_waiters import waiter_of
from pool.store.violations import Violation

BATCH = 200


@dataclass
class Found:
    """All that is listed, by Program or rank. `sent`: how many jobs of each Program are in streams of ranks; whoever
    reads those fills it."""

    ranks: set[str] = field(default_factory=set)
    records: dict[str, Stored] = field(default_factory=dict)
    pools: dict[str, list[str]] = field(default_factory=dict)
    timers: dict[str, set[str]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)


class ProgramAudit:
    """Checks the Programs of one model."""

    def __init__(self, client: Client, keys: ProgramKeys) -> None:
        self._client = client
        self._keys = keys

    def find(self) -> Found:
        """All that is stored of Programs; one pass over the names of the model's keys."""
        client, keys, found = self._client, self._keys, Found()
        found.ranks = {rank.decode() for rank, _ in client.zscan_iter(keys.members, count=BATCH)}
        place = keys.place("")
        of_ranks = tuple(place[kind] for kind in ("book", "stream", "active", "waiting", "order", "waiters", "leaving"))
        records, pools = keys.record(""), keys.pool("")
        programs: set[str] = set()
        for key in (raw.decode() for raw in client.scan_iter(match=f"{records.removesuffix('program:')}*", count=1000)):
            if key.startswith(records):
                programs.add(key.removeprefix(records))
            elif key.startswith(pools):
                found.pools[key.removeprefix(pools)] = []
            else:
                found.ranks |= {key.removeprefix(prefix) for prefix in of_ranks if key.startswith(prefix)}
        self._read(found, sorted(programs))
        return found

    def _read(self, found: Found, programs: Sequence[str]) -> None:
        client, keys = self._client, self._keys
        for start in range(0, len(programs), BATCH):
            pipe = client.pipeline(transaction=False)
            part = programs[start : start + BATCH]
            for program in part:
                pipe.hgetall(keys.record(program))
            each = zip(part, pipe.execute(), strict=True)
            found.records |= {p: stored for p, values in each if (stored := stored_of(p, values)) is not None}
        for program in found.pools:
            found.pools[program] = [ticket.decode() for ticket in client.lrange(keys.pool(program), 0, -1)]
        for timer, _ in client.zscan_iter(keys.program_timers, count=BATCH):
            kind, _, program = timer.decode().partition(":")
            found.timers.setdefault(program, set()).add(kind)

    def look(self, found: Found) -> Iterator[Violation]:
        """What is wrong at the moment, or was while it was looked at."""
        for rank in sorted(found.ranks):
            yield from self._rank(rank, found)
        for stored in found.records.values():
            yield from self._program(stored, found)
        yield from self._owners(found)
        for program in {*found.pools, *found.timers} - {*found.records}:
            yield Violation("I7", program, "a pool or a timer outlived the Program")

    def _owners(self, found: Found) -> Iterator[Violation]:
        """Subjects are numbers: the names are those of API keys."""
        owned = Counter(stored.text("tenant") for stored in found.records.values())
        stated = {owner.decode(): int(count) for owner, count in self._client.hgetall(self._keys.owners).items()}
        for number, owner in enumerate(sorted({*owned, *stated})):
            if owned[owner] != stated.get(owner, 0):
                text = f"it is said to have {stated.get(owner, 0)} Programs, and has {owned[owner]}"
                yield Violation("I4", f"owner {number}", text)

    def _rank(self, rank: str, found: Found) -> Iterator[Violation]:
        client, place = self._client, self._keys.place(rank)
        book = {name.decode(): value.decode() for name, value in client.hgetall(place["book"]).items()}
        active = {program.decode() for program, _ in client.zscan_iter(place["active"], count=BATCH)}
        waiting = {
            program.decode(): int(due_ms) for program, due_ms in client.zscan_iter(place["waiting"], count=BATCH)
        }
        order = {member.decode() for member, _ in client.zscan_iter(place["order"], count=BATCH)}
        leaving = sum(int(tokens) for tokens in client.hvals(place["leaving"]))
        here = [stored for stored in found.records.values() if stored.text("rank") == rank]
        owners = [stored for stored in here if stored.text("state") == "active"]
        counts = {
            "tokens": sum(stored.number("private") for stored in owners),
            "leaving": leaving,
            "active": len(owners),
            "reasoning": sum(stored.number("inflight") > 0 for stored in owners),
        }
        for name, count in counts.items():
            if int(book.get(name, 0)) != count:
                yield Violation("I4", rank, f"the book says {book.get(name, 0)} {name}, its Programs make {count}")
        for program in active ^ {stored.id for stored in owners}:
            yield Violation("I5", program, f"its record and the active Programs of rank {rank} disagree")
        waiters = {stored.id: stored for stored in here if "standing" in stored.fields}
        if waiting != {program: stored.number("force_ms") for program, stored in waiters.items()}:
            yield Violation("I5", rank, "who waits there by force deadline, and who by their records, disagree")
        if order != {stored.text("standing") + stored.id for stored in waiters.values()}:
            yield Violation("I5", rank, "who waits there by order, and who by their records, disagree")
        shown = {program.decode(): kept for program, kept in client.hscan_iter(place["waiters"], count=BATCH)}
        if shown.keys() != waiters.keys() or not all(_says(shown[each.id], each, found) for each in waiters.values()):
            yield Violation("I5", rank, "what snapshots show of those that wait, and their records, disagree")

    def _program(self, stored: Stored, found: Found) -> Iterator[Violation]:
        inflight, pool = stored.number("inflight"), found.pools.get(stored.id, [])
        timers, waits = found.timers.get(stored.id, set()), "standing" in stored.fields
        is_active = stored.text("state") == "active"
        if inflight != found.sent[stored.id]:
            yield Violation(
                "I5", stored.id, f"{inflight} jobs are with its rank, the stream has {found.sent[stored.id]}"
            )
        if (stored.text("status") == "reasoning") != (inflight > 0 or waits):
            yield Violation("I5", stored.id, f"it is {stored.text('status')} with {inflight} jobs, waiting: {waits}")
        if is_active and (waits or (pool and not inflight)):
            yield Violation("I5", stored.id, "it is active, and yet waits")
        if not is_active and (inflight or stored.number("private") or waits != bool(pool)):
            yield Violation(
                "I5", stored.id, "it is paused, but has jobs with a rank, or tokens, or waits without a job"
            )
        if not inflight and not waits and not timers:
            yield Violation("I5", stored.id, "it is idle, and nothing will ever end it")
        if (inflight or waits) and timers:
            yield Violation("I5", stored.id, f"it has work, and a timer of an idle one: {sorted(timers)}")
        for ticket in pool:
            token = ticket.partition(":")[0]
            state, program, own = self._client.hmget(self._keys.job(token), "state", "program", "ticket")
            if (state, program, own) != (b"queued", stored.id.encode(), ticket.encode()):
                yield Violation("I5", stored.id, f"its pool holds job {token}, which is not a queued one of its own")


def _says(packed: bytes, stored: Stored, found: Found) -> bool:
    """Whether what a rank shows of a Program that waits is what its record and its pool say."""
    try:
        waiter = waiter_of(stored.id, stored.text("rank"), packed)
    except ValueError:
        return False
    front = next(iter(found.pools.get(stored.id, [])), "").partition(":")[0]
    return (waiter.program, waiter.front) == (stored.program(), front)
