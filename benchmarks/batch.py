"""What batching gains, by engine, and what the whole product makes of it beside llama.cpp's own server.

    make bench-batch
    python benchmarks/batch.py --only engines
    python benchmarks/batch.py --only http --quick

Two parts. *engines*: the worker's own loop over an engine in this process, 1 to 16 sessions of SmolLM2-135M: the numpy
engine, and llama.cpp with weights in Q4_0, each with its exact and its fast setting. *http*: streaming chat completions
of an API process and a worker, and of llama.cpp's server, by 1, 8 and 16 clients.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import datetime
import importlib.metadata
from collections.abc import Mapping, Sequence

from benchmarks import batch_engines, batch_http, batch_plot, report

PARTS = ("engines", "http")
#: Requests of each client, by number of clients: each measurement lasts some seconds.
REQUESTS = {1: 4, 8: 2, 16: 2}


def lines(samples: Mapping[str, Sequence[report.Sample]]) -> dict[str, list[tuple[int, float]]]:
    """Medians of tokens/s by contestant: (concurrency, tokens/s)."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, rounds in samples.items():
        contestant, _, level = name.rpartition(", ")
        found.setdefault(contestant, []).append((int(level), report.medians(rounds)["tokens/s"]))
    return found


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", default=",".join(PARTS), help="one part, or both (engines,http)")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a session (64)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="prompt tokens of a session, part engines (64)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every engine and server (2)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw tokens/s by concurrency into FILE (SVG)")
    options = parser.parse_args()
    parts = options.only.split(",")
    if not set(parts) <= set(PARTS):
        parser.error(f"--only knows {', '.join(PARTS)}")
    levels: tuple[int, ...] = batch_engines.LEVELS
    requests = REQUESTS
    if options.quick:
        options.tokens, options.rounds, levels, requests = 8, 1, (1, 8), dict.fromkeys(REQUESTS, 1)

    samples: dict[str, list[report.Sample]] = {}
    targets: list[report.Target] = []
    if "engines" in parts:
        size = batch_engines.Size(options.prompt_tokens, options.tokens, levels, options.threads)
        found, aims = batch_engines.run(size, options.rounds)
        samples |= found
        targets += aims
    if "http" in parts:
        found = batch_http.run(
            batch_http.Size(options.tokens, requests, options.threads), options.rounds, batch_http.CLIENTS
        )
        samples |= found
        targets += batch_http.targets(found)

    names = ("tokens", "prompt_tokens", "threads", "rounds")
    result = report.Report(
        name="batch",
        parameters={name: getattr(options, name) for name in names}
        | {
            "requests": requests,
            "slots": batch_http.SLOTS,
            "llama.cpp": importlib.metadata.version("llama-cpp-python"),
        },
        samples=samples,
        targets=targets,
        machine=report.machine(),
    )
    whole = not options.quick and set(parts) == set(PARTS) and options.rounds >= report.MIN_ROUNDS
    picture = batch_plot.svg("tokens/s", lines(samples))
    if options.plot is not None:
        options.plot.write_text(picture, encoding="utf-8")
    if whole:
        file = report.RESULTS / f"batch-{datetime.date.today().isoformat()}.svg"
        file.write_text(picture, encoding="utf-8")
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
