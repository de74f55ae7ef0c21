"""How a request of a Program comes in: what it claims is checked, measured, and given to the store with its job.

| checked here, before anything is stored | refused as |
|---|---|
| hints within what the key allows (`claims.check_limits`) | 400 |
| no Program descends from itself, trees have at most 64 levels (`lineage.ancestors`), when a Program begins | 400 |
| it alone needs no more KV than a whole rank has | 400 `program_capacity_exceeded` |

How many Programs the key's owner may have, the store checks in the step in which one begins.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pool.errors import InvalidRequest
from pool.program_settings import CANONICAL_KEY, ProgramSettings
from pool.rules.programs.claims import Claim, Hints, Source, check_limits
from pool.rules.programs.lineage import ancestors
from pool.rules.programs.tokens import arrival_tokens
from pool.store.program_keys import program_id_of
from pool.store.program_records import Arrival, Stored
from pool.store.programs import ProgramStore, ProgramWay
from pool.store.records import NewJob
from tasks.api_keys import KeyLimits
from tasks.programs import Programs

#: Where each source names a parent.
PARENT_FIELDS = {
    Source.AGENTIC_CONTEXT: f"{CANONICAL_KEY}.parent_program_id",
    Source.AGENT_HINT: "agent_hint.parent_session_id",
    Source.CLAUDE_CODE: "x-claude-code-parent-agent-id",
    Source.SESSION_THREAD: "thread-id",
    Source.SESSION: "x-session-id",
}


@dataclass(frozen=True, slots=True)
class Entrance:
    """What the store is told beside the job: what the request brings, and the rank for a Program that is new or whose
    own rank is away, "" for none; `is_up`: whether that rank is."""

    arrival: Arrival
    home: str
    is_up: bool


class ProgramIntake:
    """The way in for requests of Programs, of all models. Thread-safe."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs

    def prepare(self, job: NewJob, claim: Claim, limits: KeyLimits) -> tuple[NewJob, Entrance]:
        """The job with its Program's time limits, and how it comes in. Stores nothing.

        Raises InvalidRequest that names the field and the limit, and StateUnavailable.
        """
        model, hints = job.ref.model, claim.hints
        check_limits(hints, max_priority=limits.max_priority, min_deadline_seconds=limits.min_deadline_seconds)
        store = self._programs.store(model)
        program = program_id_of(job.tenant, claim.identity.program_id)
        stored = store.read(program)
        family = _family(store, job.tenant, program, claim) if stored is None else ()
        prompt_bytes = len(job.input.encode("utf-8", "surrogatepass"))
        tokens = self._tokens(store, job, prompt_bytes)
        outgrown = _outgrown(store.settings, stored, tokens, hints.expected_output_length)
        home, is_up = self._programs.home(
            model,
            key=claim.hash_key,
            prompt_tokens=tokens,
            program=program,
            relatives=tuple(dict.fromkeys([*family[:1], *family[-1:]])),
        )
        arrival = _arrival(job, claim, store.settings, tokens=tokens, prompt_bytes=prompt_bytes, family=family)
        arrival = replace(arrival, max_programs=limits.max_programs or 0, outgrown=outgrown)
        return self._timed(job, Entrance(arrival, home, is_up), stored, hints)

    def submit(self, job: NewJob, entrance: Entrance, *, key: str | None = None) -> ProgramWay:
        """Accept the job, as JobStore.submit does, and have somebody plan. Safe to repeat with the same job."""
        model = job.ref.model
        way = self._programs.store(model).arrive(
            job, entrance.arrival, home=entrance.home, is_up=entrance.is_up, key=key
        )
        self._programs.wake(model)
        return way

    def _tokens(self, store: ProgramStore, job: NewJob, prompt_bytes: int) -> int:
        if job.prompt_tokens is not None:
            return job.prompt_tokens
        return arrival_tokens(prompt_bytes, store.coefficient(job.door))

    def _timed(self, job: NewJob, entrance: Entrance, stored: Stored | None, hints: Hints) -> tuple[NewJob, Entrance]:
        """A deadline shortens both waits: until the Program resumes by force, and until the job is given up, which then
        says that the deadline passed."""
        rank = entrance.home if stored is None else stored.text("rank")
        times = self._programs.arrival_times(job.ref.model, rank, deadline_seconds=hints.deadline_seconds)
        queue_timeout_ms = min(job.queue_timeout_ms, times.queue_timeout_ms)
        arrival = replace(
            entrance.arrival,
            force_ms=min(times.force_ms, queue_timeout_ms),
            deadline_ms=times.deadline_ms,
            waits_by_deadline=0 < times.deadline_ms <= queue_timeout_ms,
        )
        return replace(job, queue_timeout_ms=queue_timeout_ms), replace(entrance, arrival=arrival)


def _arrival(
    job: NewJob, claim: Claim, settings: ProgramSettings, *, tokens: int, prompt_bytes: int, family: tuple[str, ...]
) -> Arrival:
    """`family`: the ancestors of a new Program, its parent first."""
    identity, hints = claim.identity, claim.hints
    kept_s = hints.kv_retention_ttl_seconds
    root = identity.root_program_id
    return Arrival(
        tenant=job.tenant,
        name=identity.program_id,
        tokens=tokens,
        force_ms=0,
        priority=hints.priority,
        expected_tokens=hints.expected_output_length,
        retention_ms=None if kept_s is None else round(min(kept_s, settings.max_kv_retention_ttl_seconds) * 1000),
        ends=identity.ends_program,
        parent=family[0] if family else "",
        root=program_id_of(job.tenant, root) if root is not None else family[-1] if family else "",
        blocks_parent=identity.blocks_parent,
        step=identity.step_id,
        prompt_bytes=prompt_bytes,
        key=claim.hash_key,
    )


def _family(store: ProgramStore, tenant: str, program: str, claim: Claim) -> tuple[str, ...]:
    """The ancestors of a Program that begins, as far as they are known: all of its own tenant."""
    parent = claim.identity.parent_program_id
    if parent is None:
        return ()
    try:
        return ancestors(program, program_id_of(tenant, parent), store.parent_of)
    except InvalidRequest as error:
        field = PARENT_FIELDS[claim.source]
        raise InvalidRequest(f"{field}: {error.message}", param=field) from None


def _outgrown(settings: ProgramSettings, stored: Stored | None, tokens: int, expected: int | None) -> bool:
    """Whether a paused Program could not come back with what it had before, but can with this request alone: an agent
    that has compacted its history. Raises InvalidRequest for what no rank could ever hold."""
    capacity = settings.token_capacity_per_dp_rank
    if capacity is None or settings.binding_only:
        return False
    shared, before = 0, 0
    if stored is not None:
        shared = stored.number("shared")
        before = stored.number("ctx") if stored.text("state") == "paused" else 0
    output = settings.decode_buffer_tokens if expected is None else expected
    is_large = max(before - shared, 0) + output > capacity
    # What waits already waits with what it had.
    context = max(tokens, before) if stored is not None and "standing" in stored.fields else tokens
    needed = max(context - shared, 0) + output
    if needed > capacity:
        raise InvalidRequest(
            f"The Program needs {needed} tokens of KV (context {context}, {shared} of it shared with others, and "
            f"{output} for the output), but one rank holds {capacity}.",
            param="prompt",
            code="program_capacity_exceeded",
        )
    return is_large
