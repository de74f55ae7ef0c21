"""Replicas of one model: how long a slot is idle while work waits, and how evenly replicas fill that are not alike.

    make bench-replicas
    python benchmarks/replicas.py --quick
    python benchmarks/replicas.py --sessions 24

Three workers with the scripted engine, whose generations last as long as it is told, on one state server. Backlog: more
jobs than slots, of very different lengths, then nothing more. Trickle: jobs come one by one, at random, for half of the
slots. With `--sessions` another trickle follows, of turns of so many sessions, by which replicas go then
(`request_policy = "consistent_hash"`): how many come home, and what it costs. When a job came is in its record; when it
began and left a slot, in the engine's log. All of one machine's clock.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing

from benchmarks import report
from benchmarks.idle_slots import Span, excess, idle_gaps_s
from pool.replica_settings import CONSISTENT_HASH, LEAST_INFLIGHT
from pool.rules.affinity import home_of
from pool.store.connection import connect
from pool.store.flows import session_of
from pool.store.ranks import RankRegistry
from tests.system import SCRIPTED, System
from tests.waiting import wait_until
from webapp.auth import NOBODY

STEP_MS = 5.0
#: Tokens of a generation: many short ones, some long ones.
LENGTHS = (5, 10, 10, 20, 20, 40, 80, 160)
FLEETS = {"equal": (4, 4, 4), "unequal": (8, 4, 2)}
#: Of the slots, for which jobs come.
LOAD = 0.5
MOST_IDLE_S = 0.05
#: Of an engine's session: the job it belongs to.
TOKEN_CHARS = 32


def measure(fleet: Sequence[int], jobs: int, seed: int, folder: Path, sessions: int = 0) -> report.Sample:
    """One round of a fleet: all phases on fresh processes."""
    sections: dict[str, dict[str, object]] = {"limits": {"pending_per_model": 10_000}}
    models = {SCRIPTED: {"request_policy": CONSISTENT_HASH if sessions else LEAST_INFLIGHT}}
    with System(folder, workers=0, sections=sections, models=models, delay_ms=STEP_MS) as system:
        system.workers = [system.worker_part(at, "", "-c", str(slots)) for at, slots in enumerate(fleet)]
        system.start()
        slots = _slots(system, fleet)
        lengths = random.Random(seed)
        backlog = [system.submit(_script(lengths)) for _ in range(jobs)]
        spans = _spans(system, backlog, slots)
        rate = LOAD * sum(fleet) / (STEP_MS / 1000 * sum(LENGTHS) / len(LENGTHS))
        trickled = _spans(system, _trickle(system, jobs, rate, lengths), slots)
        of_sessions = _sessions(system, jobs, rate, lengths, sessions, slots) if sessions else {}
        assert system.audit() == []
    gaps, even = idle_gaps_s(spans, slots), excess(trickled, slots)
    return {
        "jobs": (3.0 if sessions else 2.0) * jobs,
        "idle p50 ms": 1000 * report.percentile(gaps, 50),
        "idle p99 ms": 1000 * report.percentile(gaps, 99),
        "idle max ms": 1000 * max(gaps),
        "trickle idle p99 ms": 1000 * report.percentile(idle_gaps_s(trickled, slots), 99),
        "fuller than the emptiest, mean": sum(even) / len(even),
        "fuller than the emptiest, p99": report.percentile(even, 99),
        **of_sessions,
    }


def _trickle(system: System, jobs: int, rate: float, random_: random.Random, names: Sequence[str] = ("",)) -> list[str]:
    """Jobs that come one by one, each of one of these sessions."""
    found = []
    for _ in range(jobs):
        time.sleep(random_.expovariate(rate))
        found.append(system.submit(_script(random_), session=random_.choice(names)))
    return found


def _sessions(
    system: System, jobs: int, rate: float, random_: random.Random, sessions: int, slots: dict[str, int]
) -> report.Sample:
    names = [f"chat-{number}" for number in range(sessions)]
    turns = _trickle(system, jobs, rate, random_, names)
    spans = _spans(system, turns, slots)
    even = excess(spans, slots)
    with closing(connect(system.url, max_connections=1)) as client:
        ranks = [rank.id for rank in RankRegistry(client, SCRIPTED).live()]
    homes = {session_of(NOBODY, name): home_of(session_of(NOBODY, name), ranks) for name in names}
    at_home = [system.record(job).rank == homes[system.fact(job, "session")] for job in turns]
    gaps = idle_gaps_s(spans, slots)
    return {
        "turns that came home": sum(at_home) / len(at_home),
        "turns idle p50 ms": 1000 * report.percentile(gaps, 50),
        "turns idle p99 ms": 1000 * report.percentile(gaps, 99),
        "turns fuller than the emptiest, mean": sum(even) / len(even),
    }


def _script(lengths: random.Random) -> str:
    return f"repeat {lengths.choice(LENGTHS)} x"


def _slots(system: System, fleet: Sequence[int]) -> dict[str, int]:
    """Slots by process; once all replicas know of each other."""
    keys = system.keys()
    with closing(connect(system.url, max_connections=1)) as client:
        wait_until(
            lambda: client.hlen(keys.load) == len(fleet), description="replicas to know each other", timeout_s=30
        )
        ranks = RankRegistry(client, SCRIPTED).live()
    return {str(rank.pid): rank.slots for rank in ranks}


def _spans(system: System, jobs: Sequence[str], slots: dict[str, int]) -> list[Span]:
    """Where each job was and when, once all have ended."""
    records = [system.ended(job, timeout_s=300) for job in jobs]
    came_s = {record.ref.token: record.created_ms / 1000 for record in records}
    began: dict[str, tuple[str, float]] = {}
    spans = []
    wait_until(lambda: _freed(system, came_s), description="all slots to be free", timeout_s=30)
    for line in system.scripted_log.read_text().splitlines():
        verb, session, _, *rest = line.split()
        token = session[:TOKEN_CHARS]
        if verb == "tok" or token not in came_s:
            continue
        pid, at_s = rest[0], float(rest[1])
        if verb == "start":
            began[token] = (pid, at_s)
        else:
            spans.append(Span(came_s[token], max(began[token][1], came_s[token]), at_s, pid))
    assert {span.replica for span in spans} <= set(slots)
    assert len(spans) == len(jobs)
    return spans


def _freed(system: System, tokens: dict[str, float]) -> bool:
    lines = [line.split() for line in system.scripted_log.read_text().splitlines() if line.startswith("free ")]
    return tokens.keys() <= {line[1][:TOKEN_CHARS] for line in lines}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=400, help="of each phase (400)")
    parser.add_argument("--rounds", type=int, default=report.MIN_ROUNDS, help=f"({report.MIN_ROUNDS})")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and moments (1)")
    parser.add_argument("--sessions", type=int, default=0, help="also turns of so many sessions (0: none)")
    parser.add_argument("--quick", action="store_true", help="one round of 40 jobs; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    options = parser.parse_args()
    jobs, rounds = (40, 1) if options.quick else (options.jobs, options.rounds)
    samples: dict[str, list[report.Sample]] = {name: [] for name in FLEETS}
    with tempfile.TemporaryDirectory(prefix="genpool-replicas-") as folder:
        for number in range(rounds):
            for name, fleet in FLEETS.items():
                report.note(f"round {number + 1}: {name}")
                place = Path(folder) / f"{name}-{number}"
                samples[name].append(measure(fleet, jobs, options.seed + number, place, options.sessions))
    figures = ["idle p99 ms", *(["turns idle p99 ms"] if options.sessions else [])]
    targets = [
        report.Target(f"{name}: {figure}", report.medians(found)[figure], at_most=1000 * MOST_IDLE_S)
        for figure in figures
        for name, found in samples.items()
    ]
    result = report.Report(
        name="replicas",
        parameters={
            "jobs": jobs,
            "rounds": rounds,
            "sessions": options.sessions,
            "seed": options.seed,
            "step_ms": STEP_MS,
            "load": LOAD,
        },
        samples=samples,
        targets=targets,
        machine=report.machine(),
    )
    report.publish(result, json_file=options.json, record=not options.quick and rounds >= report.MIN_ROUNDS)
    if not all(target.met for target in targets):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
