"""Replicas of one model: how long a slot is idle while work waits, and how evenly replicas fill that are not alike.

    make bench-replicas
    python benchmarks/replicas.py --quick

Three workers with the scripted engine, whose generations last as long as it is told, on one state server. Backlog: more
jobs than slots, of very different lengths, then nothing more. Trickle: jobs come one by one, at random, for half of the
slots. When a job came is in its record; when it began and left a slot, in the engine's log. All of one machine's clock.
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
from pool.store.connection import connect
from pool.store.ranks import RankRegistry
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

STEP_MS = 5.0
#: Tokens of a generation: many short ones, some long ones.
LENGTHS = (5, 10, 10, 20, 20, 40, 80, 160)
FLEETS = {"equal": (4, 4, 4), "unequal": (8, 4, 2)}
#: Of the slots, for which jobs come.
LOAD = 0.5
MOST_IDLE_S = 0.05
#: Of an engine's session: the job it belongs to.
TOKEN_CHARS = 32


def measure(fleet: Sequence[int], jobs: int, seed: int, folder: Path) -> report.Sample:
    """One round of a fleet: both phases on fresh processes."""
    limits = {"pending_per_model": 10_000}
    with System(folder, workers=0, sections={"limits": limits}, delay_ms=STEP_MS) as system:
        system.workers = [system.worker_part(at, "", "-c", str(slots)) for at, slots in enumerate(fleet)]
        system.start()
        slots = _slots(system, fleet)
        lengths = random.Random(seed)
        backlog = [system.submit(_script(lengths)) for _ in range(jobs)]
        spans = _spans(system, backlog, slots)
        rate = LOAD * sum(fleet) / (STEP_MS / 1000 * sum(LENGTHS) / len(LENGTHS))
        trickle = []
        for _ in range(jobs):
            time.sleep(lengths.expovariate(rate))
            trickle.append(system.submit(_script(lengths)))
        trickled = _spans(system, trickle, slots)
        assert system.audit() == []
    gaps, even = idle_gaps_s(spans, slots), excess(trickled, slots)
    return {
        "jobs": 2.0 * jobs,
        "idle p50 ms": 1000 * report.percentile(gaps, 50),
        "idle p99 ms": 1000 * report.percentile(gaps, 99),
        "idle max ms": 1000 * max(gaps),
        "trickle idle p99 ms": 1000 * report.percentile(idle_gaps_s(trickled, slots), 99),
        "fuller than the emptiest, mean": sum(even) / len(even),
        "fuller than the emptiest, p99": report.percentile(even, 99),
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
                samples[name].append(measure(fleet, jobs, options.seed + number, place))
    targets = [
        report.Target(f"{name}: idle p99 ms", report.medians(found)["idle p99 ms"], at_most=1000 * MOST_IDLE_S)
        for name, found in samples.items()
    ]
    result = report.Report(
        name="replicas",
        parameters={"jobs": jobs, "rounds": rounds, "seed": options.seed, "step_ms": STEP_MS, "load": LOAD},
        samples=samples,
        targets=targets,
        machine=report.machine(),
    )
    report.publish(result, json_file=options.json, record=not options.quick and rounds >= report.MIN_ROUNDS)
    if not all(target.met for target in targets):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
