"""Planners of several processes over real ranks, whose workers are played: all that a Program needs but an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from pool.rules.programs.binding import home, ring_of
from pool.rules.programs.windows import RequestSample
from pool.settings import ModelSettings
from pool.store.connection import Client
from pool.store.handouts import Handout
from pool.store.ids import JobRef
from pool.store.program_upkeep import Look
from pool.store.ranks import RankRegistry
from tasks.config import Settings
from tasks.programs import Programs
from tests.builders import LEASE_MS, swept_steadily
from tests.program_scene import Scene, pid, settings
from tests.waiting import wait_until

MODEL = "tiny"
#: How a request ends whose place the statistics keep.
HELD = {"ttl_ms": 60_000, "automatic_ms": 60_000}


@dataclass
class Site:
    """A scene with planners. `lives`: the process of each rank that is registered."""

    scene: Scene
    programs: list[Programs] = field(default_factory=list)

    def process(self) -> Programs:
        """One more process that plans when it is told to."""
        scene = self.scene
        configured = Settings(programs=scene.settings, models={MODEL: ModelSettings(source="random:tiny")})
        made = Programs(scene.client, scene.jobs, configured, terms=scene.terms)
        self.programs.append(made)
        return made

    def join(self, rank: str, incarnation: str) -> None:
        """A process takes a rank and is registered."""
        RankRegistry(self.scene.client, MODEL).beat(rank, incarnation, lease_ms=60_000, facts={})
        self.scene.join(rank, incarnation)

    def die(self, rank: str) -> None:
        """The registration of a rank runs out, and no gap in the sweeps excuses it."""
        self.scene.client.delete(self.scene.keys.rank(rank))
        swept_steadily(self.scene.client)

    def tick(self, process: Programs | None = None) -> None:
        """A tick of one process, by default the first."""
        self.scene.store.unclaim("")
        (process or self.programs[0]).turn([MODEL])

    def woken(self) -> None:
        """A turn of the first process because something has changed."""
        self.programs[0].turn([], [MODEL])

    def observe(self, rank: str, tokens: int, **fields: Any) -> None:
        """The engine of a rank is looked at."""
        seen = self.scene.store.snapshot(rank)
        look = Look(seen.now_ms, seen.rank_set, seen.moved_tokens, tokens, **fields)
        assert self.scene.upkeep.observe(rank, seen.incarnation, look)

    def seconds_pass(self, name: str, *fields: str, seconds: float) -> None:
        """Times of a record lie further back."""
        for each in fields:
            self.scene.client.hincrby(self.scene.keys.record(pid(name)), each, -round(seconds * 1000))


@pytest.fixture
def site(request: pytest.FixtureRequest, client: Client, redis_url: str) -> Iterator[Site]:
    """Rank `a` with a thousand tokens, and one process."""
    fields = {"token_capacity_per_dp_rank": 1000, "stats_window_size": 2} | getattr(request, "param", {})
    made = Site(Scene(client, redis_url, settings(**fields)))
    made.process()
    made.join("a", "first")
    yield made
    for process in made.programs:
        process.stop()
    made.scene.sound()
    made.scene.close()
    client.flushall()


def with_settings(**fields: Any) -> pytest.MarkDecorator:
    """The settings of the site of a test."""
    return pytest.mark.parametrize("site", [fields], indirect=True)


def tokens_of(handouts: list[Handout]) -> set[str]:
    return {handout.lease.token for handout in handouts}


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


@with_settings(token_capacity_per_dp_rank=None, max_active_programs_per_target=100)
def test_all_who_may_become_active_in_one_turn(site: Site) -> None:
    """Also where they are more than one plan can carry out, and than a snapshot shows."""
    for number in range(70):
        site.scene.arrive(f"agent-{number}")
    site.woken()
    assert site.scene.book()["active"] == "70"


@with_settings(resume_order="fcfs")
def test_those_behind_many_who_do_not_fit_are_looked_at(site: Site) -> None:
    """A snapshot shows fifty; each that becomes active shows one more."""
    for number in range(49):
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


# -- ranks --------------------------------------------------------------------------------------------------------


def test_another_rank_takes_over(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the lost one had: running requests, those that were sent and not begun, idle Programs, waiting ones."""
    scene = site.scene
    scene.arrive("idle", tokens=50)
    refs = [scene.arrive("busy", tokens=300)]
    site.woken()
    idle, _ = scene.take()
    scene.end(idle, context_tokens=60, **HELD)
    refs += [scene.arrive("busy", tokens=300), scene.arrive("waits", tokens=600)]
    site.woken()
    site.join("b", "second")
    site.tick()
    assert scene.upkeep.up(["a", "b"]) == {"a": "first", "b": "second"}
    site.die("a")
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.tick(site.process())
    assert [scene.field(name, "rank") for name in ("busy", "waits")] == ["b", "b"]
    assert (scene.field("idle", "state"), scene.book()["active"]) == ("paused", "0")
    told = [record.getMessage() for record in caplog.records]
    assert any("program_rank_lost" in line and "rank=a" in line for line in told)
    assert sum("reason=health_failover" in line for line in told) == 2
    site.woken()
    first = scene.take("b")
    assert tokens_of(first) <= {ref.token for ref in refs}
    while first:
        scene.end(first.pop(0), "b")
        site.observe("b", 0, gone=tuple(scene.upkeep.leaving("b")))
        site.woken()
        first += scene.take("b")
    assert {scene.state(ref) for ref in refs} == {"completed"}


def test_any_process_goes_on_where_another_died(site: Site) -> None:
    """After the loss was written, or a part of what was there moved."""
    scene = site.scene
    refs = [scene.arrive(name, tokens=50) for name in ("one", "two", "three")]
    site.woken()
    scene.take(room=1)
    site.die("a")
    assert scene.upkeep.lose("a", "first")
    (entry, *_) = scene.client.xrevrange(scene.keys.place("a")["stream"], count=1)
    # One of three is moved, and then its process dies, too.
    assert scene.upkeep._take_back(scene.keys.place("a")["stream"], entry[0], refs[2].token, pid("three"))
    scene.sound()
    site.join("b", "second")
    site.tick(site.process())
    site.woken()
    assert tokens_of(scene.take("b")) == {ref.token for ref in refs}


def test_a_new_process_of_a_rank_goes_on(site: Site) -> None:
    """What the former one had is moved by whoever comes by, once."""
    scene = site.scene
    ref = scene.arrive("lead")
    site.woken()
    scene.take()
    scene.client.delete(scene.keys.rank("a"))
    site.join("a", "second")
    site.tick()
    assert tokens_of(scene.take()) == {ref.token}
    assert scene.book()["drained"] == "second"


def test_without_a_rank_programs_wait_for_one(site: Site) -> None:
    """Those of a rank that is lost, and those that never had one; nothing of the ranks that are gone stays."""
    scene = site.scene
    refs = [scene.arrive("lead", home="")]
    site.die("a")
    site.tick()
    refs.append(scene.arrive("other", home="a"))
    assert site.programs[0].turn([], [MODEL]) == set()
    scene.client.zadd(scene.keys.members, {"a": 1})
    site.tick()
    assert (scene.upkeep.members(), scene.field("other", "rank")) == ({}, "a")
    site.join("b", "second")
    site.tick()
    assert tokens_of(scene.take("b")) == {ref.token for ref in refs}
    site.tick()
    left = [key for rank in ("a", "") for key in scene.keys.place(rank).values() if key.endswith(f":{rank}")]
    assert [key for key in left if scene.client.exists(key)] == []


def test_a_session_stays_together_when_its_rank_is_lost(site: Site) -> None:
    """Its Programs are bound anew by what they were first bound by, not by their names."""
    scene = site.scene
    for number in range(6):
        scene.arrive(f"session:{number}", key="session")
    site.die("a")
    for rank in ("b", "c", "d"):
        site.join(rank, f"first-{rank}")
    site.tick()
    expected = home(ring_of(["a", "b", "c", "d"], 160), "session", {"b", "c", "d"})
    assert {scene.field(f"session:{number}", "rank") for number in range(6)} == {expected}


def test_entries_whose_reply_was_lost_are_sent_again(site: Site) -> None:
    """The process read them, and nobody ever got them."""
    scene = site.scene
    ref = scene.arrive("lead")
    site.woken()
    worker = scene.workers["a"]
    stream = worker.keys.queue
    assert worker.reader.xreadgroup("workers", "a", {stream: ">"}, count=1)
    site.tick()
    assert scene.client.xpending(stream, "workers")["pending"] == 1
    (entry,) = scene.client.xpending_range(stream, "workers", "-", "+", 1)
    scene.client.xclaim(stream, "workers", "a", 0, [entry["message_id"]], idle=LEASE_MS + 1, justid=True)
    site.tick()
    assert scene.client.xpending(stream, "workers")["pending"] == 0
    assert tokens_of(scene.take()) == {ref.token}


@with_settings(global_queue=True)
def test_a_program_goes_to_a_rank_with_room(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """One that was active before, whose last rank is full, and in whose engine requests wait."""
    scene = site.scene
    site.join("b", "second")
    for _ in range(2):
        scene.arrive("lead", tokens=100)
        site.woken()
        scene.end(*scene.take(), sample=RequestSample(100, 10, None, None, 1.0, None, 0.5, 1, 1000))
    scene.arrive("big", tokens=850)
    site.observe("a", 0, gone=tuple(scene.upkeep.leaving("a")))
    site.woken()
    assert len(scene.take()) == 1
    ref = scene.arrive("lead", tokens=100)
    site.woken()
    assert scene.take() == []
    site.seconds_pass("lead", "queued_ms", seconds=2)

    def relocated() -> bool:
        # It is fresh for three seconds.
        site.observe("a", 950, waiting=1, running=1)
        site.tick()
        return scene.field("lead", "rank") == "b"

    with caplog.at_level(logging.INFO, "genpool.programs"):
        wait_until(relocated, description="the Program to be relocated")
    assert tokens_of(scene.take("b")) == {ref.token}
    assert any(f"program={pid('lead')} rank=b" in record.getMessage() for record in caplog.records)


# -- many processes -----------------------------------------------------------------------------------------------


def test_planners_of_many_processes_do_no_harm(site: Site) -> None:
    """Three of them at once, over two ranks, in threads of their own: all requests are served, in the order of each
    Program, and the books are right."""
    scene = site.scene
    site.join("b", "second")
    for _ in range(2):
        site.process()
    refs: dict[str, list[JobRef]] = {f"agent-{number}": [] for number in range(12)}
    served: list[str] = []
    done = threading.Event()

    def serve() -> None:
        """Both ranks' workers."""
        while not done.is_set():
            for rank in ("a", "b"):
                for handout in scene.take(rank):
                    scene.end(handout, rank, ttl_ms=1000)
                    served.append(handout.lease.token)
                    placement = handout.lease.placement
                    assert placement is not None
                    site.programs[1].completed(MODEL, rank, placement.program)
                site.observe(rank, 0, gone=tuple(scene.upkeep.leaving(rank)))

    for process in site.programs:
        process.start()
    worker = threading.Thread(target=serve)
    worker.start()
    for number in range(5):
        for at, (name, sent) in enumerate(refs.items()):
            sent.append(scene.arrive(name, home="ab"[at % 2], tokens=150))
            site.programs[number % 3].wake(MODEL)
    wait_until(lambda: len(served) == 60, description="all to be served")
    done.set()
    worker.join()
    for process in site.programs:
        process.stop()
    assert len(set(served)) == 60
    for sent in refs.values():
        order = [served.index(ref.token) for ref in sent]
        assert order == sorted(order)


def test_only_one_of_them_looks_after_all_in_an_interval(site: Site) -> None:
    """What changed, any of them plans for; one that another plans for just now is looked at again soon."""
    scene, other = site.scene, site.process()
    ref = scene.arrive("lead")
    site.tick()
    assert tokens_of(scene.take()) == {ref.token}
    site.die("a")
    assert other.turn([MODEL]) == set()
    assert scene.upkeep.up(["a"]) == {"a": "first"}
    scene.arrive("other")
    assert scene.store.claim("a", "somebody else")
    assert other.turn([], [MODEL]) == {MODEL}
    scene.store.unclaim("a")
    assert other.turn([], [MODEL]) == set()
    assert scene.store.dirty() == []
    assert len(scene.take()) == 1


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
    used = {name: stats["calls"] for name, stats in client.info("commandstats").items()}
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
    assert sum("planning: broken" in record.getMessage() for record in caplog.records) == 1
    scene.client.delete(process.store("broken").keys.members)


# -- what is told -------------------------------------------------------------------------------------------------


def test_a_change_of_source_is_told_once_by_all(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A warning when the ledger has to do, a word when the engine reports again."""
    scene, other = site.scene, site.process()
    caplog.set_level(logging.INFO, "genpool.programs")
    scene.arrive("lead")
    site.woken()
    site.seconds_pass("lead", "activated_ms", seconds=10)
    for process in (site.programs[0], other, site.programs[0]):
        site.tick(process)

    def told(what: str) -> list[int]:
        return [record.levelno for record in caplog.records if record.getMessage().startswith(what)]

    assert told("capacity_observation_fallback") == [logging.WARNING]

    def recovered() -> bool:
        site.observe("a", 200)
        site.tick(other)
        return bool(told("capacity_observation_recovered"))

    wait_until(recovered, description="an observation to be seen while it is fresh")
    assert told("capacity_observation_recovered") == [logging.INFO]


def test_unmeasured_coefficients_are_named_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Those of each model, with the two reference figures."""
    site.programs[0].start()
    (line,) = [record.getMessage() for record in caplog.records if "reference_calibration" in record.getMessage()]
    assert "prefill_cost_model.decode_throughput_alpha" in line
    assert "13.93 s" in line and "98.23 tokens/s" in line


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
