"""Every cell of the program benchmark, one after the other, kept as they are done: a run that was interrupted goes on.

| engine | regimes | agents | KV, part of the working set | policies |
|---|---|---|---|---|
| numpy | all | 12, 24, 36 | 1, 0.5, 0.35 | all |
| llama.cpp | capped | 12, 24, 36 | 1, 0.5, 0.35 | all |
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks import report
from benchmarks.agent_traces import REGIMES
from benchmarks.policies import FULL, PLAIN, POLICIES, TICKS
from benchmarks.program_system import Cell

AGENTS, PARTS = (12, 24, 36), (1.0, 0.5, 0.35)


def all_cells(rounds: int, cell: Cell) -> Iterator[Cell]:
    """All, round by round; the policies of one combination follow each other, each round beginning with another one."""
    places = [("numpy", regime) for regime in REGIMES] + [("llama_cpp", "capped")]
    for number in range(rounds):
        policies = POLICIES[number % len(POLICIES) :] + POLICIES[: number % len(POLICIES)]
        for backend, regime in places:
            for agents in AGENTS:
                for part in PARTS:
                    for policy in policies:
                        yield dataclasses.replace(
                            cell, policy=policy, regime=regime, agents=agents, part=part, backend=backend
                        )


def load_cells(path: Path) -> list[tuple[Cell, report.Sample]]:
    """What is there of an earlier run. A line that was cut off is none."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            kept = json.loads(line)
        except json.JSONDecodeError:
            continue
        found.append((Cell(**kept["cell"]), kept["sample"]))
    return found


def store_cell(path: Path, cell: Cell, sample: report.Sample) -> None:
    """One more line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"cell": dataclasses.asdict(cell), "sample": dict(sample)}) + "\n")


def run_all(
    rounds: int, cell: Cell, path: Path, measure: Callable[[Cell], report.Sample]
) -> dict[str, list[report.Sample]]:
    """Measure what is missing; all samples, by place and policy."""
    done = load_cells(path)
    left: defaultdict[Cell, int] = defaultdict(int)
    for kept, _ in done:
        left[kept] += 1
    for each in all_cells(rounds, cell):
        if left[each]:
            left[each] -= 1
            continue
        sample = measure(each)
        report.note(f"{name_of(each)}: {', '.join(f'{name} {value:.4g}' for name, value in sample.items())}")
        store_cell(path, each, sample)
        done.append((each, sample))
    samples: defaultdict[str, list[report.Sample]] = defaultdict(list)
    for each, sample in done:
        samples[name_of(each)].append(sample)
    return dict(samples)


def name_of(cell: Cell) -> str:
    """Place and policy."""
    return f"{place_of(cell)}, {cell.policy}"


def place_of(cell: Cell) -> str:
    """All but the policy."""
    return f"{cell.backend}, {cell.regime}, {cell.agents} agents, KV {cell.part:g}"


def targets_of_all(samples: Mapping[str, Sequence[report.Sample]]) -> list[report.Target]:
    """By place: under pressure as in the short run, without it that nothing is lost, and everywhere not behind any
    fixed TTL or LRU."""
    medians = {name: report.medians(rounds) for name, rounds in samples.items()}
    places = dict.fromkeys(name.rpartition(", ")[0] for name in samples)
    return [target for place in places for target in _of_place(place, medians)]


def _of_place(place: str, medians: Mapping[str, Mapping[str, float]]) -> Iterator[report.Target]:
    def of(policy: str, figure: str) -> float | None:
        return medians.get(f"{place}, {policy}", {}).get(figure)

    full, plain, ticks = (of(policy, "requests/s") for policy in (FULL, PLAIN, TICKS))
    if place.endswith("KV 1"):
        yield report.Target(f"{place}: requests/s, full / plain", report.ratio(full, plain), at_least=0.97)
    elif (of(PLAIN, "hit %") or 100.0) < 85:
        yield report.Target(f"{place}: requests/s, full / plain", report.ratio(full, plain), at_least=1.8)
        yield report.Target(f"{place}: full hits, %", of(FULL, "hit %"), at_least=70)
        yield report.Target(f"{place}: requests/s, full / ticks", report.ratio(full, ticks), at_least=1)
        tail = report.ratio(of(FULL, "first p99 s"), of(TICKS, "first p99 s"))
        yield report.Target(f"{place}: first token p99, full / ticks", tail, at_most=0.5)
    rates = [rate for each in (PLAIN, "ttl_2", "ttl_0", "ttl_infinite") if (rate := of(each, "requests/s")) is not None]
    yield report.Target(
        f"{place}: requests/s, full / the best fixed TTL or LRU",
        report.ratio(full, max(rates, default=None)),
        at_least=0.95,
    )
