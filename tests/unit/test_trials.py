"""The gate that puts one job of a process on trial at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
