"""The batching rules: promotion, rotation, prefill on the grid, preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pool.rules.batching import (
    LOOK_BEHIND,
    MAX_PASSES,
    Prefill,
    completion_guard,
    exported_for,
    first_room,
    gives_way,
    is_resident,
    most_chunks,
    prefill_stops,
    promote,
    rotate,
)


@dataclass(eq=False)
class Waiter:
    """A session in the queue, which fits or not."""

    name: str
    fits: bool = True
    resident: bool = False
    passed: int = 0
    asked: int = 0

    def begin(self) -> bool:
        self.asked += 1
        return self.fits


def promoted(queue: list[Waiter], free_slots: int) -> tuple[str, str]:
    """Names of those promoted, and of the head that was left."""
    found = promote(
        queue,
        free_slots=free_slots,
        begin=Waiter.begin,
        is_resident=lambda waiter: waiter.resident,
        passes_left=lambda waiter: MAX_PASSES - waiter.passed,
    )
    if found.head is not None:
        found.head.passed += found.passers
    assert all(waiter.asked <= 1 for waiter in queue)
    return "".join(waiter.name for waiter in found.promoted), found.head.name if found.head else ""


def test_promotion_is_first_come_first_served() -> None:
    """A head that does not fit stops smaller ones behind it, so it cannot starve."""
    assert promoted([Waiter("a"), Waiter("b"), Waiter("c", fits=False)], 8) == ("ab", "c")
    assert promoted([Waiter("a", fits=False), Waiter("b")], 8) == ("", "a")
    assert promoted([Waiter("a"), Waiter("b"), Waiter("c")], 2) == ("ab", "")
    assert promoted([Waiter("a")], 0) == ("", "")
    assert promoted([Waiter("a")], -1) == ("", "")


def test_residents_pass_a_head_that_does_not_fit() -> None:
    """Those whose KV is here and that fit; nobody else, and none where there is no slot left."""
    queue = [
        Waiter("a", fits=False, resident=True),
        Waiter("b"),
        Waiter("c", resident=True),
        Waiter("d", fits=False, resident=True),
        Waiter("e", resident=True),
    ]
    assert promoted(queue, 8) == ("ce", "a")
    for waiter in queue:
        waiter.asked = 0
    assert promoted(queue, 1) == ("c", "a")


def test_a_head_is_passed_a_bounded_number_of_times() -> None:
    """However many residents there are, and over however many ticks they come."""
    head = Waiter("a", fits=False)
    passed = 0
    for _ in range(3 * MAX_PASSES):
        head.asked = 0
        names, _ = promoted([head, *(Waiter("r", resident=True) for _ in range(3))], 2)
        passed += len(names)
    assert passed == head.passed == MAX_PASSES


def test_one_does_not_look_far_behind_a_head() -> None:
    """Asking the engine about everybody in a long queue would cost more than it brings."""
    far = Waiter("r", resident=True)
    queue = [Waiter("a", fits=False), *(Waiter("b") for _ in range(LOOK_BEHIND)), far]
    assert promoted(queue, 8) == ("", "a")
    assert promoted([Waiter("a", fits=False), *queue[2:]], 8) == ("r", "a")


def test_half_a_prompt_makes_a_resident() -> None:
    """A shared system prompt before a long one of its own does not."""
    assert is_resident(50, 100)
    assert not is_resident(49, 100)


@given(known=st.integers(1, 1000), more=st.integers(0, 1000), overcommit=st.floats(1, 50))
def test_room_at_the_beginning(known: int, more: int, overcommit: float) -> None:
    """What is known always fits; without over-commit all does; more over-commit never asks for more."""
    room = first_room(known, known + more, overcommit)
    assert known <= room <= known + more
    assert first_room(known, known + more, 1.0) == known + more
    assert first_room(known, known + more, overcommit + 1) <= room
    if more:
        assert room > known


def test_the_youngest_gives_way() -> None:
    """So the oldest always gets on; one that is alone is its own youngest."""
    assert gives_way([3, 9, 4]) == 9
    assert gives_way([3]) == 3


def test_a_head_makes_only_those_give_way_that_passed_it() -> None:
    """Older ones outside the batch came first: it waits for them. It waits, too, where all of them are not enough."""
    has = {1: 100, 9: 10, 4: 100, 7: 20}

    def freed(arrivals: Sequence[int]) -> int:
        return sum(has[arrival] for arrival in arrivals)

    assert exported_for(5, has, lacking=30, freed=freed) == 9
    assert exported_for(5, has, lacking=31, freed=freed) is None
    assert exported_for(5, [1, 4], lacking=1, freed=freed) is None
    assert exported_for(5, [], lacking=0, freed=freed) is None


def test_the_guard_of_a_run_to_completion() -> None:
    """8 x (sum max_new + active + queued + 1) ticks."""
    assert completion_guard(0, 0, 0) == 8
    assert completion_guard(20, 2, 3) == 208


@pytest.mark.parametrize(
    ("lengths", "budget", "expected"), [([1000], 16, 63), ([1000, 1], 1, 64), ([1000], 40, 32), ([], 16, 0)]
)
def test_chunks_end_on_the_grid_within_the_budget(lengths: list[int], budget: int, expected: int) -> None:
    """At least a cell of the grid each."""
    assert most_chunks(lengths, budget, 16) == expected


@given(count=st.integers(1, 40), batch=st.integers(1, 16))
def test_rotation_serves_everybody_within_one_round(count: int, batch: int) -> None:
    """With more sessions than rows, each still runs once in ceil(count / batch) ticks, and none twice before that."""
    order = list(range(count))
    served: list[int] = []
    for _ in range(-(-count // batch)):
        now, order = rotate(order, batch)
        served += now
    assert sorted(order) == list(range(count))
    assert set(served) == set(range(count))
    assert served[:count] == list(range(count))


@settings(deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(1, 400), st.floats(0, 1, exclude_max=True)), max_size=12),
    budget=st.integers(1, 300),
    grid=st.sampled_from([1, 8, 16]),
)
def test_prefill_ends_for_all_on_the_grid_and_within_budget(
    prompts: list[tuple[int, float]], budget: int, grid: int
) -> None:
    """Wherever sessions begin: every chunk ends on the grid or at its prompt's end, and no other is less than a cell;
    a tick stays within its budget (at least one cell), the first in line always moves, and all prompts end."""
    lengths, done = [length for length, _ in prompts], [int(length * share) for length, share in prompts]
    for _ in range(2 * sum(lengths) + 1):
        open_now = [index for index, length in enumerate(lengths) if done[index] < length]
        if not open_now:
            break
        stops = prefill_stops([Prefill(done[i], lengths[i]) for i in open_now], budget_tokens=budget, grid=grid)
        cell = grid + -done[open_now[0]] % grid
        assert sum(stop - done[i] for i, stop in zip(open_now, stops, strict=True)) <= max(budget, cell)
        assert stops[0] > done[open_now[0]]
        for index, stop in zip(open_now, stops, strict=True):
            assert stop in (done[index], lengths[index]) or (stop % grid == 0 and stop - done[index] >= grid)
            assert done[index] <= stop <= lengths[index]
            done[index] = stop
    assert done == lengths
