"""Builders of test inputs: a valid thing by default, any field overridden by name."""

from __future__ import annotations

from typing import Any

from pool.store.connection import Client, connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.log import LogEntry, pack_ids
from pool.store.nodes import server_ms
from pool.store.rebuilding import heal
from pool.store.records import NewJob, Output
from pool.store.sweeping import Sweeper
from tasks.payloads import GenerationRequest, Sampling, TextPrompt

LEASE_MS = 3000
RESULT_TTL_MS = 60_000
#: How much longer than the record its log and its input stay.
LINGER_MS = 60_000


def request(**fields: Any) -> GenerationRequest:
    """A greedy request of four tokens."""
    defaults: dict[str, Any] = {
        "model": "tiny",
        "prompt": TextPrompt(text="Hello"),
        "max_tokens": 4,
        "sampling": Sampling(temperature=0.0, ignore_eos=True),
    }
    return GenerationRequest(**(defaults | fields))


def new_job(*, model: str = "tiny", door: str = "responses", **fields: Any) -> NewJob:
    """A job with a stored request and three prompt tokens."""
    body = request(model=model, n=fields.get("n", 1))
    defaults: dict[str, Any] = {
        "ref": new_ref(door, model),
        "door": door,
        "options": body.options().stored(),
        "input": body.prompt.model_dump_json(),
        "seed": 7,
        "prompt": pack_ids([1, 2, 3]),
        "prompt_tokens": 3,
    }
    return NewJob(**(defaults | fields))


def job_store(client: Client, *, cap: int = 100) -> JobStore:
    """A store with short limits."""
    return JobStore(client, result_ttl_ms=RESULT_TTL_MS, pending_per_model=cap)


def delivery(url: str, rank: str = "rank-a", *, model: str = "tiny", lease_ms: int = LEASE_MS) -> Delivery:
    """The worker's side for one rank, its group created."""
    made = Delivery(
        reader=connect(url, max_connections=1),
        writer=connect(url, max_connections=1),
        model=model,
        rank=rank,
        lease_ms=lease_ms,
        result_ttl_ms=RESULT_TTL_MS,
    )
    made.heal()
    return made


def sweeper(client: Client, *, lease_ms: int = LEASE_MS, max_deliveries: int = 3) -> Sweeper:
    """A sweeper with the delivery's lease."""
    return Sweeper(
        client,
        job_store(client),
        lease_ms=lease_ms,
        max_deliveries=max_deliveries,
        result_ttl_ms=RESULT_TTL_MS,
    )


def entry(seq: int, *token_ids: int, choice: int = 0, text: str = "x") -> LogEntry:
    """A log entry."""
    return LogEntry(seq, choice, token_ids, text)


def completed(*texts: str) -> Ending:
    """An ending with one output of one token a text."""
    return Ending("completed", tuple(Output(text, "stop", 1) for text in texts), prompt_tokens=3)


def swept_steadily(client: Client, *, ago_ms: int = 0, model: str = "tiny") -> None:
    """As if sweeps of the model had come steadily until `ago_ms` ago."""
    keys = ModelKeys(f"{model}:0")
    at_ms = server_ms(client, keys.sweep)
    client.hset(keys.sweep, mapping={"last_ms": at_ms - ago_ms, "hold_until_ms": 0})


def give_up(client: Client, rank: Delivery, *, model: str = "tiny") -> None:
    """Have the rank begin all queued jobs of the model, and have them fail as poison, as if it had died with each."""
    keys = ModelKeys(f"{model}:0")
    held = rank.take(100, 100).handouts
    swept_steadily(client, model=model)
    client.zadd(keys.leases, {handout.lease.token: 1 for handout in held})
    assert sweeper(client, max_deliveries=1).sweep(model).poisoned == len(held)


def as_if_ranks_waited(client: Client, *, count: int = 100, model: str = "tiny") -> None:
    """As if so many ranks waited for work and never came: what is submitted now lies in the stream, unread."""
    keys = ModelKeys(f"{model}:0")
    heal(client, keys)
    client.zadd(keys.hungry, {f"gone-{number}": 2**50 for number in range(count)})
    client.pexpire(keys.hungry, 60_000)


def entry_of(client: Client, job: NewJob) -> bytes:
    """The entry of a job that has had its turn."""
    entries: list[tuple[bytes, dict[bytes, bytes]]] = client.xrange(ModelKeys(job.ref.tag).queue)
    return next(entry for entry, fields in entries if fields[b"job"] == job.ref.token.encode())
