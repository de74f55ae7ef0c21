"""What passes between the store and a worker: leases, hand-outs, writes, endings.

Nobody changes one; they are not frozen because making a frozen one costs three times as much, several times a job.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pool.rules import jobs
from pool.store.log import LogEntry, replay_of, unpack
from pool.store.placements import Outcome, Placement
from pool.store.records import Output
from pool.store.scripts import Value


@dataclass(slots=True)
class Lease:
    """The fence of one attempt: every write of it carries attempt and nonce. `blocks`: ids of the input's blocks, which
    the job's end lets go; `placement`: of a Program's job, the place that its end must still find."""

    token: str
    attempt: int
    nonce: str
    blocks: tuple[str, ...] = ()
    placement: Placement | None = None


@dataclass(slots=True)
class Handout:
    """A begun job.

    `options`: JSON of the GenerationOptions; `prompt`: packed token ids, or b"" when `input`, JSON of the prompt as it
    was given, still has to be tokenized; `celery`: whether it leaves a Celery result; `replay`:
    token ids logged by earlier attempts, by choice; `logged`: how many those are; `watch`: nodes to hint to.
    `task_id`: Celery's id of it; `created_ms`: when it was submitted, on the state server's clock; `tenant`: whose;
    `alone`: it is on trial (pool/store/trials.py): nothing else may begin beside it until it shows a token; `lost`: its
    stored input cannot be read, so that it can only fail (`input_lost`).
    """

    lease: Lease
    options: bytes
    prompt: bytes
    input: bytes
    n: int
    seed: int
    logged: int
    replay: tuple[tuple[int, ...], ...]
    watch: str
    task_id: str
    created_ms: int
    tenant: str = ""
    alone: bool = False
    celery: bool = False
    lost: bool = False

    @property
    def prompt_tokens(self) -> int:
        """Length of the packed prompt."""
        return len(self.prompt) // 4


@dataclass(slots=True)
class Entry:
    """A stream entry of this rank's pending list, the job it names, and the fence with which it begins: beginning the
    same Entry again is safe. `program`: whose job it is, "" for plain work; `hops`: how often it was passed on;
    `guess_ms`: what a choice was taken to need when it was moved into the stream; `session`: digits that stand for its
    session, "" for none."""

    id: str
    token: str
    nonce: str
    program: str = ""
    hops: int = 0
    guess_ms: int = 0
    session: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one read brought: begun jobs, and entries of jobs on trial that may not begin among others."""

    handouts: list[Handout] = field(default_factory=list)
    alone: list[Entry] = field(default_factory=list)


@dataclass(slots=True)
class Ending:
    """How a job ends: a terminal `state`, with outputs and usage or with an error. `engine`: the fingerprint of one
    that gives the same bytes for the same request, else ""; `outcome`: what a Program's request told of it."""

    state: str
    outputs: tuple[Output, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error_code: str = ""
    error_message: str = ""
    engine: str = ""
    outcome: Outcome | None = None

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
            *(("engine", self.engine) if self.engine else ()),
        ]  # fmt: skip


@dataclass(slots=True)
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


@dataclass(slots=True)
class Written:
    """The store's answer to a Write. `code`: `ok`, `old` (was there already), `resend` (from `log_end`), `stale` (the
    attempt is over: drop the job; `detail` is its state)."""

    code: str
    log_end: int = 0
    watch: str = ""
    detail: str = ""


def failed(code: str, message: str) -> Ending:
    """The ending of a job that failed by name."""
    return Ending(state=jobs.FAILED, error_code=code, error_message=message)


def handout_of(entry: Entry, reply: Sequence[Any], log: Sequence[bytes]) -> Handout:
    """Decode the reply of `begin` for a job whose input lies in its record; `log`: its packed token log."""
    _, attempt, alone, options, prompt, given, n, seed, logged, watch, task_id, created_ms, celery, tenant = reply
    return Handout(
        lease=Lease(entry.token, int(attempt), entry.nonce),
        options=options,
        prompt=prompt or b"",
        input=given or b"",
        n=int(n),
        seed=int(seed),
        logged=int(logged or 0),
        replay=replay_of(map(unpack, log), int(n)),
        watch=(watch or b"").decode(),
        task_id=task_id.decode(),
        created_ms=int(created_ms),
        tenant=(tenant or b"").decode(),
        alone=bool(alone),
        celery=celery == b"1",
    )


def written_of(reply: Sequence[Any]) -> Written:
    """Decode the reply of `append` or `complete`."""
    code = reply[0].decode()
    if code == "ok":
        return Written("ok", watch=reply[1].decode())
    if code in ("old", "resend"):
        return Written(code, log_end=int(reply[1]))
    return Written("stale", detail=reply[1].decode() if len(reply) > 1 else "gone")
