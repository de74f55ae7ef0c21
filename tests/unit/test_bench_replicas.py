"""What the benchmark of replicas makes of what it saw."""

from __future__ import annotations

import pytest

from benchmarks.idle_slots import Span, excess, idle_gaps_s

SLOTS = {"a": 1, "b": 2}


def test_a_slot_is_idle_while_a_job_waits_and_no_longer() -> None:
    """Not before a job comes, not where none waits, not where all slots are taken."""
    spans = [Span(0, 0, 10, "a"), Span(1, 1.25, 9, "b"), Span(2, 2.5, 9, "b"), Span(3, 10.125, 11, "a")]
    gaps = idle_gaps_s(spans, SLOTS)
    # b had room for the second and third; at 9 both of its slots are free and the fourth waits until a takes it.
    assert sorted(gap for gap in gaps if gap) == pytest.approx([0.125, 0.25, 0.5, 1.125])


def test_a_job_that_is_taken_at_once_is_a_gap_of_nothing() -> None:
    """Else a few late ones would be all there is."""
    assert idle_gaps_s([Span(0, 0, 1, "a"), Span(0, 1, 2, "a")], {"a": 1}) == [0.0, 0.0]


def test_excess_is_against_the_emptiest() -> None:
    """For its slots."""
    spans = [Span(0, 0, 9, "b"), Span(1, 1, 9, "b"), Span(2, 2, 9, "a"), Span(10, 10, 11, "a")]
    assert excess(spans, SLOTS) == [0, 0.5, 0, 0]
