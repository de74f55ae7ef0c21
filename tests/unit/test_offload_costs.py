"""When KV is put back, and when its prompt is computed again."""

from __future__ import annotations

import pytest

from pool.rules.offloading import WEIGHT, Pace, is_cheaper


@pytest.mark.parametrize(
    ("resident", "restored", "seconds", "cheaper"),
    [
        (0, 800, 0.7, True),  # 1 s of computing all, 0.2 s of computing the rest
        (0, 800, 0.8, False),
        (0, 800, 0.9, False),
        (600, 800, 0.1, True),
        (600, 800, 0.3, False),
        (800, 800, 0.0, False),
        (900, 800, 0.0, False),
        (0, 800, float("inf"), False),
    ],
)
def test_putting_back_must_be_cheaper_in_all(resident: int, restored: int, seconds: float, cheaper: bool) -> None:
    """Against what is resident, with the prefill of the rest; of equals it is computed."""
    found = is_cheaper(
        1000,
        resident=resident,
        restored=restored,
        restore_seconds=seconds,
        prefill_seconds=lambda tokens: tokens / 1000,
    )
    assert found == cheaper


def test_a_pace_follows_what_is_measured() -> None:
    """Nothing is known before the first measurement; later ones count their weight."""
    pace = Pace()
    assert pace.seconds(1) == float("inf")
    pace.learn(100, 2.0)
    assert pace.seconds(50) == 1.0
    pace.learn(100, 4.0)
    assert pace.seconds(100) == 2.0 * (1 - WEIGHT) + 4.0 * WEIGHT
    pace.learn(100, -1.0)
    assert pace.seconds(100) >= 0
