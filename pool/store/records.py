"""What is stored of a job, as values: the submit form, the record that anybody may read, and the worker's hand-out.

Record v1 is a Redis HASH. Fixed at submit: `v kind model tenant lane fairness n seed options params background store
celery task_id watch queue_timeout_ms run_timeout_ms tombstone_ms created_ms`, `counted` where its tenant has a limit
(lua/lib/own.lua), `session` where replicas go by it (pool/store/sharing.py), and either `input prompt` or, when those
are large, `blocks prompt_blocks`: the ids of their blocks (pool/store/inputs.py), the prompt's first, and how many
those are. Changing as it runs: `state entry attempt nonce rank tokens begun_tokens started_ms`, `run_left_ms` while it
waits again, and of lost attempts `losses crashes blamed suspect`. Written with the end: `finished_ms outputs
prompt_tokens cached_tokens output_tokens engine error_code error_message`; a job with `store: false` then loses its
prompt and input, and of any job's blocks only those of the input stay listed; `kept_ms` is the end under which these
count the record (lua/lib/kept.lua).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pool.rules import jobs
from pool.rules.fairness import NORMAL
from pool.store.ids import JobRef
from pool.store.scripts import Value

RECORD_VERSION = 1


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to submit.

    `options`: the JSON of its GenerationOptions; `input`: that of its prompt as it was given; `prompt`: packed token
    ids, b"" when no tokenizer was at hand; `params`: JSON of what the API echoes in answers; `watch`: the node that
    waits for it, "" for none; `task_id`: the id under which Celery knows it ("" = the job's own id). `queue_timeout_ms`
    counts while it waits its turn, each time anew, `run_timeout_ms` while a worker has it, `deadline_ms` (0: none) from
    submit; after `reader_ms` (0: never) without a reader it is cancelled; its id is remembered `tombstone_ms` longer
    than its result. `tenant_cap`: choices that its tenant may hold of the model, with this job (0: it is not counted).
    `lane`, `fairness` (the key it is charged to, "" for its tenant), `weight` and `inflight_cap` (choices of its key in
    flight while others wait, 0: any) are how it waits for its turn (pool/rules/fairness.py). `session`: digits that
    stand for its session (flows.session_of), "" where any replica may serve it alike.
    """

    ref: JobRef
    door: str
    options: str
    input: str
    seed: int
    n: int = 1
    prompt: bytes = b""
    prompt_tokens: int | None = None
    params: str = "{}"
    tenant: str = "default"
    tenant_cap: int = 0
    lane: str = NORMAL
    fairness: str = ""
    weight: int = 1
    inflight_cap: int = 0
    session: str = ""
    background: bool = False
    store: bool = True
    celery: bool = False
    task_id: str = ""
    watch: str = ""
    queue_timeout_ms: int = 600_000
    run_timeout_ms: int = 3_600_000
    deadline_ms: int = 0
    reader_ms: int = 0
    tombstone_ms: int = 86_400_000

    def fields(self) -> list[Value]:
        """The record's fixed fields but prompt and input, as name, value, name, value ..."""
        pairs: dict[str, Value] = {
            "v": RECORD_VERSION,
            "kind": self.door,
            "model": self.ref.model,
            "tenant": self.tenant,
            "lane": self.lane,
            "fairness": self.fairness or self.tenant,
            "n": self.n,
            "seed": self.seed,
            "options": self.options,
            "params": self.params,
            "background": int(self.background),
            "store": int(self.store),
            "celery": int(self.celery),
            "task_id": self.task_id or str(self.ref),
            "watch": self.watch,
            "queue_timeout_ms": self.queue_timeout_ms,
            "run_timeout_ms": self.run_timeout_ms,
            "tombstone_ms": self.tombstone_ms,
        }
        if self.prompt_tokens is not None:
            pairs["prompt_tokens"] = self.prompt_tokens
        if self.tenant_cap:
            pairs["counted"] = 1
        if self.session:
            pairs["session"] = self.session
        return [item for pair in pairs.items() for item in pair]


@dataclass(frozen=True, slots=True)
class Output:
    """One choice's complete text; `finish_reason` is `stop` or `length`; `tokens` counts its output tokens."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(frozen=True, slots=True)
class JobRecord:
    """A job as stored. Times are the state server's, in ms, None while they have not come.

    `outputs` is filled once the job completed (or is incomplete); before that, and for failed and cancelled jobs, what
    was shown is in the log.
    """

    ref: JobRef
    door: str
    state: str
    tenant: str
    lane: str
    fairness: str
    n: int
    seed: int
    params: dict[str, Any]
    background: bool
    store: bool
    task_id: str
    attempt: int
    rank: str
    logged_tokens: int
    created_ms: int
    started_ms: int | None
    finished_ms: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    error_code: str | None
    error_message: str | None
    outputs: tuple[Output, ...] = field(default=())

    @property
    def id(self) -> str:
        """The public id."""
        return str(self.ref)

    @property
    def model(self) -> str:
        """The public model name."""
        return self.ref.model

    @property
    def terminal(self) -> bool:
        """Whether the record will never change again."""
        return jobs.is_terminal(self.state)

    def deleted(self, logged_tokens: int = 0) -> JobRecord:
        """What was last seen of a job that is deleted since, as its readers are told: cancelled. That is what it was,
        unless it ended by itself in the moment before. `logged_tokens`: those that were seen of its log."""
        return replace(self, state=jobs.CANCELLED, logged_tokens=max(self.logged_tokens, logged_tokens))


#: What a reader of a job needs of its HASH; prompt and input stay where they are, they may be large.
RECORD_FIELDS = (
    "state", "kind", "tenant", "lane", "fairness", "n", "seed",
    "params", "background", "store", "task_id", "attempt", "rank", "tokens",
    "created_ms", "started_ms", "finished_ms", "prompt_tokens", "cached_tokens", "output_tokens",
    "error_code", "error_message", "outputs",
)  # fmt: skip


def record_of(ref: JobRef, stored: Sequence[bytes | None]) -> JobRecord | None:
    """Decode the values of RECORD_FIELDS; None when the job does not exist."""
    text = {name: value.decode() for name, value in zip(RECORD_FIELDS, stored, strict=True) if value is not None}
    if "state" not in text:
        return None

    def number(name: str) -> int | None:
        return int(text[name]) if text.get(name) else None

    return JobRecord(
        ref=ref,
        door=text["kind"],
        state=text["state"],
        tenant=text["tenant"],
        lane=text["lane"],
        fairness=text["fairness"],
        n=int(text["n"]),
        seed=int(text["seed"]),
        params=json.loads(text["params"]),
        background=text["background"] == "1",
        store=text["store"] == "1",
        task_id=text["task_id"],
        attempt=number("attempt") or 0,
        rank=text.get("rank", ""),
        logged_tokens=number("tokens") or 0,
        created_ms=int(text["created_ms"]),
        started_ms=number("started_ms"),
        finished_ms=number("finished_ms"),
        prompt_tokens=number("prompt_tokens"),
        cached_tokens=number("cached_tokens"),
        output_tokens=number("output_tokens"),
        error_code=text.get("error_code"),
        error_message=text.get("error_message"),
        outputs=tuple(Output(**output) for output in json.loads(text.get("outputs") or "[]")),
    )
