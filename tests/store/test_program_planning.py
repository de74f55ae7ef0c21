"""Planners of several processes over a rank whose worker is played: all that a Program needs but an engine."""

from __future__ import annotations

import logging
import time

import pytest

from pool.settings import ModelSettings
from pool.store.connection import Client
from pool.store.nodes import node_of
from pool.store.program_views import MOST_IN_ORDER
from tasks.config import Settings
from tasks.programs import Programs
from tests.program_lines import told
from tests.program_scene import pid
from tests.program_site import HELD, MODEL, Site, tokens_of, with_settings

# -- who becomes active -------------------------------------------------------------------------------------------


def test_a_request_is_planned_for_when_its_process_is_woken(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else is needed; the log tells of it by the stored id, and not by the name."""
    ref = site.scene.arrive("lead")
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.woken()
    assert tokens_of(site.scene.take()) == {ref.token}
    (line,) = [record.getMessage() for record in caplog.records if "program_admit" in record.getMessage()]
    assert f"program={pid('lead')} rank=a reason=fits used_tokens=0 required_tokens=200" in line
    assert "lead" not in line
    assert site.scene.store.dirty() == []


def test_a_large_program_starts_in_a_flood_of_small_ones(site: Site) -> None:
    """The flood would keep the rank full for ever: whoever ends makes room for one more small one. From half of its
    force wait on, room is kept for the large one."""
    scene = site.scene
    names = iter(f"small-{number}" for number in range(1000))
    for _ in range(8):
        scene.arrive(next(names), tokens=20)
    site.woken()
    running = scene.take()
    assert len(running) == 8
    large = scene.arrive("large", tokens=700)

    def round_of_the_flood() -> set[str]:
        scene.arrive(next(names), tokens=20)
        scene.end(running.pop(0))
        site.observe("a", 120 * len(running), gone=tuple(scene.upkeep.leaving("a")))
        site.woken()
        new = scene.take()
        running.extend(new)
        return tokens_of(new)

    begun = [round_of_the_flood() for _ in range(10)]
    assert all(len(tokens) == 1 and large.token not in tokens for tokens in begun)
    # Half of its force wait is over.
    site.seconds_pass("large", "queued_ms", seconds=310)
    begun = [round_of_the_flood() for _ in range(8)]
    assert large.token in set.union(*begun)
    for handout in running:
        scene.end(handout)


@with_settings(metrics_interval_seconds=60)
def test_the_end_of_a_hold_is_waited_for_where_requests_complete(site: Site) -> None:
    """It is mostly sooner than a tick. The process that completed one looks again then; others need not wake."""
    scene = site.scene
    serving, other = site.programs[0], site.process()
    scene.arrive("lead")
    site.woken()
    (running,) = scene.take()
    scene.end(running, ttl_ms=30_000)
    serving.completed(MODEL, "a", pid("lead"))
    site.woken()
    other.turn([], [MODEL])
    assert 0 < serving._again_s[MODEL] - time.monotonic() <= 30
    assert other._again_s == {}
    assert scene.field("lead", "state") == "active"
    scene.due("ttl", "lead")
    site.woken()
    assert scene.field("lead", "state") == "paused"
    assert MODEL not in serving._again_s


@with_settings(token_capacity_per_dp_rank=None, max_active_programs_per_target=100)
def test_all_who_may_become_active_in_one_turn(site: Site) -> None:
    """Also where they are more than one plan can carry out, and than a snapshot shows."""
    for number in range(70):
        site.scene.arrive(f"agent-{number}")
    site.woken()
    assert site.scene.book()["active"] == "70"


@with_settings(resume_order="fcfs")
def test_those_behind_many_who_do_not_fit_are_looked_at(site: Site) -> None:
    """Each of those that a snapshot shows which becomes active makes it show one more."""
    for number in range(MOST_IN_ORDER - 1):
        site.scene.arrive(f"large-{number}", tokens=2000)
    for number in range(3):
        site.scene.arrive(f"small-{number}")
    site.woken()
    assert site.scene.book()["active"] == "3"


@with_settings(binding_only=True, token_capacity_per_dp_rank=150)
def test_where_programs_are_only_bound_all_become_active(site: Site) -> None:
    """Whatever there is of room; those that wait because their rank was lost as soon as another one is up."""
    scene = site.scene
    refs = [scene.arrive("lead"), scene.arrive("other")]
    assert tokens_of(scene.take()) == {ref.token for ref in refs}
    site.die("a")
    site.join("b", "second")
    site.tick()
    assert tokens_of(scene.take("b")) == {ref.token for ref in refs}


# -- who gives way ------------------------------------------------------------------------------------------------


def test_holds_end_at_ticks(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Its KV counts until the engine reports it gone; then another takes the room."""
    scene = site.scene
    scene.arrive("lead", tokens=600)
    site.woken()
    scene.end(*scene.take(), context_tokens=610, **HELD)
    other = scene.arrive("other", tokens=500)
    site.woken()
    assert scene.take() == []
    scene.due("ttl", "lead")
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.tick()
    line = f"program_pause model=tiny program={pid('lead')} rank=a reason=ttl_expired"
    assert [line in record.getMessage() for record in caplog.records] == [True]
    assert scene.take() == []
    site.observe("a", 0, gone=(pid("lead"),))
    site.woken()
    assert tokens_of(scene.take()) == {other.token}


def test_overflow_by_one_token_pauses_one_program(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """The rank held exactly what it can; then the engine reports one token more."""
    scene = site.scene
    for name in ("one", "two", "three", "four"):
        scene.arrive(name, tokens=150)
    site.woken()
    for handout in scene.take():
        scene.end(handout, context_tokens=150, **HELD)
    site.observe("a", 1000)
    site.tick()
    assert scene.book()["active"] == "4"
    site.observe("a", 1001)
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.tick()
        site.tick()
    assert scene.book()["active"] == "3"
    (line,) = [record.getMessage() for record in caplog.records]
    assert "program_pause" in line and "reason=capacity_repair tokens=250" in line


def test_a_running_program_is_marked_and_pauses_when_idle(site: Site) -> None:
    """Others may not take the room before."""
    scene = site.scene
    scene.arrive("lead", tokens=300)
    scene.arrive("other", tokens=300)
    site.woken()
    handouts = scene.take()
    site.observe("a", 1100)
    site.tick()
    marked = [name for name in ("lead", "other") if scene.field(name, "mark")]
    assert len(marked) == 1
    for handout in handouts:
        scene.end(handout, context_tokens=310, **HELD)
    assert [name for name in ("lead", "other") if scene.field(name, "state") == "paused"] == marked


@with_settings(max_segment_rounds=2)
def test_a_program_yields_when_its_segment_is_over(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """To one that waits and does not fit beside it; the process where the request completed looks after it."""
    scene, (process,) = site.scene, site.programs
    scene.arrive("lead", tokens=600)
    site.woken()
    scene.end(*scene.take(), context_tokens=610, **HELD)
    other = scene.arrive("other", tokens=500)
    process.completed(MODEL, "a", pid("lead"))
    site.woken()
    assert scene.field("lead", "state") == "active"
    scene.arrive("lead", tokens=620)
    scene.end(*scene.take(), context_tokens=630, **HELD)
    process.completed(MODEL, "a", pid("lead"))
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.woken()
    assert (scene.field("lead", "state"), scene.field("lead", "yielded")) == ("paused", "1")
    assert "reason=max_segment_yield" in caplog.records[0].getMessage()
    site.observe("a", 0, gone=(pid("lead"),))
    site.woken()
    assert tokens_of(scene.take()) == {other.token}


def test_hints_hold_a_quarter_of_a_rank(site: Site) -> None:
    """What is beyond ends at a tick, though nobody waits and there is room."""
    scene = site.scene
    for name in ("one", "two"):
        scene.arrive(name, tokens=50)
    site.woken()
    for handout in scene.take():
        scene.end(handout, context_tokens=60, ttl_ms=60_000)
    site.tick()
    assert scene.book()["active"] == "1"


# -- nothing to do ------------------------------------------------------------------------------------------------


def test_a_rank_that_is_away_is_not_planned_for_again_and_again(site: Site) -> None:
    """It stays dirty, as something waits there; but nobody looks at it again before the next tick."""
    scene = site.scene
    site.die("a")
    site.tick()
    scene.arrive("lead")
    for _ in range(2):
        assert site.programs[0].turn([], [MODEL]) == set()
    site.tick()
    assert scene.store.dirty() == ["a"]


def test_without_programs_a_look_is_all(site: Site, client: Client) -> None:
    """No process asks for more than three commands and the time; a rank that changed is settled, once."""
    scene = site.scene
    site.tick()
    assert scene.store.dirty() == []
    scene.client.delete(scene.keys.members)
    client.config_resetstat()
    site.programs[0].turn([MODEL])
    used = {name: stats["calls"] for name, stats in node_of(client, scene.keys.queue).info("commandstats").items()}
    assert {name: calls for name, calls in used.items() if "config" not in name} == {
        "cmdstat_zrange": 3,
        "cmdstat_time": 1,
    }


def test_a_broken_model_leaves_others_alone(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """And its own planning goes on when it is whole again. What is told shows no values."""
    scene = site.scene
    configured = Settings(
        programs=scene.settings,
        models={name: ModelSettings(source="random:tiny") for name in ("broken", MODEL)},
    )
    process = Programs(scene.client, scene.jobs, configured, terms=scene.terms)
    scene.client.set(process.store("broken").keys.members, "no set")
    ref = scene.arrive("lead")
    process.turn(["broken", MODEL])
    process.turn(["broken", MODEL])
    assert tokens_of(scene.take()) == {ref.token}
    assert [line.values["model"] for line in told(caplog, "program_planning_failed")] == ["broken"]
    scene.client.delete(process.store("broken").keys.members)


# -- how long a request waits -------------------------------------------------------------------------------------


@with_settings(queue_timeout_seconds=100.0, force_resume_timeout_seconds=40.0)
def test_a_deadline_shortens_what_an_arrival_is_told(site: Site) -> None:
    """Both waits; a longer one changes nothing."""
    process = site.programs[0]
    times = process.arrival_times(MODEL, "a")
    assert (times.force_ms, times.deadline_ms, times.queue_timeout_ms) == (40_000, 0, 100_000)
    times = process.arrival_times(MODEL, "a", deadline_seconds=20)
    assert (times.force_ms, times.deadline_ms, times.queue_timeout_ms) == (40_000, 20_000, 20_000)
    assert process.arrival_times(MODEL, "a", deadline_seconds=500) == process.arrival_times(MODEL, "a")
    assert process.arrival_times(MODEL, "a", deadline_seconds=0).queue_timeout_ms == 1
