"""A rank's seat on a real store and a real engine: what it tells, drops, loses and takes again.

Its turns are made from the test's own thread, and so are the loop's.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Iterator

import numpy as np
import pytest

from pool.rules.admission import Budgets
from pool.settings import ModelSettings
from pool.store.connection import Client, connect
from pool.store.handouts import Ending, Handout
from pool.store.hints import Subscription
from pool.store.keys import KV_LEAVES, node_channel
from pool.store.rank_delivery import RankDelivery
from tasks.config import Settings
from tasks.payloads import Sampling
from tasks.ports import Finished, Generation
from tasks.programs import Programs
from tests.builders import LEASE_MS, RESULT_TTL_MS
from tests.program_lines import told
from tests.program_scene import TENANT, Scene, pid, settings
from workers.engines.numpy_llama import NumpyLlama
from workers.engines.tiny import tiny_llama
from workers.loop import NO_OFFLOAD, BatchingLoop
from workers.offload import OffloadBudget
from workers.outlet import Held
from workers.program_residence import ProgramResidence
from workers.program_seat import AGAIN_S, ProgramSeat

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 4
SLOTS = 2


class Desk:
    """Rank `a` with its loop and its seat. `registered`: what the registry says."""

    def __init__(self, scene: Scene, offload: OffloadBudget = NO_OFFLOAD) -> None:
        self.scene = scene
        self.registered = True
        self.held: list[Held] = []
        self.delivery = RankDelivery(
            reader=connect(scene.url, max_connections=1),
            writer=connect(scene.url, max_connections=1),
            model="tiny",
            rank="a",
            lease_ms=LEASE_MS,
            result_ttl_ms=RESULT_TTL_MS,
            incarnation="first",
        )
        scene.workers["a"] = self.delivery
        self.loop = BatchingLoop(
            NumpyLlama(*tiny_llama(7)), Budgets(max_prefill_tokens_per_tick=64), SLOTS, offload=offload
        )
        own = Settings(programs=scene.settings, models={"tiny": ModelSettings(source="random:7")})
        self.seat = ProgramSeat(
            Programs(scene.client, scene.jobs, own, terms=scene.terms),
            scene.settings,
            self.delivery,
            ProgramResidence(self.loop, lambda: self.held, on_pause=scene.settings.on_pause),
            registered=lambda: self.registered,
            keep_s=60,
        )
        self.seat.take()
        self.delivery.heal()

    def turn(self) -> None:
        """Make a turn of the seat."""
        self.seat._next_s = 0.0
        self.seat._turn()

    def begin(self, name: str) -> Handout:
        """A request of a Program begins."""
        self.scene.arrive(name)
        self.scene.plan()
        (handout,) = self.scene.take()
        return handout

    def generate(self, holder: str, prompt_tokens: int = PROMPT_TOKENS, *, first: int = 5) -> Finished:
        """The engine runs a request and keeps its KV for the holder. `first`: the first token of its prompt."""
        prompt = np.arange(prompt_tokens, dtype=np.int32) + first
        sampling = Sampling(temperature=0.0, ignore_eos=True)
        job = secrets.token_hex(8)
        self.loop.submit(Generation(job, 1, prompt, sampling, OUTPUT_TOKENS, 0, holder=holder))
        events = self.loop.run_to_completion()
        assert isinstance(events[-1], Finished)
        return events[-1]

    def run(self, name: str, ttl_ms: int = 60_000) -> Handout:
        """A whole request of a Program, which then keeps its place for so long."""
        handout = self.begin(name)
        self.generate(pid(name))
        self.scene.end(handout, ttl_ms=ttl_ms)
        return handout

    def resident(self) -> dict[str, int]:
        """What the engine holds, once it has read its mail."""
        self.loop.tick()
        return dict(self.loop.holdings())

    def seen_tokens(self) -> str:
        """What the store was last told of it, "" for nothing."""
        return self.scene.book().get("obs_tokens", "")


@pytest.fixture
def desk(client: Client, redis_url: str) -> Iterator[Desk]:
    """A rank without Programs."""
    scene = Scene(client, redis_url, settings())
    yield Desk(scene)
    scene.sound()
    scene.close()
    client.flushall()


def test_a_rank_without_programs_is_not_looked_at(desk: Desk) -> None:
    """Its seat is, now and then; the first request of a Program wakes the seat."""
    desk.turn()
    assert (desk.seen_tokens(), desk.seat._busy) == ("", False)
    handout = desk.begin("lead")
    desk.seat.begun(handout)
    assert desk.seat._roused
    desk.seat._turn()
    assert (desk.seen_tokens(), desk.seat._busy) == ("0", True)
    desk.scene.end(handout)


def test_what_the_engine_holds_is_told(desk: Desk) -> None:
    """Of all Programs that have a place, with the store's time from before the look."""
    desk.run("lead")
    desk.run("other")
    held = desk.resident()
    desk.turn()
    assert set(held) == {pid("lead"), pid("other")}
    assert int(desk.seen_tokens()) == sum(held.values()) >= PROMPT_TOKENS
    assert desk.resident() == held
    seen = desk.scene.store.snapshot("a")
    assert seen.rank.observation is not None
    assert seen.rank.observation.began_ms <= seen.now_ms


def test_kv_of_a_paused_program_leaves(desk: Desk) -> None:
    """It counts until the engine has dropped it; KV of those that have a place stays."""
    desk.run("lead")
    desk.run("other")
    desk.scene.pause("other", "max_segment_yield")
    desk.turn()
    assert desk.scene.upkeep.leaving("a") == {pid("other"): 210}
    assert set(desk.resident()) == {pid("lead")}
    desk.turn()
    assert desk.scene.upkeep.leaving("a") == {}
    assert int(desk.seen_tokens()) == sum(desk.resident().values())


def test_the_engine_is_looked_at_again_until_kv_has_left(desk: Desk) -> None:
    """Soon, and less often each time; who waits for the room is planned for as soon as it is there."""
    woken: list[str] = []
    desk.seat._programs.wake = woken.append  # type: ignore[method-assign]
    desk.run("lead")
    desk.turn()
    calm_s = desk.seat._next_s - time.monotonic()
    desk.scene.pause("lead", "max_segment_yield")
    pauses = []
    for _ in range(3):
        desk.turn()
        pauses.append(desk.seat._next_s - time.monotonic())
    assert pauses == sorted(pauses) and pauses[-1] < calm_s
    assert woken == []
    assert desk.resident() == {}
    desk.turn()
    assert desk.scene.upkeep.leaving("a") == {}
    assert woken == ["tiny"]
    assert desk.seat._again_s == AGAIN_S


def test_a_full_engine_is_looked_at_again_while_programs_wait(desk: Desk) -> None:
    """Requests that wait in it shut the rank to them."""
    desk.run("lead")
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    for number in range(SLOTS + 1):
        desk.loop.submit(Generation(f"job-{number}", 1, prompt, Sampling(), 4, 0))
    desk.loop.tick()
    desk.turn()
    calm_s = desk.seat._next_s - time.monotonic()
    desk.scene.arrive("other")
    desk.turn()
    assert desk.scene.book()["obs_waiting"] == "1"
    assert desk.seat._next_s - time.monotonic() < calm_s / 2


def test_a_rank_is_told_that_kv_has_to_go(desk: Desk) -> None:
    """Whoever takes a Program's place away, over the rank's own channel; not of one that had none."""
    heard = Subscription(desk.scene.client, node_channel("a"))
    desk.run("lead")
    assert heard.message(0.1) is None
    desk.scene.pause("lead", "max_segment_yield")
    assert heard.message(5) == KV_LEAVES.encode()
    desk.run("other")
    desk.scene.upkeep.finish(TENANT, "other")
    assert heard.message(5) == KV_LEAVES.encode()
    heard.close()


def test_kv_of_nobody_is_dropped(desk: Desk) -> None:
    """The store knows nothing of whom it was kept for, or knows them elsewhere: no lost command keeps it."""
    desk.run("lead")
    desk.generate("0" * 32)
    desk.generate(pid("other"))
    desk.scene.arrive("other", home="b")
    desk.turn()
    assert set(desk.resident()) == {pid("lead")}
    desk.scene.upkeep.finish(TENANT, "lead")
    desk.turn()
    assert desk.resident() == {}


@pytest.mark.parametrize(("memory_bytes", "leaves"), [(10**8, True), (1, False)], ids=["room", "none"])
def test_kv_of_a_paused_program_may_leave_the_engine(
    client: Client, redis_url: str, memory_bytes: int, *, leaves: bool
) -> None:
    """As the settings say. It counts until it has left; where it cannot, it is dropped; and it is dropped outside, too,
    when its Program is over."""
    scene = Scene(client, redis_url, settings(on_pause="offload"))
    desk = Desk(scene, OffloadBudget(memory_bytes))
    desk.run("lead")
    scene.pause("lead", "max_segment_yield")
    desk.turn()
    assert scene.upkeep.leaving("a") == {pid("lead"): 210}
    assert set(desk.resident()) == (set() if leaves else {pid("lead")})
    desk.turn()
    assert desk.resident() == {}
    assert desk.loop.offloaded() == ({pid("lead")} if leaves else set())
    desk.turn()
    assert scene.upkeep.leaving("a") == {}
    # What was moved once says what it takes.
    assert (desk.seat._background.return_s_per_token < math.inf) == leaves
    scene.upkeep.finish(TENANT, "lead")
    desk.turn()
    assert (desk.resident(), desk.loop.offloaded()) == ({}, set())
    scene.sound()
    scene.close()
    client.flushall()


def test_what_has_not_begun_waits_where_there_is_no_room(desk: Desk) -> None:
    """Else it is about to begin. Jobs that the rank runs wait for nothing."""
    desk.run("lead")
    for _ in range(3):
        desk.scene.arrive("lead")
    desk.turn()
    assert desk.scene.book()["obs_waiting"] == "0"
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    for number in range(SLOTS):
        desk.loop.submit(Generation(f"job-{number}", 1, prompt, Sampling(), 4, 0))
    (running,) = desk.scene.take(room=1)
    desk.held.append(Held(running, 0, ""))
    desk.loop.tick()
    desk.turn()
    assert (desk.scene.book()["obs_waiting"], desk.scene.book()["obs_running"]) == ("2", str(SLOTS))


def test_what_the_loop_was_given_just_now_does_not_wait(desk: Desk) -> None:
    """It is about to begin, for all that is known; once the loop has found no slot for it, it waits."""
    desk.run("lead")
    prompt = np.arange(PROMPT_TOKENS, dtype=np.int32)
    for number in range(SLOTS + 1):
        desk.loop.submit(Generation(f"job-{number}", 1, prompt, Sampling(), 4, 0))
    desk.turn()
    assert desk.scene.book()["obs_waiting"] == "0"
    desk.loop.tick()
    desk.turn()
    assert desk.scene.book()["obs_waiting"] == "1"


def test_a_seat_that_others_took_for_lost_is_taken_again(desk: Desk) -> None:
    """By a process that is still registered; a Program that lost its place by that waits for another."""
    running = desk.begin("lead")
    desk.scene.upkeep.lose("a", "first", leaves=True)
    desk.turn()
    assert desk.scene.upkeep.up(["a"]) == {"a": "first"}
    assert desk.delivery.seated
    assert desk.scene.end(running).code == "ok"
    desk.run("lead")


def test_a_rank_of_another_process_is_left_to_it(desk: Desk) -> None:
    """This one reads its stream no more, and tells nothing; until it is the one that is registered."""
    desk.scene.upkeep.join("a", "second")
    desk.registered = False
    desk.turn()
    assert not desk.delivery.seated
    assert desk.scene.upkeep.up(["a"]) == {"a": "second"}
    desk.registered = True
    desk.turn()
    assert desk.delivery.seated
    assert desk.scene.upkeep.up(["a"]) == {"a": "first"}


def test_a_seat_is_left_once(desk: Desk) -> None:
    """What has not begun waits in its pool at once, what runs may end; the planner hears of ends here alone."""
    running = desk.begin("lead")
    desk.scene.arrive("other")
    desk.scene.plan()
    desk.seat.leave()
    desk.seat._turn()
    assert desk.scene.upkeep.up(["a"]) == {}
    assert desk.scene.field("other", "state") == "paused"
    assert desk.scene.end(running).code == "ok"
    assert desk.scene.field("lead", "state") == "paused"
    desk.scene.upkeep.join("a", "first")
    desk.seat._turn()
    assert desk.scene.upkeep.up(["a"]) == {"a": "first"}


def test_only_programs_have_outcomes(desk: Desk) -> None:
    """By the state server's clock; and only their ends concern planners."""
    handout = desk.begin("lead")
    finished = desk.generate(pid("lead"))
    outcome = desk.seat.outcome(handout, finished)
    assert outcome is not None and outcome.sample is not None
    assert (outcome.prompt_tokens, outcome.context_tokens) == (PROMPT_TOKENS, PROMPT_TOKENS + OUTPUT_TOKENS)
    assert 0 <= outcome.sample.queue_s <= outcome.sample.end_to_end_s < 60
    assert outcome.sample.decode_s is not None
    planner = desk.seat._programs._of("tiny").planner
    desk.seat.left(handout, None)
    assert planner._completed == {}
    desk.seat.left(handout, Ending("completed"))
    assert planner._completed == {"a": {pid("lead")}}
    desk.scene.end(handout)
    handout.lease.placement = None
    assert desk.seat.outcome(handout, finished) is None


# -- what is told -----------------------------------------------------------------------------------------------------


def test_what_is_told_of_requests_and_looks(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """Of a request: its begin, what it found cached, after how long it came back, how long its place is kept; of a
    look: what the engine holds. A prompt that found nothing though its Program kept its place is worth more."""
    caplog.set_level(logging.DEBUG, "genpool.programs")
    for first, prompt_tokens in ((5, 64), (5, 90), (70, 95)):
        handout = desk.begin("lead")
        desk.seat.begun(handout)
        outcome = desk.seat.outcome(handout, desk.generate(pid("lead"), prompt_tokens, first=first))
        assert outcome is not None
        desk.scene.end(handout, ttl_ms=60_000, prompt_tokens=outcome.prompt_tokens)
    desk.turn()
    lines = told(caplog)
    assert [line.event for line in lines] == [
        *("request_dispatch", "cache_observation", "ttl_armed"),
        *("request_dispatch", "cache_observation", "continuity_sample", "ttl_armed"),
        *("request_dispatch", "unexpected_cache_discontinuity", "cache_observation", "continuity_sample", "ttl_armed"),
        "capacity_observation",
    ]
    assert all(line.level == ("INFO" if "unexpected" in line.event else "DEBUG") for line in lines)
    assert all(line.values["program"] == pid("lead") for line in lines[:-1])
    broken = lines[8].values
    assert (broken["cached_tokens"], broken["previous_prompt_tokens"]) == ("0", "90")
    cached = [line.values["cached_tokens"] for line in lines if line.event == "cache_observation"]
    assert cached == ["0", "64", "0"]
    look = lines[-1].values
    assert look == {
        "model": "tiny",
        "rank": "a",
        "tokens": desk.seen_tokens(),
        "waiting": "0",
        "running": "0",
        "gone": "0",
        "installed": "true",
    }


def test_how_hints_ended_is_told(client: Client, redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """KV of a paused Program that has left the engine."""
    scene = Scene(client, redis_url, settings(on_pause="offload"))
    desk = Desk(scene, OffloadBudget(10**8))
    desk.run("lead")
    scene.pause("lead", "max_segment_yield")
    desk.turn()
    desk.resident()
    with caplog.at_level(logging.DEBUG, "genpool.programs"):
        desk.turn()
    (line,) = told(caplog, "kv_hint")
    assert int(line.values.pop("freed_tokens")) >= PROMPT_TOKENS
    assert line.values == {"program": pid("lead"), "action": "offload", "outcome": "applied", "reason": "none"}
    scene.close()
    client.flushall()


def test_what_befalls_a_seat_is_told_once(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    """That others took it for lost, and that its store takes no writes."""
    desk.scene.upkeep.lose("a", "first", leaves=True)
    desk.turn()
    (line,) = told(caplog)
    assert (line.level, line.event) == ("WARNING", "program_seat_retaken")
    assert line.values == {"model": "tiny", "rank": "a"}
    caplog.clear()
    desk.scene.client.config_set("min-replicas-to-write", 1)
    desk.seat.leave()
    try:
        for _ in range(2):
            desk.seat._attempt()
    finally:
        desk.scene.client.config_set("min-replicas-to-write", 0)
    (line,) = told(caplog)
    assert (line.level, line.event) == ("WARNING", "program_seat_failed")
    assert line.values == {"model": "tiny", "rank": "a", "error": "StateUnavailable"}
