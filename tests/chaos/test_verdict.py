"""The verdict of a run finds what it is there to find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pool.store.records import Output
from tests.chaos.driver import MOVES, shortcomings
from tests.chaos.ledger import Account, Ledger, judge

JOB = "resp_scripted.0_" + "a" * 32


@dataclass
class Stored:
    """What the verdict reads of a record."""

    state: str = "completed"
    attempt: int = 1
    error_code: str | None = None
    outputs: tuple[Output, ...] = (Output("text", "stop", 4),)

    @property
    def terminal(self) -> bool:
        """Whether it has ended."""
        return self.state not in ("queued", "running")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """An empty one."""
    return Ledger(tmp_path / "clients.jsonl")


def account(ledger: Ledger, **fields: Any) -> Account:
    """The account of a job that went well, unless `fields` say otherwise."""
    account = ledger.open("sync", "scripted", ("text",))
    for name, value in ({"ids": {JOB}, "state": "completed", "seen": ("text",)} | fields).items():
        setattr(account, name, value)
    return account


def test_a_good_run_has_no_faults(ledger: Ledger) -> None:
    """One job, seen and stored alike; a second attempt counts as recovered."""
    account(ledger)
    verdict = judge(ledger, {JOB: Stored(attempt=2)})
    assert verdict.faults == []
    assert (verdict.jobs["acknowledged"], verdict.jobs["completed"], verdict.jobs["recovered"]) == (1, 1, 1)


@pytest.mark.parametrize(
    ("fields", "records", "kind"),
    [
        ({}, {}, "lost"),
        ({"state": "", "seen": None}, {JOB: Stored(state="running")}, "lost"),
        ({"ids": set(), "state": ""}, {}, "unanswered"),
        ({"ids": {JOB, JOB[:-1] + "b"}}, {JOB: Stored()}, "duplicated"),
        ({}, {JOB: Stored(), JOB[:-1] + "b": Stored()}, "duplicated"),
        ({"problems": ["event 7 came after 5"]}, {JOB: Stored()}, "unexpected"),
        ({"state": "failed"}, {JOB: Stored()}, "unexpected"),
        ({"state": "failed"}, {JOB: Stored(state="failed", error_code="poison")}, "unexpected"),
        ({}, {JOB: Stored(outputs=(Output("other", "stop", 5),))}, "text differs"),
        ({"seen": ("tex",)}, {JOB: Stored()}, "text differs"),
    ],
)
def test_each_kind_of_fault_is_named(ledger: Ledger, fields: Any, records: Any, kind: str) -> None:
    """What a client saw or what is stored is wrong in one way."""
    account(ledger, **fields)
    verdict = judge(ledger, records)
    assert verdict.jobs[kind] == 1
    assert [fault.partition(":")[0] for fault in verdict.faults] == [kind]


def test_a_lost_answer_may_leave_one_job_that_ends(ledger: Ledger) -> None:
    """A request without a key may have been accepted, once, though no answer came; it still has to end."""
    account(ledger, ids=set(), state="", refused=True, lost_answers=1)
    assert judge(ledger, {JOB: Stored()}).faults == []
    assert [fault.partition(":")[0] for fault in judge(ledger, {JOB: Stored(state="queued")}).faults] == ["lost"]


def test_a_full_run_must_have_done_its_work() -> None:
    """A run without one of the faults, with few faults or few jobs, or with room for everybody's KV proves too little,
    and says so."""
    good = {"faults_missing": [], "faults_done": 60, "jobs": {"acknowledged": 1000}}
    good |= {"preempted": 1, "prompt_tokens_reused": 1, "program_moves": dict.fromkeys(MOVES, 1)}
    assert shortcomings(good) == []
    moves = {"program_moves": dict.fromkeys(MOVES[1:], 1)}
    few = (moves, {"faults_missing": ["kill state"]}, {"faults_done": 59}, {"jobs": {}})
    for lacking in (*few, {"preempted": 0}, {"prompt_tokens_reused": 0}):
        assert len(shortcomings(good | lacking)) == 1


def test_a_poisonous_job_fails_by_that_name(ledger: Ledger) -> None:
    """Failed is right for it, but only as poison."""
    account(ledger, outcomes=("failed",), error_code="poison", state="failed", seen=None)
    assert judge(ledger, {JOB: Stored(state="failed", error_code="poison")}).faults == []
    assert judge(ledger, {JOB: Stored(state="failed", error_code="engine_error")}).jobs["unexpected"] == 1
