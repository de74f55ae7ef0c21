"""An unload, carried on by whichever process comes by: jobs that have not begun end, until nothing is left.

It goes by the index and the leases, not by streams: a job waits where it may. Jobs that come back to the queue
meanwhile, from a worker that died or handed them back, end in the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pool.store.connection import state_errors
from pool.store.inputs import run_endings
from pool.store.jobs import JobStore
from pool.store.keys import model_channel
from pool.store.lifecycle import Lifecycle
from pool.store.program_endings import of_programs, run_declared
from pool.store.program_keys import ProgramKeys
from pool.store.scripts import Command, script

#: Jobs looked at in one trip.
BATCH = 100
#: How long behind the time to drain a worker may still hand back what it runs, with all its tokens.
HAND_BACK_MS = 2000


@dataclass(frozen=True, slots=True)
class Step:
    """What a step has done. `ended`: jobs; `code`: ok (the unload is over), busy, or kept (there is none)."""

    ended: int
    code: str


class Unloading:
    """Of one model. All methods raise StateUnavailable."""

    def __init__(self, lifecycle: Lifecycle, store: JobStore, *, result_ttl_ms: int) -> None:
        self._lifecycle = lifecycle
        self._client = lifecycle.client
        self._keys = ProgramKeys(lifecycle.keys.tag)
        self._store = store
        self._result_ttl_ms = result_ttl_ms

    def go_on(self) -> Step:
        """End what has not begun, once all of it, and what runs too long; then see whether the unload is over."""
        ended = self.end_jobs()
        reply = self._lifecycle.with_ranks(self._unloaded)
        if reply[0] == b"ok" and reply[1] == b"loaded":
            with state_errors():
                self._client.publish(model_channel(self._lifecycle.model), "change")
        return Step(ended, reply[0].decode())

    def end_jobs(self) -> int:
        """End all jobs that have not begun; those that have, where the time to drain is over. How many."""
        ended, cursor = 0, 0
        while True:
            with state_errors():
                cursor, members = self._client.zscan(self._keys.index, cursor, count=BATCH)
                tokens = [member.decode() for member, _ in members if b"#" not in member]
                ended += self._end(self._due(tokens))
            if cursor == 0:
                return ended

    def _due(self, tokens: Sequence[str]) -> Sequence[str]:
        """Of these unended jobs, those without a lease; while there is time to drain, others need not be looked at."""
        if not tokens:
            return []
        pipe = self._client.pipeline(transaction=False)
        pipe.hget(self._keys.model, "until_ms")
        pipe.time()
        pipe.zmscore(self._keys.leases, tokens)
        until_ms, (seconds, micros), leases = pipe.execute()
        if until_ms is None or seconds * 1000 + micros // 1000 >= int(until_ms) + HAND_BACK_MS:
            return tokens
        return [token for token, lease in zip(tokens, leases, strict=True) if lease is None]

    def _end(self, tokens: Sequence[str]) -> int:
        def end(token: str, blocks: Sequence[str]) -> Command:
            return script("unload_job")(
                **self._keys.ending(token, blocks),
                lanes=self._keys.lanes,
                model=self._keys.model,
                token=token,
                ttl=self._result_ttl_ms,
                late=HAND_BACK_MS,
            )

        return sum(self._end_part(tokens[at : at + BATCH], end) for at in range(0, len(tokens), BATCH))

    def _end_part(self, tokens: Sequence[str], end: Callable[[str, Sequence[str]], Command]) -> int:
        def end_of(at: int, program: str) -> list[Any]:
            return self._end_of(tokens[at], program)

        ended = 0
        replies = of_programs(run_endings(self._client, tokens, end), end_of)
        for token, reply in zip(tokens, replies, strict=True):
            if reply[0] == b"ok":
                ended += 1
                self._store.notify(token, watch=reply[1].decode(), rank=reply[2].decode())
        return ended

    def _end_of(self, token: str, program: str) -> list[Any]:
        """The reply of program_unload_job."""
        keys = self._keys
        return run_declared(
            self._client,
            keys,
            program,
            lambda declared: script("program_unload_job")(
                keys=keys.ended(token, declared.rank),
                lanes=keys.lanes,
                **keys.of(program),
                at=keys.place(declared.rank),
                front=keys.job(declared.front or token),
                model=keys.model,
                blocks=[keys.input(block) for block in declared.blocks],
                token=token,
                ttl=self._result_ttl_ms,
                late=HAND_BACK_MS,
                id=program,
                rank=declared.rank,
                front_token=declared.front,
            ),
        )

    def _unloaded(self, ids: list[str]) -> Command:
        keys = self._keys
        return script("unloaded")(
            model=keys.model, index=keys.index, ranks=keys.ranks, records=[keys.rank(each) for each in ids], ids=ids
        )
