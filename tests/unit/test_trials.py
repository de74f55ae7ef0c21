"""The gate that puts one job of a process on trial at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tasks.ports import RunnerCapacity
from workers.trials import TrialGate


@dataclass(eq=False)
class Serving:
    """As much of a rank's outlet and runner as the gate looks at."""

    in_flight: int = 0
    unproven: bool = False

    def has_unproven(self) -> bool:
        """Whether a job of it has not shown a token."""
        return self.unproven

    def is_unproven(self, _handout: Any) -> bool:
        """The same for its only job."""
        return self.unproven

    def capacity(self) -> RunnerCapacity:
        """Room for eight."""
        return RunnerCapacity(effective=8, in_flight=self.in_flight)


def gate_of(*ranks: Any) -> TrialGate:
    """A gate of these ranks."""
    gate = TrialGate()
    for rank in ranks:
        gate.join(rank, rank)
    return gate


def test_one_trial_at_a_time() -> None:
    """Who enters closes the gate to the others, until it leaves or serves no longer."""
    first, second = ranks = Serving(), Serving()
    gate: Any = gate_of(*ranks)
    assert not gate.closed_to(first)
    assert gate.enter(first)
    assert gate.enter(first)
    assert (gate.closed_to(first), gate.closed_to(second), gate.enter(second)) == (False, True, False)
    gate.leave(second)
    assert gate.closed_to(second)
    gate.leave(first)
    assert gate.enter(second)
    gate.part(second)
    assert not gate.closed_to(first)


def test_it_sees_the_whole_process() -> None:
    """A job of any model counts, as long as its rank serves."""
    first, second = ranks = Serving(), Serving(in_flight=1, unproven=True)
    gate: Any = gate_of(*ranks)
    assert (gate.is_empty(), gate.has_unproven()) == (False, True)
    second.unproven = False
    assert (gate.is_empty(), gate.has_unproven()) == (False, False)
    gate.part(second)
    assert gate.is_empty()
    first.in_flight = 1
    assert not gate.is_empty()


def test_a_trial_closes_the_gate_to_all_until_it_is_over() -> None:
    """To its own rank too. It is over when the job has shown a token or is gone, without anybody saying so; leaving
    does not end it, parting does."""
    first, _ = ranks = Serving(unproven=True), Serving()
    gate: Any = gate_of(*ranks)
    for end in (lambda: setattr(first, "unproven", False), lambda: gate.part(first)):
        first.unproven = True
        assert gate.enter(first)
        gate.put_on_trial(first, object())
        gate.leave(first)
        assert [gate.closed_to(rank) for rank in ranks] == [True, True]
        assert [gate.enter(rank) for rank in ranks] == [False, False]
        end()
        assert [gate.closed_to(rank) for rank in ranks] == [False, False]


def test_what_is_just_beginning_counts() -> None:
    """Until its rank holds it or gave up; and while the gate is closed, nothing begins."""
    first, second = ranks = Serving(), Serving()
    gate: Any = gate_of(*ranks)
    with pytest.raises(OSError, match="lost"), gate.beginning(first) as allowed:
        assert allowed
        assert (gate.is_empty(), gate.has_unproven()) == (False, True)
        raise OSError("lost")
    assert (gate.is_empty(), gate.has_unproven()) == (True, False)
    assert gate.enter(second)
    with gate.beginning(first) as allowed:
        assert not allowed
        assert (gate.is_empty(), gate.has_unproven()) == (True, False)
    with gate.beginning(second) as allowed:
        assert allowed
