"""Audits a live system: what `genpool check` runs. Reads only, in bounded steps; safe beside any traffic.

Each violation names the invariant it breaks:

    I1  every accepted job ends exactly once: unended jobs are in the index and reachable, ended ones are nowhere else
    I2  the same request gives the same bytes: by running jobs again (tasks/rerun.py), never here
    I3  a job's log is gapless and unique, and says the same as its record
    I4  what a rank's book counts is what its Programs have (pool/store/program_audit.py)
    I5  a Program is in exactly one place
    I6  only the attempt that holds a lease runs: a running job has one lease, a lease one running job
    I7  no key leaks: what belongs to a job goes when the job goes, and an input's block lives as long as it is needed

A job may change while it is looked at, so a suspicion is confirmed by a second look before it is reported.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from pool.rules import jobs
from pool.store.connection import Client, state_errors
from pool.store.entries import token_of
from pool.store.log import LogEntry, texts_of, unpack
from pool.store.program_audit import ProgramAudit
from pool.store.program_keys import ProgramKeys
from pool.store.violations import Violation

__all__ = ["Audit", "Violation"]

BATCH = 200
#: In a record: the job waits, or no rank has begun it since it was moved into the stream.
NO_ENTRY = "0-0"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job was found: its entry in a stream, its turn in a lane."""

    entry: str | None
    turn: str | None


class Audit:
    """Checks one model's keys."""

    def __init__(self, client: Client, model: str, shard: int = 0) -> None:
        self._client = client
        self._keys = ProgramKeys(f"{model}:{shard}")
        self._programs = ProgramAudit(client, self._keys)

    def run(self) -> list[Violation]:
        """All violations that two looks agree on, in order. Raises StateUnavailable."""
        with state_errors():
            suspected = set(self._look())
            return sorted(suspected & set(self._look())) if suspected else []

    def _look(self) -> Iterator[Violation]:
        client, keys = self._client, self._keys
        index = {member.decode() for member, _ in client.zscan_iter(keys.index, count=BATCH)}
        leases = {member.decode() for member, _ in client.zscan_iter(keys.leases, count=BATCH)}
        timers = {member.decode().split(":", 1)[1] for member, _ in client.zscan_iter(keys.timers, count=BATCH)}
        entries: dict[str, str] = {}
        programs = self._programs.find()
        turns = {turn.decode() for turn, _ in client.zscan_iter(keys.lanes["backlog"], count=BATCH)}
        wait = {turn.split(":")[3]: turn for turn in turns}
        streams = [keys.queue, *(place["stream"] for place in map(keys.place, programs.ranks))]
        for entry, fields in (item for stream in streams for item in self._stream(stream)):
            named = token_of(fields)
            if named is None:
                yield Violation("I7", entry.decode(), "a stream entry that names no job")
            else:
                entries[named] = entry.decode()
                programs.sent[fields.get(b"program", b"").decode()] += 1
        tokens = {token.partition("#")[0] for token in index}
        for token in sorted(tokens | leases | timers | set(entries) | set(wait)):
            place = Place(entries.get(token), wait.get(token))
            yield from self._reachable(token, token in index, token in leases, place)
        for member, _ in client.zscan_iter(keys.tenants, count=BATCH):
            counted = member.decode().rpartition(":")[2]
            if counted not in index:
                yield Violation("I7", counted, "it counts for its tenant, but it is not in the index")
        held: set[tuple[str, str]] = set()
        for key in client.scan_iter(match=keys.job("*"), count=BATCH):
            yield from self._stored(key.decode().rpartition(":")[2], tokens, held)
        yield from self._inputs(held)
        yield from self._programs.look(programs)

    def _stream(self, stream: str) -> Iterator[tuple[bytes, dict[bytes, bytes]]]:
        start = "-"
        while page := self._client.xrange(stream, start, "+", count=BATCH):
            yield from page
            start = f"({page[-1][0].decode()}"

    def _reachable(self, token: str, indexed: bool, leased: bool, place: Place) -> Iterator[Violation]:
        """What the index, the leases, the timers, the lanes and the stream say of a job against its record."""
        names = ("state", "entry", "program", "ticket", "turn")
        state, own_entry, program, ticket, turn = self._client.hmget(self._keys.job(token), *names)
        if state is None:
            yield Violation("I7", token, "an index, a lease, a timer or an entry outlived the record")
        elif jobs.is_terminal(state.decode()):
            yield Violation("I1", token, f"the job is {state.decode()}, but it is still queued or leased")
        else:
            if not indexed:
                yield Violation("I1", token, "the job has not ended, but it is not in the index")
            pooled = program is not None and own_entry == b"0-0"
            if pooled and self._client.lpos(self._keys.pool(program.decode()), ticket) is None:
                yield Violation("I1", token, "no worker can reach the job: it is in no stream and no pool")
            if not pooled:
                yield from _place_faults(token, place, (own_entry or b"").decode(), (turn or b"").decode())
            if leased != (state.decode() == jobs.RUNNING):
                yield Violation("I6", token, f"the job is {state.decode()} {'with' if leased else 'without'} a lease")

    def _stored(self, token: str, unended: set[str], held: set[tuple[str, str]]) -> Iterator[Violation]:
        """A record against the index, its TTL, and its own log. Adds the (block, job) pairs of its input to `held`."""
        key, log_key = self._keys.job(token), self._keys.log(token)
        names = ("state", "tokens", "outputs", "n", "blocks")
        state, logged, outputs, n, blocks = self._client.hmget(key, *names)
        if state is None:
            return
        log = [unpack(blob) for blob in self._client.lrange(log_key, 0, -1)]
        terminal = jobs.is_terminal(state.decode())
        if blocks and not terminal:
            held.update((block, token) for block in blocks.decode().split())
        if terminal and self._client.ttl(key) == -1:
            yield Violation("I7", token, "the job has ended, but its record would stay for ever")
        if terminal and log and self._client.ttl(log_key) == -1:
            yield Violation("I7", token, "the job has ended, but its log would stay for ever")
        if not terminal and token not in unended:
            yield Violation("I1", token, "the job has not ended, but it is not in the index")
        yield from _log_faults(token, log, int(logged or 0))
        if terminal and outputs and log:
            told = [output["text"] for output in json.loads(outputs)]
            if told != texts_of(log, int(n)):
                yield Violation("I3", token, "the record's text is not what the log says")

    def _inputs(self, held: set[tuple[str, str]]) -> Iterator[Violation]:
        """Blocks of inputs against the (block, job) pairs that unended jobs list."""
        unseen = set(held)
        for key in self._client.scan_iter(match=self._keys.input("*"), count=BATCH):
            block = key.decode().rpartition(":")[2]
            fields = {name.decode() for name, _ in self._client.hscan_iter(key, count=BATCH)}
            holders, ttl = fields - {"data", "until_ms", "kept"}, self._client.ttl(key)
            for token in holders:
                if (block, token) not in held:
                    yield Violation("I7", key.decode(), f"job {token}, which has ended, still holds this block")
            if not holders and ttl == -1:
                yield Violation("I7", key.decode(), "nobody holds this block, but it would stay for ever")
            if holders and ttl >= 0:
                yield Violation("I7", key.decode(), "a job holds this block, but it is about to go")
            if "data" in fields:
                unseen -= {(block, token) for token in holders}
        for block, token in unseen:
            yield Violation("I7", token, f"its input is lost: block {block} is gone, or does not know the job")


def _place_faults(token: str, place: Place, own_entry: str, turn: str) -> Iterator[Violation]:
    """A job waits in its lane, or has one entry, which its record names once a rank has begun it."""
    has_begun = own_entry != NO_ENTRY
    if not has_begun and place.turn is None and place.entry is None:
        yield Violation("I1", token, "no worker can reach the job: it waits in no lane and has no entry in the stream")
    if has_begun and own_entry != place.entry:
        yield Violation("I1", token, "no worker can reach the job: its entry is not in the stream")
    if place.turn is not None and (has_begun or place.entry is not None or place.turn != turn):
        yield Violation("I1", token, "the job has had its turn, or has another, and still waits in a lane")


def _log_faults(token: str, log: list[LogEntry], logged: int) -> Iterator[Violation]:
    expected = 0
    for position, entry in enumerate(log):
        if entry.seq != expected:
            yield Violation("I3", token, f"log entry {position} begins at {entry.seq}, not at {expected}")
        expected = entry.next_seq
    if expected != logged:
        yield Violation("I3", token, f"the log holds {expected} tokens, the record says {logged}")
