"""How many prompt tokens a step takes on, by what the last steps took."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pool.rules.pacing import BURST_TARGETS, LEAST_STEPS, Pace, prefill_budget

costs_s = st.floats(1e-5, 1.0)


def budget(pace: Pace, *, rows: int = 8, settled: bool = True, limit: int = 4096, target_s: float = 0.25) -> int:
    return prefill_budget(pace, limit=limit, rows=rows, settled=settled, target_s=target_s)


def test_a_step_takes_on_what_fits_its_time() -> None:
    """0.25 s are 125 tokens of 2 ms, of which 8 are decode rows. The limit holds, and rows may fill it all."""
    assert budget(Pace(0.02, 0.002)) == 117
    assert budget(Pace(0.02, 0.002), rows=0) == 125
    assert budget(Pace(0.02, 0.002), limit=64) == 64
    assert budget(Pace(0.02, 0.5)) == 0


def test_prompts_get_three_quarters_of_the_time_at_least() -> None:
    """Where decoding alone takes longer than the target, a step takes four times as long, not for ever the same."""
    assert budget(Pace(1.0, 0.01)) == LEAST_STEPS * 100 - 8


def test_without_a_target_there_is_the_limit_alone() -> None:
    """Whatever steps took."""
    assert budget(Pace(1.0, 1.0), target_s=0.0) == 4096


def test_a_burst_is_prefilled_together() -> None:
    """Nobody is in mid-stream: a step takes on much more, though not without bound."""
    assert budget(Pace(0.02, 0.002), settled=False) == BURST_TARGETS * 125 - 8
    assert budget(Pace(0.02, 0.002), settled=False, limit=512) == 512


def test_what_is_not_known_is_tried_with_little_beside_others() -> None:
    """And with all that may be where nobody waits for a token."""
    assert budget(Pace(0.02, 0.0)) == 0
    assert budget(Pace(), settled=False) == 4096


def test_ends_of_prompts_say_nothing_of_many_tokens() -> None:
    """A token takes as long as a decode row: were all as dear, a burst would be computed in drops."""
    pace = Pace(0.02, 0.002)
    for _ in range(100):
        pace = pace.after(0.02, rows=0, prefill_tokens=1, grid=16)
    assert pace == Pace(0.02, 0.002)
    assert Pace().after(0.02, rows=0, prefill_tokens=15, grid=16) == Pace()
    assert pace.after(0.096, rows=0, prefill_tokens=16, grid=16).token_s == pytest.approx(0.004)


@given(
    row_s=costs_s,
    token_s=costs_s,
    call_s=costs_s,
    rows=st.integers(1, 64),
    target_s=st.floats(0.01, 2.0),
    grid=st.sampled_from([1, 16]),
)
def test_steps_come_to_take_what_they_may(
    row_s: float, token_s: float, call_s: float, rows: int, target_s: float, grid: int
) -> None:
    """Whatever calls, rows and tokens cost, and though nothing was known: within a few dozen steps a step with prefill
    takes its time but for a cell of the grid, and from the first one never much more. Where a prompt's token is many
    times as dear as a row, which no engine's is, two sizes of steps may follow each other."""
    assume(token_s <= row_s)
    decode_s = call_s + rows * row_s
    pace = Pace().after(decode_s, rows=rows, prefill_tokens=0)
    allowed_s = max(target_s, LEAST_STEPS * decode_s)
    cell_s = call_s + grid * token_s
    for _ in range(60):
        tokens = max(prefill_budget(pace, limit=10**9, rows=rows, settled=True, target_s=target_s), grid)
        took_s = decode_s + call_s + tokens * token_s
        assert took_s <= max(allowed_s, decode_s + cell_s) * 1.001
        pace = pace.after(took_s, rows=rows, prefill_tokens=tokens)
    assert took_s == pytest.approx(max(allowed_s, decode_s + cell_s), rel=0.05, abs=2 * token_s)


@given(took_s=st.lists(st.floats(0, 10), min_size=1, max_size=20), rows=st.integers(0, 8), tokens=st.integers(0, 64))
def test_a_pace_lies_between_what_was_seen(took_s: list[float], rows: int, tokens: int) -> None:
    """Steps with prefill and without are told apart."""
    pace = Pace()
    for each_s in took_s:
        pace = pace.after(each_s, rows=rows, prefill_tokens=tokens)
    seen_s, other_s = (pace.token_s * (rows + tokens), pace.decode_s) if tokens else (pace.decode_s, pace.token_s)
    assert min(took_s) * 0.999 <= seen_s <= max(took_s) * 1.001
    assert other_s == 0
