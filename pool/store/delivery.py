"""The workers' side of the store: take, begin, append, complete, renew, hand back.

One Delivery belongs to one rank (consumer). Its calls come from that rank's two I/O threads, each with a connection of
its own: the blocking read must not hold up the writes.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import redis

from pool.rules import jobs
from pool.store.connection import Client
from pool.store.keys import GROUP, ModelKeys, node_channel
from pool.store.log import LogEntry, pack, replay_of, unpack, unpack_ids
from pool.store.records import Output
from pool.store.scripts import Command, Value, run_many, script

#: A script touches at most this many items; longer work continues in further calls.
BATCH = 100


@dataclass(frozen=True, slots=True)
class Lease:
    """The fence of one attempt: every write of it carries attempt and nonce."""

    token: str
    attempt: int
    nonce: str


@dataclass(frozen=True, slots=True)
class Handout:
    """A begun job.

    `request`: JSON of the GenerationRequest; `prompt_ids` (P,) or empty when it still has to be tokenized; `replay`:
    token ids logged by earlier attempts, by choice; `logged`: how many those are; `watch`: nodes to hint to.
    `task_id`: Celery's id of it; `created_ms`: when it was submitted, on the state server's clock.
    """

    lease: Lease
    request: str
    prompt_ids: tuple[int, ...]
    n: int
    seed: int
    logged: int
    replay: tuple[tuple[int, ...], ...]
    watch: str
    task_id: str
    created_ms: int


@dataclass(frozen=True, slots=True)
class Ending:
    """How a job ends: a terminal `state`, with outputs and usage or with an error."""

    state: str
    outputs: tuple[Output, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error_code: str = ""
    error_message: str = ""

    def fields(self) -> list[Value]:
        """The terminal record's fields, as name, value, name, value ..."""
        if self.error_code:
            return ["error_code", self.error_code, "error_message", self.error_message]
        outputs = [{"text": o.text, "finish_reason": o.finish_reason, "tokens": o.tokens} for o in self.outputs]
        return [
            "outputs", json.dumps(outputs, ensure_ascii=False, separators=(",", ":")),
            "prompt_tokens", self.prompt_tokens,
            "cached_tokens", self.cached_tokens,
            "output_tokens", sum(o.tokens for o in self.outputs),
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Write:
    """Log entries of one job, in order, and its ending if it has ended. `entries` start at `first_seq`."""

    lease: Lease
    first_seq: int
    entries: tuple[LogEntry, ...]
    ending: Ending | None = None

    @property
    def count(self) -> int:
        """Tokens in `entries`."""
        return sum(len(entry.token_ids) for entry in self.entries)


@dataclass(frozen=True, slots=True)
class Written:
    """The store's answer to a Write. `code`: `ok`, `old` (was there already), `resend` (from `log_end`), `stale` (the
    attempt is over: drop the job; `detail` is its state)."""

    code: str
    log_end: int = 0
    watch: str = ""
    detail: str = ""


@dataclass
class Delivery:
    """The hand-outs of one model to one rank. `reader` must be a client of a single connection, for `unblock`."""

    reader: Client
    writer: Client
    model: str
    rank: str
    lease_ms: int
    result_ttl_ms: int
    shard: int = 0
    keys: ModelKeys = field(init=False)
    _reader_id: int | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.keys = ModelKeys(f"{self.model}:{self.shard}")

    def ensure_group(self) -> None:
        """Create the consumer group, from the stream's beginning, unless it exists."""
        try:
            self.writer.xgroup_create(self.keys.queue, GROUP, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def take(self, room: int, block_ms: int) -> list[Handout]:
        """Read at most `room` (>= 1) jobs, waiting up to `block_ms`, and begin each."""
        try:
            if self._reader_id is None:
                self._reader_id = int(self.reader.client_id())
            reply = self.reader.xreadgroup(
                GROUP, self.rank, {self.keys.queue: ">"}, count=min(room, BATCH), block=block_ms
            )
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self.ensure_group()
            return []
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
            self._reader_id = None
            raise
        entries = [(entry.decode(), fields[b"job"].decode()) for entry, fields in reply[0][1]] if reply else []
        return self._begin(entries)

    def _begin(self, entries: Sequence[tuple[str, str]]) -> list[Handout]:
        if not entries:
            return []
        nonces = [secrets.token_hex(8) for _ in entries]
        commands = [
            script("begin")(
                job=self.keys.job(token),
                queue=self.keys.queue,
                leases=self.keys.leases,
                token=token,
                entry=entry,
                rank=self.rank,
                nonce=nonce,
                lease=self.lease_ms,
            )
            for (entry, token), nonce in zip(entries, nonces, strict=True)
        ]
        replies = run_many(self.reader, commands)
        return [
            self._handout(token, nonce, reply)
            for (_, token), nonce, reply in zip(entries, nonces, replies, strict=True)
            if reply[0] == b"ok"
        ]

    def _handout(self, token: str, nonce: str, reply: list[Any]) -> Handout:
        _, attempt, request, prompt, n, seed, tokens, watch, task_id, created_ms = reply
        logged = int(tokens or 0)
        blobs = self.reader.lrange(self.keys.log(token), 0, -1) if logged else []
        return Handout(
            lease=Lease(token, int(attempt), nonce),
            request=request.decode(),
            prompt_ids=unpack_ids(prompt),
            n=int(n),
            seed=int(seed),
            logged=logged,
            replay=replay_of(map(unpack, blobs), int(n)),
            watch=(watch or b"").decode(),
            task_id=task_id.decode(),
            created_ms=int(created_ms),
        )

    def unblock(self) -> None:
        """Wake a blocked `take`; it then returns nothing. Called from another thread than its own."""
        if self._reader_id is not None:
            self.writer.execute_command("CLIENT", "UNBLOCK", self._reader_id)

    def write(self, writes: Sequence[Write]) -> list[Written]:
        """Append to logs and end jobs, in one round trip. Safe to repeat after a connection failure."""
        return [self._written(reply) for reply in run_many(self.writer, [self._command(write) for write in writes])]

    def _command(self, write: Write) -> Command:
        keys, lease = self.keys, write.lease
        entries = [pack(entry) for entry in write.entries]
        if write.ending is None:
            return script("append")(
                job=keys.job(lease.token),
                log=keys.log(lease.token),
                attempt=lease.attempt,
                nonce=lease.nonce,
                first_seq=write.first_seq,
                count=write.count,
                entries=entries,
            )
        return script("complete")(
            job=keys.job(lease.token),
            log=keys.log(lease.token),
            queue=keys.queue,
            index=keys.index,
            leases=keys.leases,
            outbox=keys.outbox,
            token=lease.token,
            attempt=lease.attempt,
            nonce=lease.nonce,
            first_seq=write.first_seq,
            count=write.count,
            entries=entries,
            state=write.ending.state,
            ttl=self.result_ttl_ms,
            fields=write.ending.fields(),
        )

    @staticmethod
    def _written(reply: list[Any]) -> Written:
        code = reply[0].decode()
        if code == "ok":
            return Written("ok", watch=reply[1].decode())
        if code in ("old", "resend"):
            return Written(code, log_end=int(reply[1]))
        return Written("stale", detail=reply[1].decode() if len(reply) > 1 else "gone")

    def hint(self, news: dict[str, list[str]]) -> None:
        """Tell each node, in one message, which job tokens have news (node -> tokens)."""
        if news:
            pipe = self.writer.pipeline(transaction=False)
            for node, tokens in news.items():
                pipe.publish(node_channel(node), " ".join(tokens))
            pipe.execute()

    def renew(self, leases: Sequence[Lease]) -> list[Written]:
        """Extend leases. For each, in order: `ok` with the nodes to hint to, or `stale` with the job's state."""
        answers: list[Written] = []
        for start in range(0, len(leases), BATCH):
            part = leases[start : start + BATCH]
            command = script("renew")(
                leases=self.keys.leases,
                queue=self.keys.queue,
                jobs=[self.keys.job(lease.token) for lease in part],
                rank=self.rank,
                lease=self.lease_ms,
                tokens=[lease.token for lease in part],
                attempts=[lease.attempt for lease in part],
                nonces=[lease.nonce for lease in part],
            )
            for item in run_many(self.writer, [command])[0]:
                lost = isinstance(item, list)
                answers.append(
                    Written("stale", detail=item[0].decode()) if lost else Written("ok", watch=item.decode())
                )
        return answers

    def hand_back(self, leases: Sequence[Lease]) -> int:
        """Give begun jobs back to the queue, with their logged tokens; those no longer ours are left alone. Returns how
        many went back."""
        commands = [
            script("hand_back")(
                job=self.keys.job(lease.token),
                queue=self.keys.queue,
                leases=self.keys.leases,
                token=lease.token,
                attempt=lease.attempt,
                nonce=lease.nonce,
            )
            for lease in leases
        ]
        return sum(reply[0] == b"ok" for reply in run_many(self.writer, commands)) if commands else 0


def failed(code: str, message: str) -> Ending:
    """The ending of a job that failed by name."""
    return Ending(state=jobs.FAILED, error_code=code, error_message=message)
