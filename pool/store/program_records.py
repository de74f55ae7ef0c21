"""What is stored of a Program, as values: what a request brings, and the record as the rules see it.

The record is a HASH with short names: a million of them are kept.

* fixed with the generation: `tenant name parent root blocks gen`, `key` where hashing goes by another one than `name`
* copied from the settings at each arrival, so that no other verb needs them: `buf` (decode_buffer_tokens), `mru`
  (resume_order), `win` (stats_window_size), `keep` (paused_retention_ttl, ms), `bind` (binding_only), `patience` (the
  force wait, ms)
* where it is: `state status rank`; `seat`, the process of the rank that its place is with; `epoch`; `inflight`, jobs
  with the rank; `private`, what the ledger counts for it
* tokens: `ctx`, `falls` (1 after a smaller observation), `shared` until `fresh_ms`, `reserved` for the job
  `reserver`, `prompt` (its last)
* its segment: `was` (ever active), `rounds`, `segment` (since it was paused by TTL), `activated_ms`, `yielded`,
  `mark` (pause when idle), `finish_ms`, `impact_us` (what a miss of its next request would cost), `completed`,
  `ttl_ms`, `auto_ms` (end of the automatic part of the hold)
* while it waits: `standing` (in the order, to which the id is added), `queued_ms prio expected force_ms`
* else: `ending`: it is over when its jobs are; `last`, the job that came last, if it said that it is the last one;
  `step` of its last request
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pool.program_settings import ProgramSettings
from pool.rules.programs.facts import Program, State, Status, Waiting
from pool.store.scripts import Value


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request brings for its Program.

    `name`: the Program's id as its tenant knows it, and `key`, what consistent hashing goes by, "" for the name;
    `tokens`: of the prompt, an estimate; `force_ms`: after which it resumes by force if it begins to wait now;
    `deadline_ms`: the same by its own deadline, 0 for none; `parent` and `root`: ids as stored, "" for none; `step`:
    None to go on counting; `retention_ms`: how long its place shall be kept afterwards, None to leave that to the
    statistics; `ends`: the Program is over when it has completed; `max_programs`: that the tenant may have, 0 for any;
    `prompt_bytes`: of the prompt's JSON, which its count of tokens is compared with; `waits_by_deadline`: the job's
    queue timeout is its deadline; `outgrown`: what the Program had before counts no more, as no rank could hold it.
    """

    tenant: str
    name: str
    tokens: int
    force_ms: int
    deadline_ms: int = 0
    priority: int = 0
    expected_tokens: int | None = None
    retention_ms: int | None = None
    ends: bool = False
    parent: str = ""
    root: str = ""
    blocks_parent: bool = False
    step: int | None = None
    key: str = ""
    max_programs: int = 0
    prompt_bytes: int = 0
    waits_by_deadline: bool = False
    outgrown: bool = False

    def first(self) -> list[Value]:
        """The fields of a record that does not change, as name, value ..."""
        pairs: dict[str, Value] = {"tenant": self.tenant, "name": self.name, "blocks": int(self.blocks_parent)}
        key = "" if self.key == self.name else self.key
        pairs |= {name: value for name, value in (("parent", self.parent), ("root", self.root), ("key", key)) if value}
        return [item for pair in pairs.items() for item in pair]

    def facts(self, settings: ProgramSettings) -> list[Value]:
        """The fields that each arrival brings, as name, value ..."""
        pairs: dict[str, Value] = {
            "buf": settings.decode_buffer_tokens,
            "mru": int(settings.resume_order == "mru"),
            "win": settings.stats_window_size,
            "keep": round(settings.paused_retention_ttl_seconds * 1000),
            "bind": int(settings.binding_only),
            "step": -1 if self.step is None else self.step,
        }
        if self.outgrown:
            pairs["ctx"] = self.tokens
        return [item for pair in pairs.items() for item in pair]

    def job_fields(self) -> list[Value]:
        """What the job's own record keeps of it, as name, value ..."""
        pairs: dict[str, Value] = {}
        if self.retention_ms is not None:
            pairs["retention_ms"] = self.retention_ms
        if self.ends:
            pairs["ends"] = 1
        if self.prompt_bytes:
            pairs["prompt_bytes"] = self.prompt_bytes
        if self.waits_by_deadline:
            pairs["waits_by_deadline"] = 1
        return [item for pair in pairs.items() for item in pair]


@dataclass(frozen=True, slots=True)
class Stored:
    """A record as it is stored. Absent numbers read as 0."""

    id: str
    fields: Mapping[str, str]

    def number(self, name: str) -> int:
        """A field's number, 0 where it is absent."""
        return int(self.fields.get(name, 0))

    def text(self, name: str) -> str:
        """A field's text, "" where it is absent."""
        return self.fields.get(name, "")

    def known(self, name: str) -> int | None:
        """A field's number, None where it is absent."""
        return int(self.fields[name]) if name in self.fields else None

    def program(self, awaited_by: tuple[str, ...] = ()) -> Program:
        """As the rules see it. `awaited_by`: its ancestors, which are in no single record."""
        return Program(
            id=self.id,
            state=State(self.text("state")),
            status=Status(self.text("status")),
            rank=self.text("rank"),
            context_tokens=self.number("ctx"),
            shared_prefix_tokens=self.number("shared"),
            reserved_output_tokens=self.known("reserved"),
            prompt_tokens=self.number("prompt"),
            was_active=bool(self.number("was")),
            last_finish_ms=self.number("finish_ms"),
            rounds=self.number("rounds"),
            activated_ms=self.number("activated_ms"),
            yielded=bool(self.number("yielded")),
            pause_when_idle=bool(self.number("mark")),
            waiting=self._waiting(),
            held_by_hint_ms=self._held_by_hint_ms(),
            awaited_by=awaited_by,
        )

    def _waiting(self) -> Waiting | None:
        if "standing" not in self.fields:
            return None
        return Waiting(
            queued_ms=self.number("queued_ms"),
            force_ms=self.number("force_ms"),
            priority=self.number("prio"),
            expected_output_tokens=self.known("expected"),
        )

    def _held_by_hint_ms(self) -> int | None:
        automatic_ms = self.known("auto_ms")
        return None if automatic_ms is None or automatic_ms >= self.number("ttl_ms") else automatic_ms


def stored_of(program: str, values: Mapping[bytes, bytes]) -> Stored | None:
    """A record as HGETALL gives it, None where there is none."""
    if b"state" not in values:
        return None
    return Stored(program, {name.decode(): value.decode("utf-8", "surrogatepass") for name, value in values.items()})
