"""What scheduling whole agents gains when KV is short, and whether the tail pays for it.

    make bench-program
    python benchmarks/program.py --only plain,full --agents 24 --regime divided
    make bench-program-full

Agents replay recorded work (`agent_traces.py`) over HTTP against the whole product: an API process, a worker, a state
server. The model is a Llama with random weights, the same for both engines; KV is given to the engine as a part of what
the agents would hold if all kept theirs. Every policy (`policies.py`) gets processes of its own, the same work in the
same order, and the coefficients that `genpool calibrate` finds at the start. A run's warm-up ends when so many requests
have ended that the windows are full.

`full + 36 abandoned` is `full` with 36 Programs that send one request in the warm-up and never say goodbye: only the
others count. `flood` is the first response of a Program of 800 tokens among ever new ones of 50, with KV for 1,000.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks import report
from benchmarks.agent_traces import REGIMES
from benchmarks.policies import BINDING_ONLY, FULL, OFFLOAD, PLAIN, POLICIES, TICKS
from benchmarks.processes import ROOT
from benchmarks.program_cells import run_all, targets_of_all
from benchmarks.program_flood import flood
from benchmarks.program_system import Bench, Cell, calibrated
from benchmarks.random_model import SIX_MILLION, write_model

ABANDONED = "full + 36 abandoned"
FLOOD = "flood"
PART = 0.35
#: Waits are bounded as lengths are: a request of the recorded ones takes some ten seconds, one here less than one.
SCALED = ("force_resume_timeout_seconds = 20.0",)
#: Where it costs little to come back, turns may change sooner, and whose KV is still there need not go first.
SCALED_OFFLOAD = ("force_resume_timeout_seconds = 8.0", 'resume_order = "fcfs"')
#: Options that are no parameters of the measurement.
UNTOLD = frozenset({"json", "quick", "full", "only", "coefficients"})
#: Where `--full` keeps what is done.
CELLS = ROOT / "build" / "program-full.jsonl"


def lines_of(settings: Sequence[str]) -> str:
    """Further lines of `[programs]`."""
    return "".join(f"{line}\n" for line in settings)


def cell_of(options: argparse.Namespace) -> Cell:
    """The cell of the command line."""
    return Cell(
        policy=FULL,
        regime=options.regime,
        agents=options.agents,
        part=options.part,
        backend=options.backend,
        seconds=options.seconds,
        warm_requests=options.warm_requests,
        settings=lines_of(options.set),
    )


def contestants(options: argparse.Namespace, bench: Bench) -> dict[str, Callable[[], report.Sample]]:
    """Those that were asked for, by name."""
    cell = cell_of(options)
    cells = {policy: cell.with_policy(policy) for policy in POLICIES}
    if options.set is SCALED:
        cells[OFFLOAD] = replace(cells[OFFLOAD], settings=lines_of(SCALED_OFFLOAD))
    found: dict[str, Callable[[], report.Sample]] = {
        policy: partial(bench.measure, each) for policy, each in cells.items()
    }
    found[ABANDONED] = partial(bench.measure, cell.with_policy(FULL, abandoned=36))
    found[FLOOD] = partial(flood, bench)
    wanted = options.only.split(",") if options.only else [PLAIN, BINDING_ONLY, FULL, OFFLOAD, TICKS, ABANDONED, FLOOD]
    return {name: found[name] for name in wanted}


def targets(samples: Mapping[str, Sequence[report.Sample]], part: float) -> list[report.Target]:
    """Those under pressure, with the KV of paused Programs dropped and offloaded, or, with KV for all, that nothing is
    lost."""
    medians = {name: report.medians(rounds) for name, rounds in samples.items()}

    def of(name: str, figure: str) -> float | None:
        return medians.get(name, {}).get(figure)

    def against(figure: str, other: str, policy: str = FULL) -> float | None:
        return report.ratio(of(policy, figure), of(other, figure))

    if part >= 1:
        return [report.Target("requests/s, full / plain, KV for all", against("requests/s", PLAIN), at_least=0.97)]
    found = [report.Target("plain hits, %: there is pressure", of(PLAIN, "hit %"), at_most=85)]
    for policy in (FULL, OFFLOAD):
        found += [
            report.Target(f"requests/s, {policy} / plain", against("requests/s", PLAIN, policy), at_least=1.8),
            report.Target(f"{policy} hits, %", of(policy, "hit %"), at_least=70),
            report.Target(f"requests/s, {policy} / ticks", against("requests/s", TICKS, policy), at_least=1),
            report.Target(f"first token p99, {policy} / ticks", against("first p99 s", TICKS, policy), at_most=0.5),
        ]
    abandoned = report.ratio(of(ABANDONED, "requests/s"), of(FULL, "requests/s"))
    found.append(report.Target("requests/s of the living, with / without 36 abandoned", abandoned, at_least=0.95))
    bound = report.ratio(of(FLOOD, "first response s"), of(FLOOD, "force wait s"))
    found.append(report.Target("flood: first response / force wait", bound, at_most=1.5))
    others = [rate for each in ("ttl_2", "ttl_0", "ttl_infinite") if (rate := of(each, "requests/s")) is not None]
    if others:
        best = report.ratio(of(FULL, "requests/s"), max(*others, of(PLAIN, "requests/s") or 0.0))
        found.append(report.Target("requests/s, full / the best fixed TTL or LRU", best, at_least=0.95))
    return found


def bench_of(options: argparse.Namespace, folder: Path, backends: Sequence[str]) -> Bench:
    """The model, its coefficients, and what all cells share."""
    model = folder / "model.gguf"
    write_model(model, SIX_MILLION)
    if options.coefficients is not None:
        costs = dict.fromkeys(backends, options.coefficients.read_text(encoding="utf-8"))
    else:
        costs = {each: calibrated(folder, model, each, seconds=options.calibrate_seconds) for each in backends}
    return Bench(folder, model, costs, task_requests=options.task_requests)


def options_of() -> argparse.Namespace:
    """The command line."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help=f"contestants, with commas between: {', '.join(POLICIES)}, ...")
    parser.add_argument("--regime", default="capped", choices=tuple(REGIMES), help="traces and gaps (capped)")
    parser.add_argument("--agents", type=int, default=16, help="at once (16)")
    parser.add_argument("--part", type=float, default=PART, help="of the agents' whole KV that there is (0.35)")
    parser.add_argument("--backend", default="numpy", choices=("numpy", "llama_cpp"), help="engine (numpy)")
    parser.add_argument("--seconds", type=float, default=80, help="of a run, after its warm-up (80)")
    parser.add_argument("--warm-requests", type=int, default=80, help="that end a warm-up (80)")
    parser.add_argument("--task-requests", type=int, default=8, help="of a task (8)")
    parser.add_argument("--calibrate-seconds", type=float, default=60, help="for the coefficients (60)")
    parser.add_argument("--coefficients", type=Path, metavar="TOML", help="take these, and measure none")
    parser.add_argument("--set", nargs="*", default=SCALED, metavar="LINE", help="further lines of [programs]")
    parser.add_argument("--full", action="store_true", help="every cell, one after the other; goes on where it ended")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.agents, options.seconds, options.warm_requests = 1, 4, 10, 12
        options.calibrate_seconds = 15
    return options


def main() -> None:
    """Measure and report."""
    options = options_of()
    backends = ("numpy", "llama_cpp") if options.full else (options.backend,)
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name:
        bench = bench_of(options, Path(name), backends)
        if options.full:
            samples = run_all(options.rounds, cell_of(options), CELLS, bench.measure)
        else:
            samples = report.interleaved(contestants(options, bench), options.rounds)
    parameters = {name: value for name, value in vars(options).items() if name not in UNTOLD}
    result = report.Report(
        name="program-full" if options.full else "program",
        parameters=parameters | {"coefficients": bench.costs},
        samples=samples,
        targets=targets_of_all(samples) if options.full else targets(samples, options.part),
        machine=report.machine(),
    )
    whole = not options.quick and not options.only and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
