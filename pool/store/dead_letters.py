"""Dead letters: jobs that were given up because they kept losing their workers. One stream entry each, never a prompt.

A dead letter outlives its job's record. Trying again means a new job, because a terminal record is final; its token is
a function of the letter, so that a retry cut short between submitting and removing the letter can be repeated: it finds
the job it submitted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pool.store.connection import Client, state_errors
from pool.store.ids import KINDS, JobRef
from pool.store.keys import ModelKeys
from pool.store.nodes import server_ms
from pool.store.running import run
from pool.store.scripts import script

PAGE = 100
#: The kind in the id of a job whose record is gone: any kind of id finds a job, and this one needs no HTTP.
UNKNOWN_DOOR = "celery"


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """`entry`: its stream id; `ref`: the job; `code`: why it was given up; `losses`: workers it lost; `rank`: the last
    of them; `at_ms`: when, on the state server's clock; `record_exists`: whether the job can still be read."""

    entry: str
    ref: JobRef
    code: str
    losses: int
    rank: str
    at_ms: int
    record_exists: bool

    @property
    def retry_token(self) -> str:
        """The token of the job that tries again: the same at every attempt to submit it."""
        text = f"retry of {self.ref.tag} {self.ref.token} {self.entry}"
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class DeadLetters:
    """The dead letters of one model. All methods raise StateUnavailable."""

    def __init__(self, client: Client, model: str, shard: int = 0) -> None:
        self._client = client
        self._model = model
        self._shard = shard
        self._keys = ModelKeys(f"{model}:{shard}")

    def __iter__(self) -> Iterator[DeadLetter]:
        """All of them, oldest first, read page by page."""
        start = "-"
        while True:
            with state_errors():
                page = self._client.xrange(self._keys.dead, start, "+", count=PAGE)
                doors = self._doors([fields[b"job"].decode() for _, fields in page])
            for (entry, fields), door in zip(page, doors, strict=True):
                yield self._letter(
                    entry.decode(), {name.decode(): value.decode() for name, value in fields.items()}, door
                )
            if len(page) < PAGE:
                return
            start = f"({page[-1][0].decode()}"

    def entry_ago(self, ms: int) -> str:
        """The stream id that stands for this long ago, on the state server's clock."""
        with state_errors():
            now_ms = server_ms(self._client, self._keys.dead)
        return f"{max(now_ms - ms, 0)}-0"

    def after(self, entry: str) -> list[tuple[str, str, str]]:
        """At most 100 letters behind this stream id, oldest first: their ids, the jobs' Celery ids, and codes. Those
        whose record has expired are left out."""
        with state_errors():
            page = self._client.xrange(self._keys.dead, f"({entry}", "+", count=PAGE)
            pipe = self._client.pipeline(transaction=False)
            for _, fields in page:
                pipe.hget(self._keys.job(fields[b"job"].decode()), "task_id")
            task_ids = pipe.execute()
        return [
            (found.decode(), task_id.decode(), fields[b"code"].decode())
            for (found, fields), task_id in zip(page, task_ids, strict=True)
            if task_id is not None
        ]

    def drop(self, letters: Sequence[DeadLetter]) -> int:
        """Remove them; how many were still there."""
        dropped = 0
        for first in range(0, len(letters), PAGE):
            entries = [letter.entry for letter in letters[first : first + PAGE]]
            with state_errors():
                dropped += run(self._client, script("drop_letters")(dead=self._keys.dead, entries=entries))
        return dropped

    def _doors(self, tokens: Sequence[str]) -> list[str | None]:
        """The door that each job came through; None for those whose record is gone."""
        pipe = self._client.pipeline(transaction=False)
        for token in tokens:
            pipe.hget(self._keys.job(token), "kind")
        return [door.decode() if door else None for door in pipe.execute()]

    def _letter(self, entry: str, fields: dict[str, str], door: str | None) -> DeadLetter:
        return DeadLetter(
            entry=entry,
            ref=JobRef(KINDS[door or UNKNOWN_DOOR], self._model, self._shard, fields["job"]),
            code=fields["code"],
            losses=int(fields["losses"]),
            rank=fields["rank"],
            at_ms=int(entry.partition("-")[0]),
            record_exists=door is not None,
        )
