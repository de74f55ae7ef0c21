"""The callers' side of the store: submit, read, cancel, watch. Callers never see a stream.

Thread-safe: one JobStore serves all threads of a process over a bounded connection pool. Connection failures and a
server that takes no writes surface as StateUnavailable.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Any

import redis

from pool.errors import JobErased, JobExpired, JobNotCancellable, JobUnknown, KeyConflict, StateUnavailable
from pool.rules import jobs
from pool.store import program_endings
from pool.store.accepting import LATE_MS, PlainWay, Way, accepting
from pool.store.connection import Client, state_errors
from pool.store.ids import UNKNOWN, JobRef, check_kind
from pool.store.inputs import stored_input
from pool.store.keys import PROBE, ModelKeys, idempotency_key, keys_of, node_channel
from pool.store.log import LogEntry, unpack
from pool.store.memory import MemoryGate
from pool.store.nodes import nodes
from pool.store.records import RECORD_FIELDS, JobRecord, NewJob, record_of
from pool.store.refusals import closed, refusal
from pool.store.running import run_stream
from pool.store.scripts import Command, script
from pool.store.server_clock import ServerClock

#: A connection that was broken while it lay in the pool fails at once. What takes longer (no free connection, no
#: answer) would take as long again.
AT_ONCE_S = 0.5
#: How often a submit is tried whose reply says, in time, that it came too late.
LATE_TRIES = 3
PLAIN = PlainWay()
#: Where the first key is in a verb's command.
FIRST_KEY = 3
#: The `maxmemory-policy` that drops nothing.
NO_EVICTION = "noeviction"


@dataclass(frozen=True, slots=True)
class View:
    """A consistent look at one job: its record, and its log from a cursor on. `cursor` is where the next read starts.
    When the record is terminal, the log is complete; of a running job, it may be newer than the record."""

    record: JobRecord
    entries: tuple[LogEntry, ...]
    cursor: int


class JobStore:
    """Jobs of all models on one state server."""

    def __init__(self, client: Client, *, result_ttl_ms: int, pending_per_model: int) -> None:
        self._client = client
        self._result_ttl_ms = result_ttl_ms
        self._pending_per_model = pending_per_model
        self._memory = MemoryGate(client)
        self._clock = ServerClock(client)
        #: How long a reply is waited for, from when its command is sent.
        self._patience_ms = round(client.connection_pool.connection_kwargs["socket_timeout"] * 1000)

    def submit(self, job: NewJob, *, key: str | None = None, way: Way = PLAIN) -> None:
        """Accept a job. Idempotent by its id: a second submit of the same id changes nothing. When this raises, nothing
        of it is carried out later; only of one that was carried out may the reply have been lost.

        `key`: the Idempotency-Key that was claimed for it; a refusal is then final for this id, and the key is free.
        `way`: how it comes in.

        Raises QueueFull, ModelClosed and InvalidRequest (`n` is over what may ever be held; nothing stored), and
        StateUnavailable: submitting the same NewJob again is safe.
        """
        keys = keys_of(job.ref)
        shortage = self._memory.refusal(keys.queue)
        cap = 0 if shortage else self._pending_per_model
        stored = stored_input(job)

        def offer(sent: Container[int] = ()) -> list[Any]:
            def build(not_after_ms: int) -> Command:
                accepted = accepting(
                    job, stored, sent=sent, not_after_ms=not_after_ms, cap=cap, claimed=key is not None
                )
                return way.command(job, accepted)

            while True:
                code, *detail = self._timely(keys, build)
                if not way.leads_on(code, detail):
                    return [code, *detail]

        # Nothing of the blocks is sent at first: a history that is sent again is mostly there.
        code, *detail = offer()
        if code == b"missing":
            code, *detail = offer({at - 1 for at in detail})
        if code == b"missing":
            # A block that was there has gone meanwhile.
            code, *detail = offer(range(len(stored.blocks)))
        if code == b"expired":
            raise JobExpired("This generation has ended and is no longer stored.")
        if code in (b"full", b"crowded", b"many", b"refused", b"closed"):
            if key is not None:
                self.release(job, key)
            if code == b"closed":
                raise closed(job.ref.model, detail[1], again=bool(detail[2]))
            raise shortage or refusal(job, code, detail, self._pending_per_model)

    def _timely(self, keys: ModelKeys, build: Callable[[int], Command]) -> list[Any]:
        """Run a verb that shall not be carried out once we have given up on its reply, as a server that hung would.
        `build` gets the last moment by the server's clock. Replies begin with a code and, unless "missing", that
        clock's time."""
        self._clock.ask(keys)
        for _ in range(LATE_TRIES):
            code, *detail = self._run_built(keys.queue, lambda: build(self._clock.now_ms(keys) + self._patience_ms))
            if code != b"missing":
                self._clock.told(keys, int(detail[0]))
            if code != b"late":
                return [code, *detail]
            # We are still here: the server's clock was set meanwhile, or the way was long. Now we know its time.
        raise StateUnavailable("The state server is too slow at the moment.")

    def read(self, ref: JobRef) -> JobRecord:
        """The job's record. Raises JobUnknown."""
        with state_errors():
            record = record_of(ref, self._client.hmget(keys_of(ref).job(ref.token), RECORD_FIELDS))
        if record is None:
            raise self.absence(ref)
        check_kind(ref, record.door)
        return record

    def view(self, ref: JobRef, cursor: int = 0) -> View:
        """Record and log from `cursor`. Raises JobUnknown."""
        view = self.views([(ref, cursor)])[0]
        if view is None:
            raise self.absence(ref)
        check_kind(ref, view.record.door)
        return view

    def views(self, wanted: Sequence[tuple[JobRef, int]]) -> list[View | None]:
        """Many views in one round trip, in order; None for jobs that are gone.

        The record is read before the log, and a job's end is written together with the last of its log: so a terminal
        record implies a complete log, while a running one may come with newer entries.
        """
        pipe = self._client.pipeline(transaction=False)
        for ref, cursor in wanted:
            keys = keys_of(ref)
            pipe.hmget(keys.job(ref.token), RECORD_FIELDS)
            pipe.lrange(keys.log(ref.token), cursor, -1)
        with state_errors():
            replies = pipe.execute()
        return [
            _view(ref, cursor, stored, blobs)
            for (ref, cursor), stored, blobs in zip(wanted, replies[::2], replies[1::2], strict=True)
        ]

    def cancel(self, ref: JobRef) -> JobRecord:
        """End a queued or running job as cancelled; of a cancelled one nothing changes.

        Raises JobUnknown, and JobNotCancellable when it has ended in another way.
        """
        with state_errors():
            door = self._client.hget(keys_of(ref).job(ref.token), "kind")
        if door is not None:
            check_kind(ref, door.decode())
        code, *rest = self._run_known(ref, self._cancel_command(ref))
        if code == b"blocks":
            code, *rest = self._run_known(ref, self._cancel_command(ref, rest[0].decode().split()))
        if code == b"program":
            with state_errors():
                code, *rest = program_endings.cancel(self._client, ref, rest[0].decode(), self._result_ttl_ms)
            if code == b"gone":
                raise self.absence(ref)
        if code == b"ended" and rest[0].decode() != jobs.CANCELLED:
            raise JobNotCancellable(f"This generation has already ended: {rest[0].decode()}.")
        if code == b"ok":
            self.notify(ref.token, watch=rest[0].decode(), rank=rest[1].decode())
        return self.read(ref)

    def _cancel_command(self, ref: JobRef, blocks: Sequence[str] = ()) -> Command:
        keys = keys_of(ref)
        return script("cancel")(
            **keys.ending(ref.token, blocks), lanes=keys.lanes, token=ref.token, ttl=self._result_ttl_ms
        )

    def void(self, ref: JobRef) -> None:
        """A submit that got no answer shall have no effect: the job is cancelled if it arrived, and refused if it still
        arrives (a server that hung reads old connections late). One that has ended stays as it is."""
        with state_errors(), contextlib.suppress(redis.exceptions.OutOfMemoryError):
            # First: between a cancel that finds nothing and this, it could still arrive.
            self._client.set(keys_of(ref).tombstone(ref.token), b"", px=LATE_MS, nx=True)
        with contextlib.suppress(JobUnknown, JobNotCancellable):
            self.cancel(ref)

    def watch(self, ref: JobRef, node: str, *, hold_ms: int = 0) -> None:
        """Have `node` told of the job's news from now on, and hold off its cancellation for want of a reader for
        `hold_ms` (0: the node is no reader). Raises JobUnknown."""
        keys = keys_of(ref)
        command = script("watch")(job=keys.job(ref.token), timers=keys.timers, token=ref.token, node=node, hold=hold_ms)
        self._run_known(ref, command)

    def unwatch(self, ref: JobRef, node: str) -> None:
        """The opposite of `watch`; a job that is gone is no error."""
        self._run(script("unwatch")(job=keys_of(ref).job(ref.token), node=node))

    def read_on(self, refs: Sequence[JobRef], hold_ms: int) -> None:
        """Readers of these jobs (at most 100 of one model) are still there: hold off their cancellation for `hold_ms`;
        0: the jobs go on without readers. Jobs that never had one are left alone."""
        if refs:
            tokens = [ref.token for ref in refs]
            self._run(script("read_on")(timers=keys_of(refs[0]).timers, hold=hold_ms, tokens=tokens))

    def claim(self, tenant: str, key: str, ref: JobRef, *, body_hash: str, ttl_ms: int) -> str | None:
        """Bind a caller's Idempotency-Key to `ref`; the id it is bound to already, None when it was free.

        Raises KeyConflict when it stands for another body.
        """
        command = script("claim_key")(key=idempotency_key(tenant, key), job=str(ref), body=body_hash, ttl=ttl_ms)
        code, *bound = self._run(command)
        if code == b"other":
            raise KeyConflict("This Idempotency-Key was used before, for another request.", param="Idempotency-Key")
        return bound[0].decode() if code == b"same" else None

    def release(self, job: NewJob, key: str) -> None:
        """The opposite of `claim`, for a job whose id is used up, or that is not submitted after all."""
        self._run(script("release_key")(key=idempotency_key(job.tenant, key), job=str(job.ref)))

    def notify(self, token: str, *, watch: str, rank: str) -> None:
        """Hint to waiting nodes, and to the rank that may still work on the job, that there is news."""
        channels = [node_channel(node) for node in {*watch.split(), rank} if node]
        if channels:
            pipe = self._client.pipeline(transaction=False)
            for channel in channels:
                pipe.publish(channel, token)
            with state_errors():
                pipe.execute()

    def ping(self, models: Sequence[str] = ()) -> None:
        """Raises StateUnavailable unless the server answers and accepts writes; in a cluster, all nodes that own keys
        of these models."""
        with state_errors():
            if any(node.execute_command("ROLE")[0] != b"master" for node in nodes(self._client)):
                raise StateUnavailable("The state server is a replica and takes no writes.")
            for probe in [PROBE, *(ModelKeys(f"{model}:0").probe for model in models)]:
                # It never exists, so nothing is set; a server that takes no writes refuses it all the same.
                self._client.set(probe, b"", xx=True)

    def memory_policy(self) -> str:
        """The server's `maxmemory-policy`; anything but `noeviction` can lose jobs. Of a cluster, the worst."""
        with state_errors():
            found = [str(node.info("memory").get("maxmemory_policy", "unknown")) for node in nodes(self._client)]
        return next((policy for policy in found if policy != NO_EVICTION), NO_EVICTION)

    def _run(self, command: Command) -> list[Any]:
        return self._run_built(str(command[FIRST_KEY]), lambda: command)

    def _run_built(self, key: str, build: Callable[[], Command]) -> list[Any]:
        """Run a verb; once more when the connection broke, as pooled ones do when the server was restarted. Every verb
        of this class may be repeated. It is built when it is sent: there may be a wait for a free connection before."""
        began_s = time.monotonic()
        with state_errors():
            try:
                return self._run_once(key, build)
            except redis.exceptions.ConnectionError:
                if time.monotonic() - began_s > AT_ONCE_S:
                    raise
                return self._run_once(key, build)

    def _run_once(self, key: str, build: Callable[[], Command]) -> list[Any]:
        reply: list[Any]
        (reply,) = run_stream(self._client, (build() for _ in range(1)), key=key)
        return reply

    def _run_known(self, ref: JobRef, command: Command) -> list[Any]:
        reply = self._run(command)
        if reply[0] == b"gone":
            raise self.absence(ref)
        return reply

    def absence(self, ref: JobRef) -> JobUnknown:
        """Why there is no record: it expired, was deleted, or never was. Raises StateUnavailable."""
        with state_errors():
            tombstone = self._client.get(keys_of(ref).tombstone(ref.token))
        if tombstone == b"erased":
            return JobErased(UNKNOWN)
        if tombstone is not None:
            tenant = tombstone.decode().removeprefix("of:") if tombstone.startswith(b"of:") else None
            return JobExpired("This generation has ended and is no longer stored.", tenant=tenant)
        return JobUnknown(UNKNOWN)


def _view(ref: JobRef, cursor: int, stored: list[bytes | None], blobs: list[bytes]) -> View | None:
    record = record_of(ref, stored)
    if record is None:
        return None
    return View(record, tuple(unpack(blob) for blob in blobs), cursor + len(blobs))
