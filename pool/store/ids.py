"""Public ids. An id carries its model's hash tag, so that any node finds its keys without asking anybody.

    resp_smollm2-135m-instruct.0_1f0c...   kind _ model . shard _ 32 hex digits

Ids that arrive from outside are parsed by one strict pattern; keys are built from the parsed parts only, so no caller's
string ever becomes a key or a pattern. A job has one id: no number is written in two ways, and the kind must be that of
the record (`check_kind`).
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from pool.errors import JobUnknown

MODEL_PATTERN = re.compile(r"[a-z0-9](?:[a-z0-9.-]{0,61}[a-z0-9])?")
_ID = re.compile(
    r"(?P<kind>resp|chatcmpl|cmpl|gen)_"
    rf"(?P<model>{MODEL_PATTERN.pattern})\.(?P<shard>0|[1-9][0-9]{{0,3}})_"
    r"(?P<token>[0-9a-f]{32})"
)

#: The prefix a job's id gets from the door it came through.
KINDS = {"responses": "resp", "chat": "chatcmpl", "completion": "cmpl", "celery": "gen"}


#: What is said of an id that stands for nothing, or for nothing that is the caller's business: always the same words.
UNKNOWN = "No generation has this id."


@dataclass(frozen=True, slots=True)
class JobRef:
    """A parsed id: `model` and `shard` make the hash tag, `token` (32 hex digits) is unique within it."""

    kind: str
    model: str
    shard: int
    token: str

    def __str__(self) -> str:
        return f"{self.kind}_{self.model}.{self.shard}_{self.token}"

    @property
    def tag(self) -> str:
        """The hash tag all keys of this job carry."""
        return f"{self.model}:{self.shard}"


def new_ref(kind: str, model: str, *, token: str | None = None) -> JobRef:
    """A fresh ref for a door in `KINDS`; `token` lets a Celery uuid (its 32 hex digits) become the id."""
    return JobRef(kind=KINDS[kind], model=model, shard=0, token=token or secrets.token_hex(16))


def check_kind(ref: JobRef, door: str) -> None:
    """Raises JobUnknown unless the job, which came through `door`, has this id: keys do not depend on the kind."""
    if KINDS.get(door) != ref.kind:
        raise JobUnknown(UNKNOWN)


def parse_ref(text: str) -> JobRef:
    """Parse an id that came from outside. Raises JobUnknown for anything that genpool cannot have issued."""
    match = _ID.fullmatch(text)
    if match is None:
        raise JobUnknown(UNKNOWN)
    return JobRef(match["kind"], match["model"], int(match["shard"]), match["token"])
