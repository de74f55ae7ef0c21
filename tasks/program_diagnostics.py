"""What `GET /scheduling/diagnostics` and `genpool programs` show: how each rank stands, what is decided about single
Programs, and why. Read from the state server, so every process says the same; changes nothing.

Everything is bounded: a look at a million Programs shows the first of those that wait, then active and idle ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pool.program_settings import ProgramSettings
from pool.rules.programs.admission import Decision
from pool.rules.programs.capacity import is_fresh, usage
from pool.rules.programs.resume import plan_rank
from pool.rules.programs.tokens import private_tokens
from pool.rules.programs.windows import target_rounds
from pool.store.connection import state_errors
from pool.store.program_records import Stored, stored_of
from pool.store.program_views import Snapshot
from pool.store.programs import ProgramStore

#: Waiting Programs of a rank whose requests are counted one by one, and events that are looked through for reasons.
MOST_COUNTED = 1000
MOST_EVENTS = 1000


@dataclass(frozen=True, slots=True)
class RankFacts:
    """A rank. Tokens are of KV; `capacity_tokens`: None where only the number of Programs is bounded;
    `observation_age_seconds`: None without one; `target_rounds`: 0 while the statistics are cold; `queue_size`:
    Programs that wait for it; `retained_requests`: requests in the pools of its Programs."""

    id: str
    up: bool
    active_programs: int
    reasoning_programs: int
    queue_size: int
    retained_requests: int
    capacity_tokens: int | None
    used_tokens: int
    ledger_tokens: int
    leaving_tokens: int
    capacity_accounting_source: str
    observation_age_seconds: float | None
    observation_fresh: bool
    observed_tokens: int | None
    engine_running: int | None
    engine_waiting: int | None
    target_rounds: int
    mean_growth_tokens: float | None
    throughput_per_second: float | None
    statistics_full: bool
    last_admission: Mapping[str, int] | None


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """A Program, by its stored id; `owner` and `name` as its owner knows it, None unless they were asked for. `reason`:
    of the decision that is due now for one that waits, else of its last transition; `ttl_left_seconds`: until its
    place or, paused, all of it goes; None while it has work. `decision`: the numbers of that decision, None for
    others."""

    id: str
    owner: str | None
    name: str | None
    generation: int
    epoch: int
    state: str
    status: str
    rank: str
    parent: str
    blocks_parent: bool
    step: int
    context_tokens: int
    shared_prefix_tokens: int
    private_tokens: int
    in_flight: int
    waiting_requests: int
    priority: int
    rounds: int
    segment_rounds: int
    yielded: bool
    pause_when_idle: bool
    ttl_left_seconds: float | None
    queue_age_seconds: float | None
    force_in_seconds: float | None
    transition: str | None
    reason: str | None
    decision: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """A model's Programs. `programs_total`: all there are; `programs`: those that are shown."""

    model: str
    settings: Mapping[str, Any]
    programs_total: int
    retained_requests: int
    ranks: Sequence[RankFacts]
    programs: Sequence[ProgramFacts]


def diagnose(store: ProgramStore, model: str, *, limit: int, names: bool = False) -> ModelFacts:
    """One model. `limit`: Programs that are shown; `names`: also what their owners call them.

    Raises StateUnavailable.
    """
    with state_errors():
        client, keys = store.client, store.keys
        pipe = client.pipeline(transaction=False)
        pipe.zrange(keys.members, 0, -1)
        pipe.hvals(keys.owners)
        members, owners = pipe.execute()
        # Programs that no rank could be found for are bound to none.
        seen = {rank: store.snapshot(rank) for rank in ["", *(member.decode() for member in members)]}
        ranks = [_rank(store, snapshot) for snapshot in seen.values() if snapshot.rank.id or snapshot.rank.waiting]
        decisions = {
            decision.program: decision
            for snapshot in seen.values()
            for decision in plan_rank(snapshot.rank, store.settings, snapshot.now_ms, MOST_COUNTED).decisions
        }
        return ModelFacts(
            model=model,
            settings=store.settings.model_dump(exclude={"models"}),
            programs_total=sum(map(int, owners)),
            retained_requests=sum(rank.retained_requests for rank in ranks),
            ranks=ranks,
            programs=_programs(store, seen, decisions, limit, names=names),
        )


def _rank(store: ProgramStore, snapshot: Snapshot) -> RankFacts:
    rank, settings, now_ms = snapshot.rank, store.settings, snapshot.now_ms
    used, seen, means = usage(rank, settings, now_ms), rank.observation, rank.means
    place = store.keys.place(rank.id)
    pipe = store.client.pipeline(transaction=False)
    pipe.zcard(place["waiting"])
    pipe.zrange(place["waiting"], 0, MOST_COUNTED - 1)
    pipe.hget(place["book"], "admission")
    queue_size, waiting, admission = pipe.execute()
    for program in [*(p.decode() for p in waiting), *(each.id for each in rank.programs)]:
        pipe.llen(store.keys.pool(program))
    return RankFacts(
        id=rank.id,
        up=bool(snapshot.incarnation),
        active_programs=rank.active,
        reasoning_programs=rank.reasoning,
        queue_size=queue_size,
        # Those behind the counted ones wait with one at least.
        retained_requests=sum(pipe.execute()) + queue_size - len(waiting),
        capacity_tokens=rank.capacity_tokens,
        used_tokens=used.used_tokens,
        ledger_tokens=rank.ledger_tokens,
        leaving_tokens=rank.leaving_tokens,
        capacity_accounting_source=used.source.value,
        observation_age_seconds=None if used.age_ms is None else used.age_ms / 1000,
        observation_fresh=seen is not None and is_fresh(seen, settings, now_ms),
        observed_tokens=None if seen is None else seen.tokens,
        engine_running=None if seen is None else seen.running,
        engine_waiting=None if seen is None else seen.waiting,
        target_rounds=target_rounds(means, settings.max_segment_rounds),
        mean_growth_tokens=means.growth_tokens,
        throughput_per_second=means.throughput_per_s,
        statistics_full=means.full,
        last_admission=_admission(admission),
    )


def _admission(stored: bytes | None) -> dict[str, int] | None:
    if stored is None:
        return None
    return dict(zip(("used_tokens", "required_tokens", "reserve_tokens"), map(int, stored.split()), strict=True))


def _programs(
    store: ProgramStore,
    seen: Mapping[str, Snapshot],
    decisions: Mapping[str, Decision],
    limit: int,
    *,
    names: bool,
) -> list[ProgramFacts]:
    """Those that wait, in their order, then the active ones, then idle ones, those first that go first."""
    client, keys = store.client, store.keys
    active = [program.id for snapshot in seen.values() for program in snapshot.rank.programs]
    pipe = client.pipeline(transaction=False)
    pipe.zrange(keys.program_timers, 0, limit + len(active))
    pipe.xrevrange(keys.program_events, count=MOST_EVENTS)
    pipe.time()
    timers, events, clock = pipe.execute()
    idle = [timer.decode().partition(":")[2] for timer in timers]
    shown = list(dict.fromkeys([*decisions, *active, *idle]))[:limit]
    for program in shown:
        pipe.hgetall(keys.record(program))
        pipe.llen(keys.pool(program))
        pipe.zscore(keys.program_timers, f"retention:{program}")
    replies = pipe.execute()
    last = {
        fields[b"program"].decode(): (fields[b"what"].decode(), fields[b"reason"].decode())
        for _, fields in reversed(events)
    }
    now_ms = clock[0] * 1000 + clock[1] // 1000
    return [
        _program(
            stored,
            store.settings,
            decisions.get(program),
            waiting=waiting,
            gone_ms=gone_ms,
            last=last.get(program, (None, None)),
            now_ms=now_ms,
            names=names,
        )
        for program, values, waiting, gone_ms in zip(shown, replies[::3], replies[1::3], replies[2::3], strict=True)
        if (stored := stored_of(program, values)) is not None
    ]


def _program(
    stored: Stored,
    settings: ProgramSettings,
    decision: Decision | None,
    *,
    waiting: int,
    gone_ms: float | None,
    last: tuple[str | None, str | None],
    now_ms: int,
    names: bool,
) -> ProgramFacts:
    program = stored.program()
    ends_ms = stored.known("ttl_ms") or gone_ms
    front = program.waiting
    transition, reason = last
    return ProgramFacts(
        id=stored.id,
        owner=stored.text("tenant") if names else None,
        name=stored.text("name") if names else None,
        generation=stored.number("gen"),
        epoch=stored.number("epoch"),
        state=program.state.value,
        status=program.status.value,
        rank=program.rank,
        parent=stored.text("parent"),
        blocks_parent=bool(stored.number("blocks")),
        step=stored.number("step"),
        context_tokens=program.context_tokens,
        shared_prefix_tokens=program.shared_prefix_tokens,
        private_tokens=private_tokens(program, settings.decode_buffer_tokens),
        in_flight=stored.number("inflight"),
        waiting_requests=waiting,
        priority=0 if front is None else front.priority,
        rounds=program.rounds,
        segment_rounds=stored.number("segment"),
        yielded=program.yielded,
        pause_when_idle=program.pause_when_idle,
        ttl_left_seconds=None if ends_ms is None else max(ends_ms - now_ms, 0) / 1000,
        queue_age_seconds=None if front is None else max(now_ms - front.queued_ms, 0) / 1000,
        force_in_seconds=None if front is None else (front.force_ms - now_ms) / 1000,
        transition=transition,
        reason=reason if decision is None else decision.reason.value,
        decision=None if decision is None else _decision(decision),
    )


def _decision(decision: Decision) -> dict[str, Any]:
    gain = decision.gain
    return {
        "admitted": decision.admitted,
        "reason": decision.reason.value,
        "rank": decision.rank,
        "active_programs": decision.active,
        "used_tokens": decision.used_tokens,
        "counted_tokens": round(decision.counted_tokens, 3),
        "required_tokens": decision.required_tokens,
        "reserve_tokens": round(decision.reserve_tokens, 3),
        "limit_tokens": decision.limit_tokens,
        "lacking_tokens": round(decision.lacking_tokens, 3),
        # A loss may be infinite, which JSON has no word for.
        "gain": None if gain is None else {n: v if math.isfinite(v) else None for n, v in asdict(gain).items()},
    }
