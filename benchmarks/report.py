"""What every benchmark does with its figures: rounds in turn, medians, a table, JSON, targets met or missed."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool.store.server_binary import binary_version, find_binary

RESULTS = Path(__file__).parent / "results"
#: Fewer rounds make no median.
MIN_ROUNDS = 3

_PACKAGES = ("celery", "kombu", "redis", "hiredis", "numpy")

#: One round's figures of one contestant, by name; units are in the names.
Sample = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure, from below (`at_least`) or from above (`at_most`). `value` None: it was not measured, which
    counts as missed."""

    name: str
    value: float | None
    at_least: float | None = None
    at_most: float | None = None

    @property
    def met(self) -> bool:
        """Whether the figure was measured and keeps the bound."""
        if self.value is None:
            return False
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        """The bound in words: `>= 8`, `<= 5`."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        return " and ".join(f"{sign} {limit:g}" for sign, limit in bounds if limit is not None)


@dataclass(frozen=True, slots=True)
class Report:
    """A finished benchmark. `samples`: each contestant's rounds; `parameters`: what it was run with."""

    name: str
    parameters: Mapping[str, Any]
    samples: Mapping[str, Sequence[Sample]]
    targets: Sequence[Target]
    machine: Mapping[str, Any]

    def verdict(self) -> dict[str, Any]:
        """The one object that ends a benchmark's output."""
        return {
            "name": self.name,
            "ratios": {target.name: _rounded(target.value) for target in self.targets},
            "targets": {target.name: target.bound for target in self.targets},
            "met": {target.name: target.met for target in self.targets},
            "machine": dict(self.machine),
        }

    def document(self) -> dict[str, Any]:
        """Everything, for a file: the verdict, how it was measured, medians and all rounds."""
        return {
            **self.verdict(),
            "date": datetime.date.today().isoformat(),
            "parameters": dict(self.parameters),
            "medians": {name: medians(rounds) for name, rounds in self.samples.items()},
            "rounds": {name: [dict(sample) for sample in rounds] for name, rounds in self.samples.items()},
        }

    def tables(self) -> str:
        """Medians by contestant, then the targets, as text."""
        rows = {name: medians(rounds) for name, rounds in self.samples.items()}
        columns = list(dict.fromkeys(column for row in rows.values() for column in row))
        figures = [["median", *columns]]
        figures += [[name, *(_shown(row.get(column)) for column in columns)] for name, row in rows.items()]
        goals = [["figure", "value", "target", "met"]]
        goals += [[t.name, _shown(t.value), t.bound, "yes" if t.met else "MISSED"] for t in self.targets]
        return f"{table(figures)}\n\n{table(goals)}"


def medians(rounds: Sequence[Sample]) -> dict[str, float]:
    """The median of each figure over the rounds that have it."""
    names = dict.fromkeys(name for sample in rounds for name in sample)
    return {name: statistics.median(sample[name] for sample in rounds if name in sample) for name in names}


def ratio(figure: float | None, base: float | None) -> float | None:
    """`figure / base`, None when either was not measured."""
    return None if figure is None or not base else figure / base


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` (0 to 100) of the values do not exceed. Raises ValueError for none."""
    if not values:
        raise ValueError("no values")
    rank = max(1, -(-len(values) * percent // 100))
    return sorted(values)[int(rank) - 1]


def interleaved(contestants: Mapping[str, Callable[[], Sample]], rounds: int) -> dict[str, list[Sample]]:
    """Run every contestant once a round, so that slow changes of the machine meet all alike. Each round begins with
    another one, so that nobody always runs after the same neighbour."""
    samples: dict[str, list[Sample]] = {name: [] for name in contestants}
    names = list(contestants)
    for number in range(rounds):
        shift = number % max(1, len(names))
        for name in names[shift:] + names[:shift]:
            sample = contestants[name]()
            samples[name].append(sample)
            figures = ", ".join(f"{figure} {_shown(value)}" for figure, value in sample.items())
            note(f"round {number + 1}/{rounds}  {name}: {figures}")
    return samples


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned text: the first row is the head, the first column is flush left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(_cells(row, widths)) for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _cells(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    flush_left = row[0].ljust(widths[0])
    return [flush_left, *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]


def machine() -> dict[str, Any]:
    """Facts about this machine that figures depend on. Nothing that identifies it."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES}
        | {"state server": ".".join(map(str, binary_version(find_binary())))},
    }


def options(description: str, *, rounds: int = MIN_ROUNDS) -> argparse.ArgumentParser:
    """A command line with what all benchmarks understand."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds, help=f"rounds of each contestant ({rounds})")
    parser.add_argument("--quick", action="store_true", help="a minute's check that it works; its figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to FILE")
    return parser


def publish(report: Report, *, json_file: Path | None, record: bool) -> None:
    """Print the tables and, as the last line, the verdict. `record`: also keep it in `results/NAME-DATE.json`."""
    document = report.document()
    text = json.dumps(document, indent=2) + "\n"
    if record:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{report.name}-{document['date']}.json").write_text(text, encoding="utf-8")
    else:
        note("not recorded: a quick or partial run shows that the benchmark works, nothing else")
    if json_file is not None:
        json_file.write_text(text, encoding="utf-8")
    print(report.tables(), end="\n\n")
    print(json.dumps(report.verdict(), separators=(",", ":")), flush=True)


def note(text: str) -> None:
    """Progress, for people."""
    print(text, file=sys.stderr, flush=True)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
