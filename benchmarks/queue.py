"""The cost of the queue alone: generations that compute nothing, one worker, from enqueue to durable result.

    make bench-queue
    python benchmarks/queue.py --quick

Every contestant gets a fresh state server of the same kind and settings, one client and one worker. A round of one:

1. Round trips of one job at a time through an idle system, the first ones not counted.
2. Drain: the worker is frozen, the jobs are enqueued, the worker is let go; from there to the last durable result.
3. End to end: the client enqueues while the worker works; from the first submit to the last durable result.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, and its name would hide the standard library's `queue`.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from benchmarks import report
from benchmarks.peer_environments import environment
from benchmarks.processes import START_S, Command, Dialogue, Worker, module, peer, state_server, wait_for
from pool.store.connection import Client, connect
from pool.store.keys import ModelKeys
from tasks.urls import celery_form

WARM_UP = 20
#: Within this every job of a phase has its result, or the benchmark fails.
PHASE_S = 300.0
#: Number of the database for a peer's results, so that counting them is one O(1) command.
RESULTS_DB = 1

_KEYS = ModelKeys("noop:0")
_CONFIGURATION = """\
[state]
url = "{url}"
[limits]
pending_per_model = 1000000
[models.noop]
source = "random:0"
target_inflight = {inflight}
max_batch_size = {inflight}
max_active_sessions = {inflight}
scratch_budget_bytes = 1073741824
max_prefill_tokens_per_tick = 1000000
kv_budget_bytes = 100000000
"""


@dataclass(frozen=True, slots=True)
class Contestant:
    """A queue under test. `results(url)` counts the durable results on the server; it must be O(1)."""

    worker: Callable[[str, Path], Command]
    client: Callable[[str, Path], Command]
    results: Callable[[str], Callable[[], int]]
    check: Callable[[str, int], None]


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured in a round."""

    jobs: int
    round_trips: int


def measure(contestant: Contestant, size: Size) -> report.Sample:
    """One round of one contestant, on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name:
        folder = Path(name)
        with state_server(folder) as server:
            worker = Worker(contestant.worker(server.url, folder), folder / "worker.log")
            client = Dialogue(contestant.client(server.url, folder), folder / "client.log")
            try:
                sample = _phases(worker, client, contestant.results(server.url), size)
                contestant.check(server.url, WARM_UP + size.round_trips + 2 * size.jobs)
                return sample
            finally:
                client.stop()
                worker.stop()


def _phases(worker: Worker, client: Dialogue, results: Callable[[], int], size: Size) -> report.Sample:
    try:
        client.ask("round_trips", WARM_UP, timeout_s=START_S)
    except (RuntimeError, TimeoutError):
        worker.check()
        raise
    times_ms = client.ask("round_trips", size.round_trips)

    before = results()
    worker.hold()
    enqueue_s = client.ask("enqueue", size.jobs)
    cpu_s, started_s = worker.cpu_s(), time.perf_counter()
    worker.go()
    _await(results, before + size.jobs, worker)
    drain_s, cpu_s = time.perf_counter() - started_s, worker.cpu_s() - cpu_s

    started_s = time.perf_counter()
    client.say("enqueue", size.jobs)
    _await(results, before + 2 * size.jobs, worker)
    whole_s = time.perf_counter() - started_s
    client.answer()
    return {
        "drain jobs/s": size.jobs / drain_s,
        "end-to-end jobs/s": size.jobs / whole_s,
        "enqueue jobs/s": size.jobs / enqueue_s,
        "idle p50 ms": report.percentile(times_ms, 50),
        "idle p99 ms": report.percentile(times_ms, 99),
        "worker CPU ms/job": cpu_s / size.jobs * 1000,
    }


def _await(results: Callable[[], int], count: int, worker: Worker) -> None:
    try:
        wait_for(lambda: results() >= count, what=f"{count} results", timeout_s=PHASE_S)
    except TimeoutError as error:
        worker.check()
        raise TimeoutError(f"{error}; there are {results()}") from None


# --- genpool, and the minimal loop that shares its store


def _genpool(worker: Callable[[Mapping[str, str]], Command], inflight: int) -> Contestant:
    def variables(url: str, folder: Path) -> dict[str, str]:
        config = folder / "genpool.toml"
        config.write_text(_CONFIGURATION.format(url=url, inflight=inflight), encoding="utf-8")
        return {"GENPOOL_CONFIG": str(config)}

    return Contestant(
        worker=lambda url, folder: worker(variables(url, folder)),
        client=lambda url, folder: module("benchmarks.noop_client", variables=variables(url, folder)),
        results=_ended_jobs,
        check=_check_records,
    )


def _genpool_worker(variables: Mapping[str, str]) -> Command:
    arguments = ("-Q", "noop", "-l", "WARNING", "--without-mingle", "--without-gossip")
    return module("benchmarks.noop_worker", *arguments, variables=variables)


def _minimal_worker(variables: Mapping[str, str]) -> Command:
    return module("benchmarks.minimal_loop", variables=variables)


def _ended_jobs(url: str) -> Callable[[], int]:
    """Jobs that ever had their turn less those of them that have not ended."""
    client = connect(url, max_connections=1)

    def count() -> int:
        pipe = client.pipeline(transaction=True)
        pipe.xinfo_stream(_KEYS.queue)
        pipe.zcard(_KEYS.index)
        pipe.zcard(_KEYS.lanes["backlog"])
        stream, held, waiting = pipe.execute()
        return int(stream["entries-added"]) - (int(held) - int(waiting))

    return count


def _check_records(url: str, jobs: int) -> None:
    """Raises RuntimeError unless every job's record is completed and its log holds its token."""
    client = connect(url, max_connections=1)
    states = [_state(client, keys) for keys in _batches(client, _KEYS.job("*"))]
    completed = sum(batch.count(b"completed") for batch in states)
    logs = sum(len(batch) for batch in _batches(client, _KEYS.log("*")))
    if completed != jobs or logs != jobs:
        raise RuntimeError(f"of {jobs} jobs, {completed} are completed and {logs} have a log")


def _batches(client: Client, pattern: str) -> list[list[bytes]]:
    keys = list(client.scan_iter(match=pattern.replace("{", "[{]").replace("}", "[}]"), count=1000))
    return [keys[start : start + 1000] for start in range(0, len(keys), 1000)]


def _state(client: Client, keys: list[bytes]) -> list[bytes]:
    pipe = client.pipeline(transaction=False)
    for key in keys:
        pipe.hget(key, "state")
    states: list[bytes] = pipe.execute()
    return states


# --- the peers

_CELERY_WORKER = ("celery", "-A", "celery_noop", "worker", "-l", "WARNING", "--without-mingle", "--without-gossip")
_CELERY_POOLS = {"threads": "64", "prefork": "2"}
_OTHER_WORKERS = {
    "taskiq": ("taskiq streams", ("taskiq", "worker", "taskiq_noop:broker", "-w", "1", "--log-level", "WARNING")),
    "dramatiq": ("dramatiq", ("dramatiq", "dramatiq_noop", "-p", "1", "-t", "8", "--path", ".")),
}


def _peer(
    programs: Path, name: str, *arguments: str, urls: Callable[[str], tuple[str, str]] | None = None
) -> Contestant:
    """A peer whose module is `peers/NAME_noop.py`; `arguments`: its worker's command line."""

    def command(argv: list[str], url: str) -> Command:
        broker, results = urls(url) if urls else (f"{url}?db=0", f"{url}?db={RESULTS_DB}")
        return peer(argv, variables={"BENCH_BROKER": broker, "BENCH_RESULTS": results})

    return Contestant(
        worker=lambda url, _: command([str(programs / arguments[0]), *arguments[1:]], url),
        client=lambda url, _: command([str(programs / "python"), f"{name}_noop.py"], url),
        results=_stored_results,
        check=_check_results,
    )


def _celery_urls(url: str) -> tuple[str, str]:
    return celery_form(f"{url}?db=0"), celery_form(f"{url}?db={RESULTS_DB}")


def _stored_results(url: str) -> Callable[[], int]:
    client = connect(f"{url}?db={RESULTS_DB}", max_connections=1)
    return lambda: int(client.dbsize())


def _check_results(url: str, jobs: int) -> None:
    found = _stored_results(url)()
    if found != jobs:
        raise RuntimeError(f"{jobs} jobs left {found} results")


def contestants(inflight: int, wanted: tuple[str, ...]) -> dict[str, Contestant]:
    """Everyone who can take part and whose name begins with one of `wanted`, genpool first."""
    found = {
        "genpool": _genpool(_genpool_worker, inflight),
        "minimal loop": _genpool(_minimal_worker, inflight),
        **{name: each for kind in ("celery", *_OTHER_WORKERS) for name, each in _peers(kind, wanted).items()},
    }
    return {name: each for name, each in found.items() if name.startswith(wanted)}


def _peers(kind: str, wanted: tuple[str, ...]) -> dict[str, Contestant]:
    """The contestants of one peer's environment; none when it is not wanted or cannot be installed."""
    if not any(kind.startswith(name) or name.startswith(kind) for name in wanted):
        return {}
    programs = environment(kind)
    if programs is None:
        return {}
    if kind == "celery":
        return {
            f"celery {pool}": _peer(programs, kind, *_CELERY_WORKER, "-P", pool, "-c", size, urls=_celery_urls)
            for pool, size in _CELERY_POOLS.items()
        }
    name, worker = _OTHER_WORKERS[kind]
    return {name: _peer(programs, kind, *worker)}


# --- the whole


def targets(medians: Mapping[str, Mapping[str, float]]) -> list[report.Target]:
    """Drain rates as ratios."""

    def best(prefixes: tuple[str, ...]) -> float | None:
        return max((row["drain jobs/s"] for name, row in medians.items() if name.startswith(prefixes)), default=None)

    ours = best(("genpool",))
    return [
        report.Target("drain / best Celery", report.ratio(ours, best(("celery",))), at_least=8),
        report.Target("drain / best other queue", report.ratio(ours, best(("taskiq", "dramatiq"))), at_least=2),
        report.Target("drain / minimal loop", report.ratio(ours, best(("minimal",))), at_least=0.8),
    ]


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=5000, help="jobs of a phase (5000)")
    parser.add_argument("--round-trips", type=int, default=300, help="jobs of the latency phase (300)")
    parser.add_argument("--inflight", type=int, default=128, help="genpool's generations in flight (128)")
    parser.add_argument("--only", default="", help="comma-separated beginnings of contestants' names")
    options = parser.parse_args()
    if options.quick:
        options.jobs, options.round_trips, options.rounds = min(options.jobs, 200), 20, 1

    chosen = contestants(options.inflight, tuple(options.only.split(",")))
    size = Size(options.jobs, options.round_trips)
    samples = report.interleaved({name: partial(measure, each, size) for name, each in chosen.items()}, options.rounds)
    result = report.Report(
        name="queue",
        parameters={"jobs": size.jobs, "round_trips": size.round_trips, "rounds": options.rounds,
                    "inflight": options.inflight},
        samples=samples,
        targets=targets({name: report.medians(rounds) for name, rounds in samples.items()}),
        machine=report.machine(),
    )  # fmt: skip
    whole = not options.quick and not options.only and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
