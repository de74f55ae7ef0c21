"""`make program-kills`, small."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.program_kills import run


def test_agents_go_on_after_kills(folder: Path) -> None:
    """A process and then the state server die in the middle of turns: each turn ends once with its text."""
    outcome = run(folder, rounds=1, agents=10, seed=5)
    assert outcome.problems == []
    assert len(outcome.kills) == 2
    assert outcome.turns >= 20
