"""The batching rules: promotion, rotation, prefill on the grid."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pool.rules.batching import Prefill, peak_positions, prefill_stops, promotable, rotate


def test_a_session_peaks_below_prompt_plus_output() -> None:
    """Prefill emits the first token and the last one is never fed back: 3 + 5 tokens need 7 positions, 1 needs none."""
    assert peak_positions(3, 5) == 7
    assert peak_positions(3, 1) == 3


def test_promotion_is_first_come_first_served() -> None:
    """A head that does not fit stops smaller ones behind it, so it cannot starve."""
    assert promotable([5, 5, 5], free_slots=8, reserved_positions=0, kv_positions=10) == 2
    assert promotable([11, 1], free_slots=8, reserved_positions=0, kv_positions=10) == 0
    assert promotable([1, 1, 1], free_slots=2, reserved_positions=0, kv_positions=10) == 2
    assert promotable([1], free_slots=0, reserved_positions=0, kv_positions=10) == 0
    assert promotable([4], free_slots=1, reserved_positions=7, kv_positions=10) == 0


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


@given(
    lengths=st.lists(st.integers(1, 400), max_size=12),
    budget=st.integers(1, 300),
    grid=st.sampled_from([1, 8, 16]),
)
def test_prefill_ends_for_all_on_the_grid_and_within_budget(lengths: list[int], budget: int, grid: int) -> None:
    """Every chunk ends on the grid or at the prompt's end, a tick stays within its budget (at least one grid cell), the
    first in line always moves, and all prompts end."""
    done = [0] * len(lengths)
    for _ in range(2 * sum(lengths) + 1):
        open_now = [index for index, length in enumerate(lengths) if done[index] < length]
        if not open_now:
            break
        stops = prefill_stops([Prefill(done[i], lengths[i]) for i in open_now], budget_tokens=budget, grid=grid)
        assert sum(stop - done[i] for i, stop in zip(open_now, stops, strict=True)) <= max(budget, grid)
        assert stops[0] > done[open_now[0]]
        for index, stop in zip(open_now, stops, strict=True):
            assert stop in (done[index], lengths[index]) or stop % grid == 0
            assert done[index] <= stop <= lengths[index]
            done[index] = stop
    assert done == lengths
