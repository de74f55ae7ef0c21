"""What the loop does with an engine's KV: what sessions begin with, who gives way for whom, and that no token changes.

The engine keeps tokens for KV in a real BlockPool, so what is shared, saved or given up wrongly shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from pool.errors import ConfigurationError
from pool.rules.batching import MAX_MISSES, MAX_PASSES
from pool.rules.kv_blocks import IntegrityError
from tasks.ports import Event, Failed, Finished, Generation, Member, StepResult, TokenIds
from tests.engine.looping import SEEDED, finished, generation, looped, run, tokens_of, undisturbed
from tests.scripted.blocks import BlockEngine
from workers.loop import BatchingLoop
from workers.residence import PrefixReuse


def words(count: int, *, seed: int = 0) -> list[int]:
    """Token ids of a prompt."""
    return np.random.default_rng(seed).integers(17, 400, count).tolist()


def alone(given: Generation, **engine: Any) -> list[int]:
    """The only choice's tokens when nothing else is there."""
    return undisturbed(BlockEngine(**engine), given)[0]


# --- what sessions begin with


@pytest.mark.parametrize(
    ("reuse", "recompute_exact", "cached"),
    [("exact", False, 48), ("exact", True, 64), ("all", False, 64), ("all", True, 64), ("off", True, 0)],
)
def test_the_next_turn_begins_with_the_one_before(reuse: PrefixReuse, recompute_exact: bool, cached: int) -> None:
    """53 prompt tokens and 15 fed ones of output are 48 and 64 in whole blocks. Generated tokens' KV is found only
    where it is as good as prefilled, or where that is wanted; what is exact changes no token."""
    loop = looped(BlockEngine(recompute_exact=recompute_exact), reuse=reuse)
    loop.submit(generation("first", words(53), max_tokens=16))
    said = tokens_of(run(loop), "first")
    turn = generation("second", [*words(53), *said, *words(5, seed=1)])
    loop.submit(turn)
    events = run(loop)
    assert finished(events, "second").cached_tokens == cached
    assert loop.telemetry()["prompt_tokens_cached_total"] == cached
    if recompute_exact or reuse != "all":
        assert tokens_of(events, "second") == alone(turn, recompute_exact=recompute_exact)


def test_nothing_is_shared_between_tenants() -> None:
    """Another's prompt, token by token the same, is computed anew; the own one is not."""
    loop = looped(BlockEngine())
    cached = []
    for job, tenant in (("a", "one"), ("b", "two"), ("c", "one"), ("d", "")):
        loop.submit(generation(job, words(50), tenant=tenant))
        cached.append(finished(run(loop), job).cached_tokens)
    assert cached == [0, 0, 48, 0]


@pytest.mark.parametrize("share", [True, False])
def test_choices_compute_their_prompt_once(share: bool) -> None:
    """Where the engine can share: the others wait for the first, and compute only what lies behind the last whole
    block. The job's cached tokens are the first's."""
    loop = looped(BlockEngine(prefix_share=share), limit=8)
    job = generation("a", words(100), n=4, sampling=SEEDED)
    loop.submit(job)
    events = run(loop)
    assert loop.telemetry()["prefill_tokens_total"] == (100 + 3 * 4 if share else 400)
    assert finished(events).cached_tokens == 0
    assert [tokens_of(events, "a", choice) for choice in range(4)] == undisturbed(BlockEngine(), job)


def test_choices_whose_first_has_ended_in_its_log_do_not_wait_for_it() -> None:
    """The first that still runs computes the prompt."""
    job = generation("a", words(100), n=3, sampling=SEEDED)
    streams = undisturbed(BlockEngine(), job)
    loop = looped(BlockEngine())
    loop.submit(generation("a", words(100), n=3, sampling=SEEDED, attempt=2, replay=(tuple(streams[0]), (), ())))
    events = run(loop)
    assert [tokens_of(events, "a", choice) for choice in range(3)] == [[], *streams[1:]]
    assert loop.telemetry()["prefill_tokens_total"] == 104


def test_a_takeover_feeds_its_log_in_chunks_where_that_is_exact() -> None:
    """An engine that recomputes exactly takes a long log at once; another one row by row. Both go on alike."""
    for recompute_exact, ticks in ((True, 20), (False, 60)):
        whole = generation("a", words(20), max_tokens=60)
        stream = alone(whole, recompute_exact=recompute_exact)
        loop = looped(BlockEngine(recompute_exact=recompute_exact), max_prefill_tokens_per_tick=512)
        loop.submit(generation("a", words(20), max_tokens=60, attempt=2, replay=(tuple(stream[:40]),)))
        assert tokens_of(run(loop)) == stream[40:]
        assert loop.telemetry()["ticks"] == ticks


# --- preemption


KINDS = {
    "saved": {"recompute_exact": False, "snapshot": True},
    "recomputed": {"recompute_exact": True, "snapshot": False},
    "either": {"recompute_exact": True, "snapshot": True},
}


@pytest.mark.parametrize("kind", KINDS)
def test_over_committed_sessions_give_way_and_come_back(kind: str) -> None:
    """Six sessions of up to 80 positions in a room of 192: all begin, the youngest are paused as the room runs out, the
    oldest never is, and every stream is the one that it would be alone."""
    given = [generation(f"job-{index}", words(20 + index, seed=index), max_tokens=60 - index) for index in range(6)]
    loop = looped(BlockEngine(blocks=12, **KINDS[kind]), kv_overcommit=4.0)
    for each in given:
        loop.submit(each)
    events: list[Event] = []
    while loop.capacity().in_flight:
        report = loop.tick()
        events += report.events
        loop.engine.check_integrity()
        oldest = min(loop._scheduler._jobs.values(), key=lambda job: job.sessions[0].arrival, default=None)
        assert oldest is None or oldest.sessions[0].phase != "waiting"
    for each in given:
        assert tokens_of(events, each.job) == alone(each, **KINDS[kind])
    telemetry = loop.telemetry()
    assert telemetry["preempted_total"] > 0
    assert (telemetry["cache_misses_total"], telemetry["completed_sessions"]) == (0, 6)


def test_without_over_commit_nobody_gives_way() -> None:
    """Each has all it may need from the start, so fewer run at once."""
    loop = looped(BlockEngine(blocks=12))
    for index in range(6):
        loop.submit(generation(f"job-{index}", words(20, seed=index), max_tokens=60))
    assert len(loop.tick().promoted) == 2
    run(loop)
    assert loop.telemetry()["preempted_total"] == 0


def test_over_commit_needs_an_engine_whose_sessions_can_come_back() -> None:
    """One that can neither save nor exactly recompute is refused by name."""
    engine = BlockEngine(recompute_exact=False, snapshot=False)
    with pytest.raises(ConfigurationError, match=r"^kv_overcommit: must be 1") as refused:
        looped(engine, kv_overcommit=1.5)
    assert refused.value.param == "kv_overcommit"
    looped(engine)


class Forgetful(BlockEngine):
    """Saving raises, or what was saved can never be restored, or a session's KV is lost in every step, or in every one
    but its first."""

    fault = ""

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        if self.fault == "save":
            raise MemoryError
        return super().snapshot(session, epoch)

    def restore(self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = "") -> bool:
        return self.fault != "restore" and super().restore(session, epoch, blob, prompt, positions, scope)

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        if self.fault == "lose" or (self.fault == "lose later" and batch[0].start):
            for member in batch:
                self.release(member.session, member.epoch)
        return super().step(batch)


@pytest.mark.parametrize("fault", ["save", "restore"])
def test_a_live_session_is_never_lost(fault: str) -> None:
    """Where it cannot be saved or restored, it is fed again, as in a takeover: the same tokens."""
    given = [generation(f"job-{index}", words(20, seed=index), max_tokens=60) for index in range(4)]
    engine = Forgetful(blocks=12, recompute_exact=False)
    engine.fault = fault
    loop = looped(engine, kv_overcommit=4.0)
    for each in given:
        loop.submit(each)
    events = run(loop)
    assert [tokens_of(events, each.job) for each in given] == [alone(each, recompute_exact=False) for each in given]
    assert loop.telemetry()["preempted_total"] > 0


@pytest.mark.parametrize("fault", ["lose", "lose later"])
def test_kv_that_is_lost_again_and_again_fails_the_job_by_name(fault: str) -> None:
    """A bounded number of steps, not for ever, also when some of them get on, but never further than before."""
    engine = Forgetful(prefix_share=False)
    engine.fault = fault
    loop = looped(engine)
    loop.submit(generation(prompt=words(80)))
    (failure,) = run(loop)
    assert isinstance(failure, Failed)
    assert (failure.code, failure.message) == ("engine_error", "The engine keeps losing its KV.")
    assert loop.telemetry()["cache_misses_total"] == MAX_MISSES + 1


# --- heads of the queue that do not fit


def held_up(loop: BatchingLoop) -> None:
    """A long session runs, and a large one waits for its room, with free slots: `long` and `large`. The prompt of
    words(100) is here."""
    loop.submit(generation("before", words(100), max_tokens=1))
    run(loop)
    loop.submit(generation("long", words(16, seed=1), max_tokens=200))
    loop.submit(generation("large", words(340, seed=2), max_tokens=4))
    assert loop.tick().promoted == ["long/0"]


def test_a_resident_turn_passes_a_head_that_does_not_fit() -> None:
    """Its KV is here; another of the same size waits. Nobody's tokens change, and the head runs when it can."""
    loop = looped(BlockEngine(blocks=32))
    held_up(loop)
    turn = generation("turn", [*words(100), *words(9, seed=3)])
    loop.submit(generation("cold", words(109, seed=4)))
    loop.submit(turn)
    report = loop.tick()
    assert report.promoted == ["turn/0"]
    events = [*report.events, *run(loop)]
    assert finished(events, "turn").cached_tokens == 96
    assert tokens_of(events, "turn") == alone(turn)
    ends = [event.job for event in events if isinstance(event, Finished)]
    assert ends.index("turn") < ends.index("long") < ends.index("large")


def test_a_head_is_not_passed_for_ever() -> None:
    """However many resident turns come, only so many pass."""
    loop = looped(BlockEngine(blocks=32))
    held_up(loop)
    promoted: list[str] = []
    for number in range(2 * MAX_PASSES):
        loop.submit(generation(f"turn-{number}", words(100), max_tokens=2))
        promoted += loop.tick().promoted
        promoted += loop.tick().promoted
    assert len(promoted) == MAX_PASSES
    events = run(loop)
    assert sum(isinstance(event, Finished) for event in events) == 2 + MAX_PASSES


def test_a_head_has_those_exported_that_passed_it_and_are_not_in_the_batch() -> None:
    """Two turns passed the head, and one of them waits while the batch is the other's: its KV is saved, the head fits
    and runs, and the turn goes on behind it."""
    loop = looped(BlockEngine(blocks=32), max_batch_size=1, limit=5)
    held_up(loop)
    turns = [generation(f"turn-{number}", [*words(100), number + 20], max_tokens=40) for number in range(2)]
    for turn in turns:
        loop.submit(turn)
    events: list[Event] = []
    while loop.telemetry()["active_sessions"] < 3:
        events += loop.tick().events
    loop.cancel("long", 1)
    seen: list[str] = []
    while loop.capacity().in_flight:
        report = loop.tick()
        events += report.events
        seen += report.promoted
    assert seen[0] == "large/0"
    assert loop.telemetry()["preempted_total"] == 1
    assert [tokens_of(events, turn.job) for turn in turns] == [alone(turn) for turn in turns]


# --- what is kept for holders


def test_what_a_holder_keeps_is_given_up_only_for_one_that_could_never_run() -> None:
    """A Program's KV outlives its request whatever else needs room, except the only one that wants to run at all."""
    loop = looped(BlockEngine(blocks=16))
    loop.submit(generation("a", words(100), max_tokens=2, holder="program-1"))
    loop.submit(generation("b", words(60, seed=1), max_tokens=2, holder="program-2"))
    run(loop)
    assert loop.telemetry()["kv_pinned_bytes"] == 96 + 48
    loop.submit(generation("small", words(90, seed=2), max_tokens=2))
    run(loop)
    assert loop.telemetry()["kv_pinned_bytes"] == 96 + 48
    loop.submit(generation("large", words(150, seed=3), max_tokens=20))
    run(loop)
    assert loop.telemetry()["kv_pinned_bytes"] == 48, "the one that was used longest ago"
    loop.drop_holder("program-2")
    loop.tick()
    assert loop.telemetry()["kv_pinned_bytes"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_holders_and_other_jobs_never_stop_each_other(seed: int) -> None:
    """However full what is kept for holders makes the engine, all jobs end, with the tokens they have alone: a job of
    nobody waits at most until nobody runs, and then what was unused longest is given up."""
    rng = np.random.default_rng(seed)
    loop = looped(BlockEngine(blocks=16), kv_overcommit=2.0)
    given = [
        generation(
            f"job-{number}",
            words(int(rng.integers(20, 180)), seed=number),
            max_tokens=int(rng.integers(2, 40)),
            holder=f"program-{number % 5}" if number % 2 else "",
        )
        for number in range(24)
    ]
    for each in given:
        loop.submit(each)
    events = run(loop)
    assert [tokens_of(events, each.job) for each in given] == [alone(each) for each in given]


def test_nothing_is_kept_for_a_holder_that_could_not_find_it() -> None:
    """Where nobody begins with anything."""
    loop = looped(BlockEngine(), reuse="off")
    loop.submit(generation("a", words(100), max_tokens=2, holder="program"))
    run(loop)
    assert loop.telemetry()["kv_pinned_bytes"] == 0


def test_a_job_that_stops_at_fault_keeps_nothing() -> None:
    """What a failed session holds is not trusted; what a cancelled one prefilled is as good as any."""
    loop = looped(BlockEngine())
    loop.submit(generation("a", words(100), max_tokens=50, holder="program"))
    loop.tick()
    loop.tick()
    loop.cancel("a", 1)
    loop.tick()
    assert loop.telemetry()["kv_pinned_bytes"] == 96


# --- engines that raise


class Raising(BlockEngine):
    """One of its methods raises for the session `bad/0`."""

    method = ""

    def _raise(self, method: str, session: str) -> None:
        if (method, session) == (self.method, "bad/0"):
            raise OSError("what it says may hold a prompt")

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        self._raise("begin", session)
        begun = super().begin(session, epoch, prompt, positions, scope)
        self._raise("begin too late", session)
        return begun

    def extend(self, session: str, epoch: int, positions: int) -> bool:
        self._raise("extend", session)
        return super().extend(session, epoch, positions)

    def release(self, session: str, epoch: int, **options: Any) -> None:
        super().release(session, epoch, **options)
        self._raise("release", session)


@pytest.mark.parametrize("method", ["begin", "begin too late", "extend"])
def test_an_engine_that_raises_for_one_session_fails_that_one(method: str) -> None:
    """By name, without what it said; the others' tokens are what they are alone."""
    engine = Raising()
    engine.method = method
    loop = looped(engine, kv_overcommit=2.0)
    for job in ("before", "bad", "behind"):
        loop.submit(generation(job, words(30), max_tokens=30))
    events = run(loop)
    (failure,) = [event for event in events if isinstance(event, Failed)]
    assert (failure.job, failure.message) == ("bad", "The engine failed: OSError.")
    expected = alone(generation("x", words(30), max_tokens=30))
    assert tokens_of(events, "before") == tokens_of(events, "behind") == expected


def test_an_engine_that_cannot_release_costs_no_result() -> None:
    """The session has ended all the same."""
    engine = Raising()
    engine.method = "release"
    loop = looped(engine)
    loop.submit(generation("bad"))
    assert len(tokens_of(run(loop), "bad")) == 8


def test_kv_that_no_session_has_is_found_when_idle() -> None:
    """The books may be right and yet hold what nobody will ever release."""
    loop = looped(BlockEngine())
    loop.engine.begin("stray", 1, np.arange(20, 40, dtype=np.int32), 20)
    with pytest.raises(IntegrityError, match=r"32 positions"):
        loop.check_integrity()


def test_an_engine_that_becomes_another_is_an_error() -> None:
    """Its fingerprint is what its tokens are worth."""
    engine = BlockEngine()
    loop = looped(engine)
    engine.fingerprint = lambda: "another"  # type: ignore[method-assign] # as after a reload
    with pytest.raises(IntegrityError, match="fingerprint"):
        loop.check_integrity()
