"""The measuring programs of `make recovery` and `make bench-waiters`, small: they work and count right."""

from __future__ import annotations

from pathlib import Path

from benchmarks import waiters
from tests.chaos.recovery import VICTIMS, Plan, run
from tests.system import SCRIPTED


def test_streams_survive_each_kill(folder: Path) -> None:
    """A kill of each kind of process in the middle of streams: no event lost or twice, and every text as it was."""
    plan = Plan(model=SCRIPTED, kills=1, streams=2, texts=2, tokens=200, lease_s=1.6, phase_s=0.3, replays=1)
    outcomes = run(folder, plan)
    assert [outcome.victim for outcome in outcomes] == list(VICTIMS)
    for outcome in outcomes:
        assert outcome.problems == []
        assert (outcome.kills, outcome.lost, outcome.duplicated, outcome.different) == (1, 0, 0, 0)
        assert outcome.recoveries
        assert outcome.streams >= 2


def test_every_waiter_gets_its_answer_over_few_connections() -> None:
    """Ten waits and ten streams, ended one by one, over cut subscriptions, and all at once."""
    figures = waiters.measure(waiters.genpool(), waiters.Size(waiters=10, rate=50, idle_s=0.3, threads=48))
    assert (figures["unanswered"], figures["wrong"]) == (0, 0)
    assert 1 < figures["connections"] <= 4
    assert 1 < figures["connections after"] <= 4
    assert figures["threads"] > 20
