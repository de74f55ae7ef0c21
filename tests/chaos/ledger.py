"""What the clients of a run saw, each job in its own account, and the verdict over it."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SUCCEEDED = ("completed", "incomplete")


@dataclass
class Account:
    """One job as its client sees it.

    `texts`: what an undisturbed run gives, one a choice; `outcomes`: the states that are right; `ids`: every id that an
    answer gave for it (more than one: it was run twice); `problems`: what the client saw and should not have;
    `lost_answers`: requests without a key that may have been accepted though no answer came; `refused`: not sent again.
    """

    number: int
    door: str
    model: str
    texts: tuple[str, ...]
    outcomes: tuple[str, ...] = SUCCEEDED
    error_code: str = ""
    ids: set[str] = field(default_factory=set)
    state: str = ""
    seen: tuple[str, ...] | None = None
    problems: list[str] = field(default_factory=list)
    refused: bool = False
    lost_answers: int = 0
    resends: int = 0
    began_s: float = field(default_factory=time.monotonic)
    took_s: float = 0.0

    @property
    def acknowledged(self) -> bool:
        """Whether an answer named its id."""
        return bool(self.ids)


class Ledger:
    """The accounts of a run, also written to a file line by line as they close."""

    def __init__(self, path: Path) -> None:
        self.accounts: list[Account] = []
        self._path = path
        self._lock = threading.Lock()

    def open(self, door: str, model: str, texts: tuple[str, ...], **fields: Any) -> Account:
        """A new account."""
        with self._lock:
            account = Account(len(self.accounts), door, model, texts, **fields)
            self.accounts.append(account)
        return account

    def close(self, account: Account) -> None:
        """Its client has seen the end, or gave up."""
        account.took_s = time.monotonic() - account.began_s
        line = {
            "number": account.number,
            "door": account.door,
            "ids": sorted(account.ids),
            "state": account.state,
            "took_s": round(account.took_s, 3),
            "resends": account.resends,
            "problems": account.problems,
        }
        with self._lock, self._path.open("a") as log:
            log.write(json.dumps(line) + "\n")


@dataclass
class Verdict:
    """Counts over all accounts, and every fault found, in words."""

    jobs: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def add(self, kind: str, account: Account, what: str) -> None:
        """One thing that should not be."""
        self.jobs[kind] += 1
        self.faults.append(f"{kind}: job {account.number} ({account.door} {sorted(account.ids)}): {what}")


def judge(ledger: Ledger, records: Mapping[str, Any]) -> Verdict:
    """Compare every account with what is stored. `records`: JobRecord by id, of every job in the store."""
    verdict = Verdict()
    known: set[str] = set()
    for account in ledger.accounts:
        verdict.jobs["sent"] += 1
        verdict.jobs[f"door {account.door}"] += 1
        known |= account.ids
        _judge_one(account, records, verdict)
    strangers = set(records) - known
    # A request without a key whose answer was lost has no name that its client knows: it may be in the store, once.
    allowed = sum(account.lost_answers for account in ledger.accounts)
    verdict.jobs["of lost answers"] = len(strangers)
    if len(strangers) > allowed:
        verdict.jobs["duplicated"] += len(strangers) - allowed
        verdict.faults.append(f"duplicated: {len(strangers)} jobs that no client knows, {allowed} could be")
    for token in strangers:
        if not records[token].terminal:
            verdict.jobs["lost"] += 1
            verdict.faults.append(f"lost: {token} has not ended")
    return verdict


def _judge_one(account: Account, records: Mapping[str, Any], verdict: Verdict) -> None:
    if not account.acknowledged:
        if account.refused:
            verdict.jobs["refused"] += 1
        else:
            verdict.add("unanswered", account, "; ".join(account.problems) or "no answer came")
        return
    verdict.jobs["acknowledged"] += 1
    if len(account.ids) > 1:
        verdict.add("duplicated", account, "one request became several jobs")
    for problem in account.problems:
        verdict.add("unexpected", account, problem)
    record = records.get(sorted(account.ids)[0])
    if record is None or not record.terminal:
        verdict.add("lost", account, "no record" if record is None else f"still {record.state}")
        return
    if account.state and account.state != record.state:
        verdict.add("unexpected", account, f"its client saw {account.state}, the record says {record.state}")
    if record.state not in account.outcomes:
        verdict.add("unexpected", account, f"ended {record.state}: {record.error_code}")
        return
    if account.error_code and record.error_code != account.error_code:
        verdict.add("unexpected", account, f"failed as {record.error_code}, not as {account.error_code}")
    verdict.jobs[record.state] += 1
    verdict.jobs["recovered"] += record.attempt > 1
    if record.state in SUCCEEDED:
        _compare_texts(account, tuple(output.text for output in record.outputs), verdict)


def _compare_texts(account: Account, stored: tuple[str, ...], verdict: Verdict) -> None:
    if stored != account.texts:
        verdict.add("text differs", account, f"{len(stored[0])} characters stored, {len(account.texts[0])} expected")
    if account.seen is not None and account.seen != account.texts:
        verdict.add("text differs", account, f"its client saw {len(account.seen[0])} characters")
