"""Forty agents in the middle of their turns, and kill -9: `python -m tests.chaos.program_kills --rounds 30 --seed 7`.

Two API nodes, two workers, one state server. In each round one process, drawn by the seed, is killed and started again,
then the state server is (its log is all it has left). All agents must take all their turns, at whichever node, with the
texts of an undisturbed run; no turn may be lost or run twice, and the audit must find every ledger exact.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pool.store.ids import parse_ref
from pool.store.jobs import JobStore
from pool.store.program_keys import ProgramKeys
from tasks.celery import create_app
from tests.chaos.agents import Agent
from tests.chaos.clients import Callers, Work
from tests.chaos.ledger import Ledger, judge
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until

AGENTS, ROUNDS = 40, 30
PROGRAMS = {
    "enabled": True,
    "global_queue": True,
    "metrics_interval_seconds": 0.3,
    "max_active_programs_per_target": 12,
    "stats_window_size": 8,
    "max_acting_ttl_seconds": 1,
    "force_resume_timeout_seconds": 10,
    "rank_gone_seconds": 5,
}
SECTIONS = {
    "server": {"sync_wait_seconds": 30, "orphan_grace_seconds": 40, "threads": 96},
    "limits": {"pending_per_model": 400},
    "programs": PROGRAMS,
}
#: From the start of a round's agents to its first kill, at most; and between its two.
PHASE_S, BETWEEN_S = 3.0, 2.0
ROUND_S = 120.0


@dataclass
class Outcome:
    """What all rounds came to. `problems`: in words; empty when all went well."""

    kills: list[str] = field(default_factory=list)
    turns: int = 0
    recovered: int = 0
    problems: list[str] = field(default_factory=list)


def run(folder: Path, *, rounds: int, agents: int, seed: int) -> Outcome:
    """All rounds on one system."""
    outcome, rng = Outcome(), random.Random(seed)
    with System(
        folder, apis=2, workers=2, sections=SECTIONS, models={SCRIPTED: {"target_inflight": 8}}, delay_ms=15
    ) as system:
        system.start()
        for number in range(rounds):
            _round(system, folder / f"clients-{number}.jsonl", number, agents, rng, outcome)
            if outcome.problems:
                break
    return outcome


def _round(system: System, log: Path, number: int, agents: int, rng: random.Random, outcome: Outcome) -> None:
    ledger = Ledger(log)
    callers = Callers([system.api_url(api) for api in system.apis], ledger, create_app(system.settings))
    threads = [
        threading.Thread(target=_agent(number, at, rng).run, args=(callers, rng.getrandbits(32)), daemon=True)
        for at in range(agents)
    ]
    for thread in threads:
        thread.start()
    time.sleep(rng.uniform(0.2, PHASE_S))
    victim = rng.choice([*system.apis, *system.workers])
    _kill(victim, outcome)
    time.sleep(rng.uniform(0, BETWEEN_S))
    _kill(system.state, outcome)
    deadline_s = time.monotonic() + ROUND_S
    for thread in threads:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    stuck = sum(thread.is_alive() for thread in threads)
    if stuck:
        outcome.problems.append(f"{stuck} agents have not ended after {ROUND_S:g} s")
    callers.close()
    outcome.problems += callers.problems
    _judge(system, ledger, outcome)
    if outcome.problems:
        outcome.problems.append(f"in round {number}")


def _agent(number: int, at: int, rng: random.Random) -> Agent:
    turns = []
    for turn in range(rng.randint(2, 4)):
        piece, count = f"{number:03d}{at:02d}{turn:02d}.", rng.choice((3, 10, 30))
        history = "I was here before. |" * turn
        body = {"model": SCRIPTED, "input": f"{history}repeat {count} {piece}", "max_output_tokens": 4000}
        turns.append(Work(SCRIPTED, body, (piece * count,)))
    return Agent(f"agent-{number}-{at}", turns, says=rng.random() < 0.5)


def _kill(part: Part, outcome: Outcome) -> None:
    part.kill()
    part.start()
    outcome.kills.append(part.name)


def _judge(system: System, ledger: Ledger, outcome: Outcome) -> None:
    """Every turn ended once, with its text; nothing waits or is held any more; the books are exact."""
    keys = ProgramKeys(f"{SCRIPTED}:0")
    with system.client() as client:
        wait_until(
            lambda: client.zcard(keys.index) + client.zcard(keys.leases) == 0,
            description="nothing to be queued or held",
            timeout_s=30,
        )
        store = JobStore(client, result_ttl_ms=1, pending_per_model=1)
        ids = {job for account in ledger.accounts for job in account.ids}
        records = {job: store.read(parse_ref(job)) for job in ids}
    verdict = judge(ledger, records)
    outcome.turns += verdict.jobs["acknowledged"]
    outcome.recovered += verdict.jobs["recovered"]
    outcome.problems += verdict.faults
    outcome.problems += map(str, system.audit())


def main() -> int:
    """Run once; 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--agents", type=int, default=AGENTS)
    parser.add_argument("--seed", type=int, default=None, help="replays the choices of an earlier run")
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    folder = Path(tempfile.mkdtemp(prefix="genpool-program-kills-"))
    print(f"seed {seed}, {options.rounds} rounds of {options.agents} agents, logs in {folder}", flush=True)
    outcome = run(folder, rounds=options.rounds, agents=options.agents, seed=seed)
    killed = {name: outcome.kills.count(name) for name in sorted(set(outcome.kills))}
    print(f"kills {killed}; {outcome.turns} turns, {outcome.recovered} of them taken over by another attempt")
    for problem in outcome.problems[:40]:
        print(f"PROBLEM {problem}")
    print("FAILED" if outcome.problems else "No turn was lost or run twice.")
    return int(bool(outcome.problems))


if __name__ == "__main__":
    sys.exit(main())
