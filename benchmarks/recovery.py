"""Kill -9 in the middle of streams: how long until each reader sees its next new token, and whether anything is lost.

    make bench-recovery (or make recovery)
    python benchmarks/recovery.py --quick

What is done, and which token counts as new: `tests/chaos/recovery.py`. Exit code 1: an event was lost or came twice, a
text differs from its undisturbed run, or a recovery took longer than it may.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import tempfile
from dataclasses import asdict

from benchmarks import report
from tests.chaos.recovery import VICTIMS, Outcome, Plan, run
from tests.system import SCRIPTED, TINY

#: Fewer kills make no 99th percentile worth keeping.
MIN_KILLS = 50


def sample(outcome: Outcome) -> report.Sample:
    """A victim's figures."""
    took_s = [recovery.took_s for recovery in outcome.recoveries]
    over_s = [recovery.over_s for recovery in outcome.recoveries]
    figures = {
        "kills": outcome.kills,
        "recoveries": len(outcome.recoveries),
        "streams": outcome.streams,
        "p50 s": report.percentile(took_s, 50),
        "p99 s": report.percentile(took_s, 99),
        "max s": max(took_s),
        "engine p99 s": report.percentile([recovery.engine_s for recovery in outcome.recoveries], 99),
        "less engine p50 s": report.percentile(over_s, 50),
        "less engine p99 s": report.percentile(over_s, 99),
        "less engine max s": max(over_s),
    }
    return figures | {name: float(count) for name, count in faults(outcome).items()}


def faults(outcome: Outcome) -> dict[str, int]:
    """What must be zero."""
    return {
        "events lost": outcome.lost,
        "events twice": outcome.duplicated,
        "texts that differ": outcome.different,
        "other problems": len(outcome.problems) - outcome.different,
    }


def targets(outcomes: list[Outcome], bound_s: float) -> list[report.Target]:
    """Nothing lost, and p99 within the lease, a second, and the engine's own work."""
    found = []
    for outcome in outcomes:
        found += [
            report.Target(f"{outcome.victim}: {name}", float(count), at_most=0)
            for name, count in faults(outcome).items()
        ]
        over_s = [recovery.over_s for recovery in outcome.recoveries]
        p99_s = report.percentile(over_s, 99) if over_s else None
        found.append(report.Target(f"{outcome.victim}: p99 s less engine", p99_s, at_most=bound_s))
    all_over_s = [recovery.over_s for outcome in outcomes for recovery in outcome.recoveries]
    p99_s = report.percentile(all_over_s, 99) if all_over_s else None
    found.append(report.Target("all kills: p99 s less engine", p99_s, at_most=bound_s))
    return found


def main() -> None:
    """Kill and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=MIN_KILLS, help=f"kills of each victim ({MIN_KILLS})")
    parser.add_argument("--streams", type=int, default=3, help="streams read at any time (3)")
    parser.add_argument("--model", choices=(TINY, SCRIPTED), default=TINY, help="the engine: real or scripted (tiny)")
    parser.add_argument("--victims", default=",".join(VICTIMS), help="whom to kill, by commas (all)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and victims (1)")
    parser.add_argument("--quick", action="store_true", help="two kills of each; the figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    options = parser.parse_args()
    kills = 2 if options.quick else options.kills
    plan = Plan(model=options.model, kills=kills, seed=options.seed, streams=options.streams)

    report.note(f"seed {plan.seed}")
    with tempfile.TemporaryDirectory(prefix="genpool-recovery-") as name:
        outcomes = run(Path(name), plan, victims=options.victims.split(","), say=report.note)
    for outcome in outcomes:
        for problem in outcome.problems:
            report.note(f"{outcome.victim}: {problem}")
    result = report.Report(
        name="recovery",
        parameters=asdict(plan),
        samples={outcome.victim: [sample(outcome)] for outcome in outcomes if outcome.recoveries},
        targets=targets(outcomes, plan.bound_s),
        machine=report.machine(),
    )
    whole = kills >= MIN_KILLS and {outcome.victim for outcome in outcomes} == set(VICTIMS)
    report.publish(result, json_file=options.json, record=whole)
    if not all(target.met for target in result.targets):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
