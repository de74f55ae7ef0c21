"""Every Redis key and channel genpool uses, built here and nowhere else. `docs/redis.md` lists them for readers.

All keys of a model carry one hash tag `{model:shard}`, so one script always stays in one cluster slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pool.store.ids import JobRef

PREFIX = "gp:"
GROUP = "workers"
#: Behind the name of a watching process: it waits for the job's end alone, hints in between would only cost it time.
END_ONLY = "."
#: Never exists: a write to it that changes nothing tells whether the server takes writes.
PROBE = f"{PREFIX}probe"
#: HASH version, digest, tables, at_ms: the catalogue of models that an admin had read last (tasks/catalogue.py).
CATALOGUE = f"{PREFIX}catalogue"
#: SET: all models that a process has known since the state began: what a removed one holds must end, too.
MODELS = f"{PREFIX}models"


def node_channel(node: str) -> str:
    """Pub/sub channel of one waiting process: messages are job tokens, separated by spaces, that have news."""
    return f"{PREFIX}node:{node.removesuffix(END_ONLY)}"


#: What a rank is told over its own channel: KV of a Program has to go (pool/store/lua/lib/book.lua).
KV_LEAVES = "*"


def model_channel(model: str) -> str:
    """Pub/sub channel of those who follow a model's lifecycle: a message says that it was changed."""
    return f"{PREFIX}model:{model}"


def wants_tokens(node: str) -> bool:
    """Whether a name in a job's `watch` field stands for a process that wants each token as it comes."""
    return not node.endswith(END_ONLY)


@dataclass(frozen=True)
class ModelKeys:
    """The keys of one model's shard; `tag` is `model:shard`."""

    tag: str

    def _key(self, name: str) -> str:
        return f"{PREFIX}{{{self.tag}}}:{name}"

    @cached_property
    def queue(self) -> str:
        """STREAM, one entry a job that has had its turn: field `job` = its token."""
        return self._key("queue")

    @cached_property
    def hungry(self) -> str:
        """ZSET rank -> until when (ms) it waits for work at the stream, if it lives."""
        return self._key("hungry")

    @cached_property
    def lanes(self) -> dict[str, str]:
        """The keys of the lanes, by the names of the group in lua/lib/lanes.lua."""
        return {
            # ZSET, all scores 0: the turn of each job that waits.
            "backlog": self._key("backlog"),
            # ZSET LANE:KEY -> virtual time, in a band of the lane.
            "flows": self._key("flows"),
            # HASH of what moves and ends of jobs count: clock, owed, busy, guess.
            "fairness": self._key("fairness"),
        }

    @cached_property
    def model(self) -> str:
        """HASH: whether the model is wanted, and how that goes (pool/store/lifecycle.py). None: it is wanted."""
        return self._key("model")

    @cached_property
    def index(self) -> str:
        """ZSET token -> submit time (ms): every job that has not ended; `token#K` for its further choices."""
        return self._key("index")

    @cached_property
    def leases(self) -> str:
        """ZSET token -> lease end (ms): every begun attempt."""
        return self._key("leases")

    @cached_property
    def sweep(self) -> str:
        """HASH last_ms, hold_until_ms: when expiry was last looked at, and until when nothing may expire."""
        return self._key("sweep")

    @cached_property
    def outbox(self) -> str:
        """ZSET token -> end time (ms): ended jobs whose Celery result is still to be written; `erased:TASK`: one of a
        deleted job, to be forgotten."""
        return self._key("outbox")

    @cached_property
    def timers(self) -> str:
        """ZSET `kind:token` -> due time (ms); kinds queue, run, deadline and reader."""
        return self._key("timers")

    @cached_property
    def tenants(self) -> str:
        """ZSET, all scores 0: `tenant:token` of every job that has not ended and counts for its tenant; `token#K` as in
        the index."""
        return self._key("tenants")

    @cached_property
    def dead(self) -> str:
        """STREAM of dead letters: job, code, losses, last rank. Never a prompt. Trimmed to a fixed length."""
        return self._key("dead")

    @cached_property
    def tally(self) -> str:
        """LIST of lines `name value ...`: what ended and what was requeued, not yet in the totals."""
        return self._key("tally")

    @cached_property
    def totals(self) -> str:
        """HASH name -> sum over all lines of the tally that ever were."""
        return self._key("totals")

    @cached_property
    def ranks(self) -> str:
        """ZSET rank id -> lease end (ms): worker processes that serve the model."""
        return self._key("ranks")

    @cached_property
    def told(self) -> str:
        """HASH rank id -> JSON: who each of them is, and what it told of itself last."""
        return self._key("told")

    @cached_property
    def places(self) -> str:
        """ZSET rank id -> lease end (ms): replicas that hold a copy, load it or free it: those that `replica_max`
        bounds."""
        return self._key("places")

    @cached_property
    def load(self) -> str:
        """HASH rank id -> `IN_FLIGHT SLOTS`: how full each of several replicas is (pool/store/sharing.py)."""
        return self._key("load")

    @cached_property
    def card(self) -> str:
        """HASH: what a worker published about the model (context length, vocabulary, ...)."""
        return self._key("card")

    @cached_property
    def probe(self) -> str:
        """Never exists, as PROBE, but is where the model is."""
        return self._key("probe")

    def rank(self, rank: str) -> str:
        """HASH with TTL: one rank's incarnation, host and pid."""
        return self._key(f"rank:{rank}")

    def job(self, token: str) -> str:
        """HASH: the job record. No TTL until the job has ended."""
        return self._key(f"job:{token}")

    def log(self, token: str) -> str:
        """LIST of packed entries: the job's token log. Same TTL as the record."""
        return self._key(f"log:{token}")

    def input(self, block: str) -> str:
        """HASH: a block of inputs: data, until_ms, kept, and the token of each unended job that holds it. A TTL while
        no job does."""
        return self._key(f"input:{block}")

    def tombstone(self, token: str) -> str:
        """STRING with TTL: `of:TENANT` remembers that an ended job existed, longer than its record lives."""
        return self._key(f"tombstone:{token}")

    def ending(self, token: str, blocks: Sequence[str] = ()) -> dict[str, str | list[str]]:
        """The keys of every verb that can end a job, by their declared names; `blocks`: ids of its input's blocks."""
        return {
            "job": self.job(token),
            "log": self.log(token),
            "queue": self.queue,
            "index": self.index,
            "leases": self.leases,
            "outbox": self.outbox,
            "timers": self.timers,
            "tombstone": self.tombstone(token),
            "tally": self.tally,
            "tenants": self.tenants,
            "blocks": [self.input(block) for block in blocks],
        }


def idempotency_key(tenant: str, key: str) -> str:
    """HASH with TTL: which job a caller's Idempotency-Key stands for. Both parts come from outside: they are hashed."""
    digest = hashlib.sha256(f"{len(tenant)}:{tenant}:{key}".encode("utf-8", "surrogatepass")).hexdigest()
    return f"{PREFIX}idempotency:{digest}"


def keys_of(ref: JobRef) -> ModelKeys:
    """The keys of the model that a job belongs to."""
    return ModelKeys(ref.tag)
