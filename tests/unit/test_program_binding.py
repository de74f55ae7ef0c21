"""The first rank of a Program: five strategies, and a ring that moves few."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pool.errors import ConfigurationError
from pool.rules.programs.binding import Candidate, choose, home, points, position, refuses_without_rank, ring_of
from tests.unit.program_snapshots import PROPERTY

ROOT = Path(__file__).parents[2]
IDS = [f"task-{number}:agent" for number in range(4000)]
RANKS = ("node-1:0", "node-1:1", "node-2:0")


def chosen(strategy: str, *candidates: Candidate, turn: int = 0) -> str | None:
    return choose(strategy, candidates, key="k", turn=turn, ring=[])


def test_round_robin_takes_ranks_in_the_order_of_their_ids() -> None:
    """Whatever the order they come in."""
    shown = [Candidate("c"), Candidate("a"), Candidate("b")]
    assert [chosen("program_round_robin", *shown, turn=turn) for turn in range(4)] == ["a", "b", "c", "a"]


def test_least_program_count_takes_the_emptiest() -> None:
    """Of equals the first."""
    shown = [Candidate("c", programs=1), Candidate("a", programs=2), Candidate("b", programs=1)]
    assert chosen("least_program_count", *shown) == "b"


def test_token_balance_takes_the_one_with_most_left() -> None:
    """Of equals the first; it needs capacities."""
    shown = [Candidate("c", 0, 90, 200), Candidate("a", 0, 0, 100), Candidate("b", 0, 190, 300)]
    assert chosen("reasoning_token_balance", *shown) == "b"
    assert chosen("reasoning_token_balance", *shown[:2]) == "c"
    with pytest.raises(ConfigurationError, match="rank d") as refused:
        chosen("reasoning_token_balance", Candidate("d"))
    assert refused.value.param == "binding_strategy"


def test_cache_aware_weighs_what_is_cached_against_what_is_used() -> None:
    """Ranks that admit at once come first, whatever the others have."""
    cached = Candidate("a", kv_pressure=0.5, matched_share=0.9)
    empty = Candidate("b", kv_pressure=0.0)
    full = Candidate("c", kv_pressure=0.0, matched_share=1.0, admissible=False)
    assert chosen("cache_aware", cached, empty, full) == "b"
    assert chosen("cache_aware", cached, Candidate("b", kv_pressure=0.1), full) == "a"
    assert chosen("cache_aware", full) == "c"
    assert chosen("cache_aware", Candidate("z"), Candidate("y")) == "y"


@pytest.mark.parametrize("strategy", ["consistent_hash", "program_round_robin", "cache_aware"])
def test_without_a_rank_nothing_is_chosen(strategy: str) -> None:
    """The request waits."""
    assert chosen(strategy) is None


def test_a_request_is_refused_only_where_no_worker_ever_registered_and_that_was_asked_for() -> None:
    """Else it waits up to its queue timeout."""
    asked = [(registered, fail_fast) for registered in (0, 1) for fail_fast in (False, True)]
    assert [refuses_without_rank(registered, fail_fast=fail) for registered, fail in asked] == [
        False,
        True,
        False,
        False,
    ]


# -- the ring ---------------------------------------------------------------------------------------------------------


@PROPERTY
@given(st.permutations([*RANKS, "node-2:1"]))
def test_a_ring_does_not_depend_on_the_order_of_its_ranks(ranks: list[str]) -> None:
    """Nor on a rank that is named twice."""
    assert ring_of([*ranks, ranks[0]], 16) == ring_of(sorted(ranks), 16)


def test_every_process_finds_the_same_rank() -> None:
    """Hashes are not those of the interpreter, which differ from run to run; the figures are fixed."""
    ring = ring_of(RANKS, 160)
    assert (position("task-0:agent"), len(ring)) == (131455822800140, 480)
    code = (
        "from pool.rules.programs.binding import home, ring_of\n"
        f"ring = ring_of({RANKS[::-1]!r}, 160)\n"
        f"print([home(ring, key) for key in {IDS[:50]!r}])"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.strip() == repr([home(ring, key) for key in IDS[:50]])


def test_positions_are_exact_in_a_double() -> None:
    """A sorted set keeps scores as doubles."""
    assert all(float(position(name)) == position(name) < 2**53 for name in IDS)


def test_adding_a_rank_moves_at_most_35_of_100_and_only_to_it() -> None:
    """About a quarter."""
    before, after = ring_of(RANKS, 160), ring_of([*RANKS, "node-2:1"], 160)
    moved = [key for key in IDS if home(before, key) != home(after, key)]
    assert 0.15 * len(IDS) < len(moved) <= 0.35 * len(IDS)
    assert {home(after, key) for key in moved} == {"node-2:1"}
    assert sorted(set(after) - set(before)) == sorted(points("node-2:1", 160))


def test_removing_a_rank_moves_only_its_own() -> None:
    """And so does one that is away while its points stay; they spread over the others."""
    before, after = ring_of(RANKS, 160), ring_of(RANKS[1:], 160)
    moved = {key for key in IDS if home(before, key) != home(after, key)}
    assert moved == {key for key in IDS if home(before, key) == RANKS[0]}
    assert {home(after, key) for key in moved} == set(RANKS[1:])
    assert all(home(before, key, RANKS[1:]) == home(after, key) for key in IDS)


def test_ranks_share_evenly() -> None:
    """Each within a quarter of its part."""
    ring = ring_of(RANKS, 160)
    homes = [home(ring, key) for key in IDS]
    assert all(abs(homes.count(rank) / len(IDS) - 1 / 3) < 1 / 12 for rank in RANKS)


def test_a_key_behind_the_last_point_goes_round() -> None:
    """The first point follows the last."""
    assert home([(0, "a"), (1, "b")], "k") == "a"
    assert home([(0, "a"), (1, "b")], "k", {"b"}) == "b"
    assert home([(0, "a"), (1, "b")], "k", {"c"}) is None
    assert home([], "k") is None


def test_consistent_hashing_goes_by_the_ring_and_passes_over_ranks_that_are_away() -> None:
    """A ring that knows none of the ranks that are up still gives one answer."""
    ring = ring_of(RANKS, 160)
    up = [Candidate(rank) for rank in RANKS]
    assert all(choose("consistent_hash", up, key=key, ring=ring) == home(ring, key) for key in IDS[:200])
    assert all(choose("consistent_hash", up[1:], key=key, ring=ring) != RANKS[0] for key in IDS[:200])
    new = [Candidate("x"), Candidate("y")]
    found = [choose("consistent_hash", new, key=key, ring=ring) for key in IDS[:200]]
    assert found == [choose("consistent_hash", new[::-1], key=key, ring=[]) for key in IDS[:200]]
    assert set(found) == {"x", "y"}
