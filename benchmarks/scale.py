"""What a decision about Programs costs, and what a Program takes, when there are a thousand or a million of them.

    make bench-scale
    python benchmarks/scale.py --only 1000,10000 --rounds 5

1,000 ranks, each with up to 6 active Programs and room for one more; of the others three in ten wait for a place, as in
a system under pressure, and the tools of the rest run. A decision is what a planner does for one rank: a snapshot is
read, the rules make a plan, and it is applied. It always admits exactly one Program. Before it one more arrives, after
it the rank's worker ends the request: both with the store's verbs, outside the clock.

`p50 us` and `p99 us` are what a decision takes a planner, alone on the server. `server us` is CPU time of the server's
main thread, its log included, for a decision of which the commands of 50 planners come at once (`replay.py`): what one
core could do follows from it. No planner here is fast enough to fill that core.

`linear scan` is the same decision by who keeps no order: all records are read. The ring's part asks for homes of the
same Programs in three processes, before and after a rank comes and goes.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import report
from benchmarks.crowd import MODEL, SEAT, Crowd, crowd_of, main_thread_s, shares
from benchmarks.processes import ROOT, state_server
from pool.store.audit import Audit

SIZES = (10**3, 10**4, 10**5, 10**6)
RANKS = 1000
SCAN = "linear scan, 1,000"
#: Programs of the ring's part, and processes that are asked for their homes.
RING_PROGRAMS = 4000
NODES = 3


def named(programs: int) -> str:
    """A contestant's name."""
    return f"{programs:,}"


@dataclass
class Contestant:
    """A filled crowd. `first`: of its ranks, where the next turns are."""

    crowd: Crowd
    decisions: int
    sizes: Mapping[str, int]
    first: int = field(default=0)

    def measure(self) -> report.Sample:
        """So many decisions on as many ranks."""
        ranks, crowd = self._ranks(self.decisions), self.crowd
        arrival_us = self._server_us(crowd.next_arrives, ranks)
        times_s: list[float] = []
        alone_us = self._server_us(crowd.decide, ranks, times_s)
        end_us = self._server_us(crowd.end, ranks)
        _each(crowd.next_arrives, ranks)
        crowd.decide_at_once(ranks)
        _each(crowd.end, ranks)
        return {
            "p50 us": report.percentile(times_s, 50) * 1e6,
            "p99 us": report.percentile(times_s, 99) * 1e6,
            "server us": crowd.busy_s / len(ranks) * 1e6,
            "decisions/s of a core": len(ranks) / crowd.busy_s,
            "one at a time, server us": alone_us,
            "arrival, server us": arrival_us,
            "end, server us": end_us,
            **{f"bytes, {kind}": size for kind, size in self.sizes.items()},
        }

    def _server_us(
        self, verb: Callable[[str], None], ranks: Sequence[str], times_s: list[float] | None = None
    ) -> float:
        """Do it for each of the ranks; CPU microseconds of the server's main thread for one. `times_s`: gets how long
        each took the caller."""
        before_s = main_thread_s(self.crowd.client)
        taken_s = _each(verb, ranks)
        if times_s is not None:
            times_s += taken_s
        return (main_thread_s(self.crowd.client) - before_s) / len(ranks) * 1e6

    def measure_scan(self) -> report.Sample:
        """A few decisions by a linear scan."""
        ranks = self._ranks(max(self.decisions // 50, 3))
        _each(self.crowd.next_arrives, ranks)
        times_s: list[float] = []
        server_us = self._server_us(self.crowd.decide_by_scan, ranks, times_s)
        _each(self.crowd.end, ranks)
        return {"p50 us": report.percentile(times_s, 50) * 1e6, "server us": server_us}

    def _ranks(self, count: int) -> list[str]:
        """The next ones, round and round."""
        names = self.crowd.names
        chosen = [names[(self.first + step) % len(names)] for step in range(min(count, len(names)))]
        self.first += len(chosen)
        return chosen


def _each(verb: Callable[[str], None], ranks: Sequence[str]) -> list[float]:
    """Seconds that it takes for each rank."""
    times_s = []
    for rank in ranks:
        began_s = time.perf_counter()
        verb(rank)
        times_s.append(time.perf_counter() - began_s)
    return times_s


def filled(stack: ExitStack, folder: Path, programs: int, decisions: int, *, audited: bool) -> Contestant:
    """A crowd on a server of its own. Raises RuntimeError where an audit finds something."""
    folder.mkdir()
    server = stack.enter_context(state_server(folder))
    crowd = crowd_of(server.url, programs, RANKS)
    stack.callback(crowd.client.close)
    began_s = time.monotonic()
    sizes = crowd.fill()
    report.note(f"{programs:,} Programs, of each rank {shares(programs, RANKS)}: {time.monotonic() - began_s:.0f} s")
    if audited and (found := Audit(crowd.client, MODEL).run()):
        raise RuntimeError(f"the audit of {programs:,} Programs found {len(found)} things: {found[:3]}")
    return Contestant(crowd, decisions, sizes)


def ring_figures(url: str, programs: int, nodes: int = NODES) -> report.Sample:
    """Shares of the Programs that move when a fourth rank comes, and when one goes; those on which nodes disagree."""
    crowd = crowd_of(url, 0, 0)
    for rank in ("a", "b", "c"):
        crowd.upkeep.join(rank, SEAT)
    three = _homes(url, programs, nodes)
    crowd.upkeep.join("d", SEAT)
    four = _homes(url, programs, nodes)
    crowd.upkeep.lose("b", SEAT, leaves=True)
    crowd.upkeep.forget("b", gone_after_ms=-1)
    without = _homes(url, programs, nodes)
    crowd.client.close()
    moved = sum(before != after for before, after in zip(three[0], four[0], strict=True))
    others = sum(before not in (after, "b") for before, after in zip(four[0], without[0], strict=True))
    stayed = sum(home == "b" for home in without[0])
    differ = sum(len(set(homes)) > 1 for answers in (three, four, without) for homes in zip(*answers, strict=True))
    return {
        "moved to a fourth rank, %": moved / programs * 100,
        "others moved when one went": others + stayed,
        "nodes disagree": differ,
    }


def _homes(url: str, programs: int, count: int) -> list[list[str]]:
    """What each of some processes says."""
    commands = [[sys.executable, "-m", "benchmarks.ring_node", url, str(programs), str(node)] for node in range(count)]
    nodes = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) for command in commands]
    answers = [node.communicate(timeout=600)[0] for node in nodes]
    if any(node.returncode for node in nodes):
        raise RuntimeError("a node could not say the homes of Programs")
    return [json.loads(answer) for answer in answers]


def run(sizes: Sequence[int], rounds: int, decisions: int, ring_programs: int) -> dict[str, list[report.Sample]]:
    """Fill all, and measure in turn."""
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        crowds = {size: filled(stack, folder / str(size), size, decisions, audited=size <= 10**4) for size in sizes}
        contestants: dict[str, Callable[[], report.Sample]] = {
            named(size): contestant.measure for size, contestant in crowds.items()
        }
        if 10**3 in crowds:
            contestants[SCAN] = crowds[10**3].measure_scan
        for contestant in crowds.values():
            contestant.measure()  # warm: the server knows the verbs, the windows are read once
        samples = report.interleaved(contestants, rounds)
        for size, contestant in crowds.items():
            if size <= 10**4 and (found := Audit(contestant.crowd.client, MODEL).run()):
                raise RuntimeError(f"the audit after {size:,} Programs found {len(found)} things: {found[:3]}")
        (folder / "ring").mkdir()
        ring = stack.enter_context(state_server(folder / "ring"))
        samples["ring"] = [ring_figures(ring.url, ring_programs)]
    return samples


def targets(samples: Mapping[str, Sequence[report.Sample]]) -> list[report.Target]:
    """Those of the largest crowd against that of 10,000, one core's rate at all sizes, and the ring's."""
    medians = {name: report.medians(rounds) for name, rounds in samples.items()}

    def of(name: str, figure: str) -> float | None:
        return medians.get(name, {}).get(figure)

    rates = [rate for size in SIZES if (rate := of(named(size), "decisions/s of a core")) is not None]
    scan = report.ratio(of(SCAN, "p50 us"), of(named(10**3), "p50 us"))
    growth = report.ratio(of(named(10**6), "p50 us"), of(named(10**4), "p50 us"))
    return [
        report.Target("decision p50, 1,000,000 / 10,000 Programs", growth, at_most=1.5),
        report.Target("decisions/s of one server core, all sizes", min(rates, default=None), at_least=3000),
        report.Target("decision p50, linear scan / ours at 1,000", scan, at_least=1),
        report.Target("moved to a fourth rank, %", of("ring", "moved to a fourth rank, %"), at_most=35),
        report.Target("others moved when one went", of("ring", "others moved when one went"), at_most=0),
        report.Target("Programs on whose home nodes disagree", of("ring", "nodes disagree"), at_most=0),
    ]


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default="", help="sizes, with commas between them")
    parser.add_argument("--decisions", type=int, default=500, help="of each size in a round, at most 1,000 (500)")
    options = parser.parse_args()
    sizes = tuple(int(size) for size in options.only.split(",")) if options.only else SIZES
    ring_programs = RING_PROGRAMS
    if options.quick:
        options.rounds, options.decisions, sizes, ring_programs = 1, 50, sizes[:2], 300

    samples = run(sizes, options.rounds, options.decisions, ring_programs)
    result = report.Report(
        name="scale",
        parameters={
            "ranks": RANKS,
            "decisions": options.decisions,
            "rounds": options.rounds,
            "programs of each rank": {named(size): shares(size, RANKS) for size in sizes},
        },
        samples=samples,
        targets=targets(samples),
        machine=report.machine(),
    )
    whole = not options.quick and sizes == SIZES and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole and options.decisions >= 500)


if __name__ == "__main__":
    main()
