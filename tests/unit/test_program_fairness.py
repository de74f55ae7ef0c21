"""Nobody is forgotten: a large Program in a flood of small ones, and a tree whose parents hold all capacity."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.program_simulation import STEP_MS, Agent, Simulation
from tests.unit.program_snapshots import PROPERTY, settings

FORCE_S = 10


def flood(number: int, *, requests: int = 1, tool_ms: int = 100) -> list[Agent]:
    """Programs of 50 tokens, which come back for ever; they come one after the other."""
    return [
        Agent(f"s{each}", 50, requests, 500, tool_ms, comes_ms=each * 20, again_ms=STEP_MS) for each in range(number)
    ]


@pytest.mark.parametrize("order", ["mru", "fcfs"])
@pytest.mark.parametrize(("requests", "ttl_ms"), [(1, 0), (4, 1000)])
def test_a_large_program_starts_within_its_force_bound_in_a_flood_of_small_ones(
    order: str, requests: int, ttl_ms: int
) -> None:
    """800 tokens of 1,000, of which 50 clients with 50 tokens each want two and a half times as much, without end; and
    so does each of these."""
    given_settings = settings(resume_order=order, force_resume_timeout_seconds=FORCE_S)
    simulation = Simulation(given_settings, ttl_ms=ttl_ms)
    simulation.add([*flood(50, requests=requests), Agent("large", 800, 2, comes_ms=2000, tool_ms=100)])
    simulation.run(20_000)
    assert len(simulation.waits_ms["large"]) == 2 or ttl_ms
    assert "large" in simulation.ended_ms
    late = {name: waits for name, waits in simulation.waits_ms.items() if any(wait > bound for wait, bound in waits)}
    assert not late
    overdue = [
        name
        for name, program in simulation.programs.items()
        if program.waiting is not None and program.waiting.force_ms < simulation.now_ms
    ]
    assert not overdue


@pytest.mark.parametrize("ttl_ms", [0, 5000])
def test_one_that_must_be_forced_waits_for_no_more_than_the_running_requests(ttl_ms: int) -> None:
    """Agents with tools, whose places TTLs would keep until their segments of 14 rounds end: the fewest are marked."""
    given_settings = settings(force_resume_timeout_seconds=3)
    simulation = Simulation(given_settings, ttl_ms=ttl_ms)
    simulation.add([*flood(20, requests=10**6), Agent("large", 800, comes_ms=2000)])
    simulation.run(15_000)
    [(waited_ms, bound_ms)] = simulation.waits_ms["large"]
    assert waited_ms <= bound_ms + 500 + 3 * STEP_MS


@PROPERTY
@given(
    st.lists(
        st.builds(
            lambda tokens, requests, service, tool, comes: Agent("", tokens, requests, service, tool, comes),
            st.sampled_from([50, 50, 50, 300, 800, 1000]),
            st.integers(1, 4),
            st.sampled_from([100, 400]),
            st.sampled_from([0, 100, 2000]),
            st.integers(0, 3000),
        ),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from(["mru", "fcfs"]),
    st.sampled_from([0, 500, 5000]),
)
def test_everybody_ends(agents: list[Agent], order: str, ttl_ms: int) -> None:
    """Whatever comes when: all Programs end, none waits much longer than until it is forced, and no step uses more KV
    than there is."""
    simulation = Simulation(settings(resume_order=order, force_resume_timeout_seconds=FORCE_S), ttl_ms=ttl_ms)
    for number, agent in enumerate(agents):
        agent.id = f"p{number}"
    simulation.add(agents)
    simulation.run(10 * 60_000)
    assert not simulation.agents
    assert len(simulation.ended_ms) == len(agents)


def tree(depth: int, tokens: int, above: tuple[str, ...] = ()) -> Agent:
    """A parent that waits for one child, which waits for one, and so on."""
    name = f"level{len(above)}"
    below = () if depth == 1 else (tree(depth - 1, tokens, (name, *above)),)
    return Agent(name, tokens, requests=2 if below else 1, service_ms=100, children=below, awaited_by=above)


@pytest.mark.parametrize(("depth", "tokens"), [(2, 1000), (3, 500), (5, 300), (20, 120)])
def test_a_tree_whose_parents_hold_all_capacity_finishes(depth: int, tokens: int) -> None:
    """Their places would be kept for five minutes; each child pauses those that wait for it, farthest first, so that it
    takes no longer than the requests themselves."""
    simulation = Simulation(settings(), ttl_ms=300_000)
    simulation.add([tree(depth, tokens)])
    simulation.run(60_000)
    assert sorted(simulation.ended_ms) == sorted(f"level{level}" for level in range(depth))
    assert simulation.now_ms < (2 * depth) * (100 + 6 * STEP_MS)


def test_a_tree_keeps_the_places_it_has_room_for() -> None:
    """As many parents as need not be paused are not."""
    simulation = Simulation(settings(), ttl_ms=300_000)
    simulation.add([tree(4, 250)])
    simulation.run(60_000)
    assert (len(simulation.ended_ms), simulation.pauses) == (4, 0)
    simulation = Simulation(settings(), ttl_ms=300_000)
    simulation.add([tree(5, 250)])
    simulation.run(60_000)
    assert (len(simulation.ended_ms), simulation.pauses) == (5, 1)


def test_parents_with_many_children_finish() -> None:
    """Two parents hold everything, and each waits for three children."""
    parents = []
    for parent in ("a", "b"):
        children = tuple(Agent(f"{parent}{each}", 300, service_ms=100, awaited_by=(parent,)) for each in range(3))
        parents.append(Agent(parent, 500, requests=2, service_ms=100, children=children))
    simulation = Simulation(settings(), ttl_ms=300_000)
    simulation.add(parents)
    simulation.run(60_000)
    assert len(simulation.ended_ms) == 8
    assert simulation.now_ms < 5000
