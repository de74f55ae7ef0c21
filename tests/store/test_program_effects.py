"""What those parameters of `[programs]` change that are carried out by the store: one scene, two values, two outcomes.
The others are in `unit/test_program_parameters.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pool.rules.programs.binding import home, ring_of
from pool.rules.programs.windows import RequestSample
from pool.settings import ModelSettings
from pool.store.connection import Client
from tasks.config import Settings
from tasks.programs import Programs
from tests.program_scene import Scene, pid, settings
from tests.waiting import wait_until

Make = Callable[..., Scene]


@pytest.fixture
def make(client: Client, redis_url: str) -> Iterator[Make]:
    """make(**parameters): a scene with the rank `a`, in place of the one before."""
    made: list[Scene] = []

    def end() -> None:
        for scene in made:
            scene.sound()
            scene.close()
        made.clear()
        client.flushall()

    def make_one(**parameters: Any) -> Scene:
        end()
        made.append(Scene(client, redis_url, settings(**parameters)))
        made[0].join("a", "first")
        return made[0]

    yield make_one
    end()


def process_of(scene: Scene) -> Programs:
    """What each process has of the scene's Programs."""
    configured = Settings(programs=scene.settings, models={"tiny": ModelSettings(source="random:tiny")})
    return Programs(scene.client, scene.jobs, configured, terms=scene.terms)


def homes(scene: Scene, count: int) -> list[str]:
    """Where so many new Programs would begin."""
    process = process_of(scene)
    return [process.home("tiny", key=f"agent-{number}", prompt_tokens=10)[0] for number in range(count)]


def test_binding_only_leaves_out_every_plan(make: Make) -> None:
    """A request of a new Program is with its rank at once; else it waits for a plan."""
    began = []
    for bound in (False, True):
        scene = make(binding_only=bound)
        scene.arrive("lead")
        began.append(len(scene.take()))
    assert began == [0, 1]


def test_binding_strategy_chooses_the_first_rank(make: Make) -> None:
    """By their keys, by turns, or to the emptiest."""
    found: dict[str, list[str]] = {}
    for strategy in ("consistent_hash", "program_round_robin", "least_program_count"):
        scene = make(binding_strategy=strategy)
        scene.join("b", "other")
        if strategy == "least_program_count":
            scene.arrive("before", home="a")
        found[strategy] = homes(scene, 4)
    ring = ring_of(["a", "b"], 160)
    assert found["consistent_hash"] == [home(ring, f"agent-{number}") for number in range(4)]
    assert found["program_round_robin"] in (["a", "b"] * 2, ["b", "a"] * 2)
    assert found["least_program_count"] == ["b"] * 4


def test_hash_virtual_nodes_make_the_ring(make: Make) -> None:
    """Each number of points is a ring of its own."""
    found = []
    for nodes in (1, 160):
        scene = make(hash_virtual_nodes=nodes)
        scene.join("b", "other")
        placed = homes(scene, 12)
        ring = ring_of(["a", "b"], nodes)
        assert placed == [home(ring, f"agent-{number}") for number in range(12)]
        found.append(placed)
    assert found[0] != found[1]


def test_token_capacity_per_dp_rank_bounds_what_programs_own(make: Make) -> None:
    """Of three that need 200 tokens each, as many as fit; without one, all."""
    admitted = []
    for capacity in (400, 600, None):
        scene = make(token_capacity_per_dp_rank=capacity)
        for number in range(3):
            scene.arrive(f"agent-{number}")
        scene.plan()
        admitted.append(len(scene.take()))
    assert admitted == [2, 3, 3]


def test_paused_retention_ttl_seconds_is_when_an_idle_one_is_forgotten(make: Make) -> None:
    """Its timer is set for then."""
    for seconds in (5.0, 1800.0):
        scene = make(paused_retention_ttl_seconds=seconds)
        scene.arrive("lead")
        scene.plan()
        scene.end(*scene.take(), ttl_ms=0)
        due_ms = scene.client.zscore(scene.keys.program_timers, f"retention:{pid('lead')}")
        assert due_ms is not None
        assert due_ms - int(scene.field("lead", "finish_ms")) == pytest.approx(seconds * 1000, abs=1)


def test_stats_window_size_is_how_many_samples_count(make: Make) -> None:
    """Three completions fill a window of two, and not one of four."""
    found = []
    for size in (2, 4):
        scene = make(stats_window_size=size)
        for number in range(3):
            scene.arrive("lead")
            if not number:
                scene.plan()
            sample = RequestSample(100 + number, 10, None, None, 1.0, None, 0.5, 1, 1000)
            scene.end(*scene.take(), ttl_ms=60_000, sample=sample)
        seen = scene.store.snapshot("a")
        found.append((seen.rank.means.full, [each.prompt_tokens for each in seen.windows.requests]))
    assert found == [(True, [101, 102]), (False, [100, 101, 102])]


def test_rank_gone_seconds_is_when_a_rank_leaves_the_ring(make: Make) -> None:
    """One that is away for a moment keeps its points."""
    found = []
    for seconds in (0.001, 60.0):
        scene = make(rank_gone_seconds=seconds)
        scene.join("b", "other")
        scene.upkeep.lose("b", "other", leaves=True)
        process = process_of(scene)

        def is_gone(scene: Scene = scene, process: Programs = process) -> bool:
            process.turn(["tiny"], set())
            return "b" not in scene.upkeep.members()

        if seconds < 1:
            wait_until(is_gone, description="the rank to leave the ring")
        found.append(is_gone())
    assert found == [True, False]
