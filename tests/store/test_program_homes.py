"""On which rank Programs begin, as `tasks/programs.py` says it to every door."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pool.rules.programs.binding import home, ring_of
from pool.settings import ModelSettings
from pool.store.connection import Client
from tasks.config import Settings
from tasks.programs import Programs
from tests.program_scene import Scene, pid, settings


@pytest.fixture
def scene(client: Client, redis_url: str) -> Iterator[Scene]:
    """Three ranks, of which `c` is away."""
    made = Scene(client, redis_url, settings(token_capacity_per_dp_rank=1000))
    for rank in ("a", "b", "c"):
        made.join(rank, f"first-{rank}")
    made.upkeep.lose("c", "first-c", leaves=True)
    yield made
    made.sound()
    made.close()
    client.flushall()


def programs(scene: Scene, strategy: str = "consistent_hash", **fields: Any) -> Programs:
    """A process's, with one model."""
    chosen = settings(**{"token_capacity_per_dp_rank": 1000} | fields, binding_strategy=strategy)
    configured = Settings(programs=chosen, models={"tiny": ModelSettings(source="random:tiny")})
    return Programs(scene.client, scene.jobs, configured, terms=scene.terms)


def test_every_process_finds_the_same_home(scene: Scene) -> None:
    """By the ring of all members; what falls to one that is away goes on to the next point."""
    ring = ring_of(["a", "b", "c"], 160)
    one, other = programs(scene), programs(scene)
    for number in range(40):
        key = f"agent-{number}"
        expected = home(ring, key, {"a", "b"}), True
        assert one.home("tiny", key=key, prompt_tokens=10) == expected
        assert other.home("tiny", key=key, prompt_tokens=10) == expected


def test_a_program_keeps_a_rank_that_is_up(scene: Scene) -> None:
    """Whatever the strategy would say, and at no cost to its turns; one whose rank is away gets another."""
    scene.arrive("lead", home="b")
    scene.arrive("lost", home="c")
    process = programs(scene, "program_round_robin")
    assert process.home("tiny", key="lead", prompt_tokens=10, program=pid("lead")) == ("b", True)
    assert scene.client.hget(scene.keys.placement, "turn") is None
    rank, is_up = process.home("tiny", key="lost", prompt_tokens=10, program=pid("lost"))
    assert (rank in {"a", "b"}, is_up) == (True, True)


def test_turns_go_round(scene: Scene) -> None:
    """Of all processes together."""
    processes = [programs(scene, "program_round_robin") for _ in range(2)]
    ranks = [processes[number % 2].home("tiny", key="x", prompt_tokens=10)[0] for number in range(4)]
    assert sorted(ranks[:2]) == sorted(ranks[2:]) == ["a", "b"]


def test_the_fewest_programs_win(scene: Scene) -> None:
    """Active and waiting ones count."""
    process = programs(scene, "least_program_count")
    assert process.home("tiny", key="x", prompt_tokens=10) == ("a", True)
    scene.arrive("lead", home="a")
    assert process.home("tiny", key="x", prompt_tokens=10) == ("b", True)
    scene.arrive("other", home="b")
    scene.plan("b")
    assert process.home("tiny", key="x", prompt_tokens=10) == ("a", True)


def test_the_most_free_tokens_win(scene: Scene) -> None:
    """Of what the ledgers leave of the capacity."""
    scene.arrive("lead", home="a", tokens=200)
    scene.plan("a")
    scene.arrive("other", home="b", tokens=100)
    scene.plan("b")
    assert programs(scene, "reasoning_token_balance").home("tiny", key="x", prompt_tokens=10) == ("b", True)


def test_a_cached_prefix_draws_and_pressure_repels(scene: Scene) -> None:
    """What relatives share counts where they are active; a rank where it could begin at once comes before one that is
    full."""
    process = programs(scene, "cache_aware")
    scene.arrive("lead", home="b", tokens=400)
    scene.plan("b")
    # Half of `b` is used; what the lead was seen to share is all of the prompt, so 2 x 0.5 against 1 x 1.
    assert process.home("tiny", key="x", prompt_tokens=100, relatives=(pid("lead"),)) == ("a", True)
    scene.client.hset(scene.keys.record(pid("lead")), "shared", 300)
    scene.client.hincrby(scene.keys.record(pid("lead")), "private", -300)
    scene.client.hincrby(scene.keys.place("b")["book"], "tokens", -300)
    assert process.home("tiny", key="x", prompt_tokens=100, relatives=(pid("lead"),)) == ("b", True)
    assert process.home("tiny", key="x", prompt_tokens=100) == ("a", True)
    assert process.home("tiny", key="x", prompt_tokens=750, relatives=(pid("lead"),)) == ("a", True)


def test_with_no_rank_up_it_waits_where_its_rank_was(scene: Scene) -> None:
    """The ring says where; other strategies wait until one is up. Without any rank there is none."""
    for rank in ("a", "b"):
        scene.lose(rank, f"first-{rank}", leaves=True)
    expected = home(ring_of(["a", "b", "c"], 160), "x"), False
    assert programs(scene).home("tiny", key="x", prompt_tokens=10) == expected
    assert programs(scene, "least_program_count").home("tiny", key="x", prompt_tokens=10) == ("", False)
    scene.client.delete(scene.keys.members)
    assert programs(scene).home("tiny", key="x", prompt_tokens=10) == ("", False)
