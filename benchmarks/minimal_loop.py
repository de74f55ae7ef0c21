"""The least that makes the same jobs durable: one thread, one connection, and genpool's own Redis scripts.

What genpool's worker needs beyond this is what Celery, the batching loop, the leases' upkeep and the threads between
them cost. The scripts' arguments are laid out by hand here, because a faster genpool must not make its yardstick
faster; at the start they are compared with what the store itself would send.
"""

from __future__ import annotations

import secrets
from typing import Any

import redis

from benchmarks.noop_engine import NoopEngine
from pool.store.connection import Client, connect
from pool.store.handouts import Ending
from pool.store.keys import GROUP, ModelKeys, node_channel
from pool.store.log import LogEntry, pack
from pool.store.ranks import Card, RankRegistry
from pool.store.records import Output
from pool.store.scripts import script
from tasks.config import load_settings, state_url

MODEL = "noop"
RANK = "minimal"
BATCH = 100
BLOCK_MS = 1000
#: What a job is taken to need when it begins: a guess, set right at its end.
GUESS_MS = 1


class MinimalLoop:
    """Reads, begins and completes jobs in batches."""

    def __init__(self, client: Client, *, lease_ms: int, ttl_ms: int) -> None:
        self._client = client
        self._lease_ms = lease_ms
        self._ttl_ms = ttl_ms
        self._keys = ModelKeys(f"{MODEL}:0")
        self._job, self._log = self._keys.job(""), self._keys.log("")
        self._tombstone = self._keys.tombstone("")
        self._take, self._begin, self._complete = script("take"), script("begin"), script("complete")
        self._entry = pack(LogEntry(0, 0, (0,), ""))
        self._fields = Ending("completed", (Output("", "stop", 1),), prompt_tokens=1).fields()

    def open(self) -> None:
        """What a rank does once: group, scripts, and the card by which clients tokenize."""
        try:
            self._client.xgroup_create(self._keys.queue, GROUP, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise
        for verb in (self._take, self._begin, self._complete):
            self._client.script_load(verb.source)
        engine = NoopEngine()
        RankRegistry(self._client, MODEL).publish(
            Card(engine.context_length, engine.context_length, engine.fingerprint(), engine.vocabulary.to_blob())
        )
        self._compare_with_the_store()

    def turn(self) -> None:
        """One batch."""
        entries = [(entry.decode(), token.decode(), secrets.token_hex(8)) for entry, token in self._read()]
        if not entries:
            return
        begun = self._run(self._begin_arguments(entry, token, nonce) for entry, token, nonce in entries)
        ended = self._run(
            self._complete_arguments(token, int(answer[1]), nonce)
            for (_, token, nonce), answer in zip(entries, begun, strict=True)
        )
        for (_, token, _), (_, watch) in zip(entries, ended, strict=True):
            for node in watch.decode().split():
                self._client.publish(node_channel(node), token)

    def _read(self) -> list[tuple[bytes, bytes]]:
        """The next jobs; when nothing waits, the first that comes."""
        pipe = self._client.pipeline(transaction=False)
        pipe.execute_command(*self._take_arguments())
        pipe.xreadgroup(GROUP, RANK, {self._keys.queue: ">"}, count=BATCH)
        is_noted, reply = pipe.execute()
        if is_noted and not reply:
            reply = self._client.xreadgroup(GROUP, RANK, {self._keys.queue: ">"}, count=BATCH, block=BLOCK_MS)
        return [(entry, fields[b"job"]) for entry, fields in reply[0][1]] if reply else []

    def _run(self, commands: Any) -> list[Any]:
        pipe = self._client.pipeline(transaction=False)
        for command in commands:
            pipe.execute_command(*command)
        replies: list[Any] = pipe.execute()
        return replies

    def _take_arguments(self) -> tuple[Any, ...]:
        keys = self._keys
        return ("EVALSHA", self._take.sha, 5, keys.queue, keys.hungry, *keys.lanes.values(), RANK, BATCH, BLOCK_MS)

    def _begin_arguments(self, entry: str, token: str, nonce: str) -> tuple[Any, ...]:
        keys = self._keys
        return ("EVALSHA", self._begin.sha, 5, self._job + token, keys.queue, keys.leases, keys.timers,
                keys.model, token, entry, RANK, nonce, GUESS_MS, self._lease_ms, 0)  # fmt: skip

    def _complete_arguments(self, token: str, attempt: int, nonce: str) -> tuple[Any, ...]:
        keys = self._keys
        return ("EVALSHA", self._complete.sha, 13, self._job + token, self._log + token,
                keys.queue, keys.index, keys.leases, keys.outbox, keys.timers, self._tombstone + token,
                keys.tally, keys.tenants, *keys.lanes.values(), token, attempt, nonce, 0, 1, 1, self._entry,
                "completed", self._ttl_ms, len(self._fields), *self._fields)  # fmt: skip

    def _compare_with_the_store(self) -> None:
        """Raises RuntimeError when the store's own calls have changed and these have not."""
        keys, token, nonce = self._keys, "t", "n"
        begin = self._begin(
            job=keys.job(token), queue=keys.queue, leases=keys.leases, timers=keys.timers,
            model=keys.model, token=token, entry="1-1", rank=RANK, nonce=nonce, guess=GUESS_MS,
            lease=self._lease_ms, alone=0,
        )  # fmt: skip
        complete = self._complete(
            **keys.ending(token), lanes=keys.lanes, token=token, attempt=1, nonce=nonce, first_seq=0, count=1,
            entries=[self._entry], state="completed", ttl=self._ttl_ms, fields=self._fields,
        )  # fmt: skip
        take = self._take(
            queue=keys.queue, hungry=keys.hungry, lanes=keys.lanes, rank=RANK, room=BATCH, stand=BLOCK_MS,
        )  # fmt: skip
        ours = (
            self._take_arguments(),
            self._begin_arguments("1-1", token, nonce),
            self._complete_arguments(token, 1, nonce),
        )
        if ours != (tuple(take), tuple(begin), tuple(complete)):
            raise RuntimeError("the minimal loop no longer sends what the store sends: bring it up to date")


def main() -> None:
    """Run until killed."""
    settings = load_settings()
    client = connect(state_url(settings), max_connections=1, read_timeout_s=BLOCK_MS / 1000 + 5)
    loop = MinimalLoop(
        client,
        lease_ms=round(settings.worker.lease_seconds * 1000),
        ttl_ms=settings.state.result_ttl_seconds * 1000,
    )
    loop.open()
    while True:
        loop.turn()


if __name__ == "__main__":
    main()
