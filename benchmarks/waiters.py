"""What waiting costs one API process: a thousand synchronous requests and a thousand streams, of jobs that end late.

    make bench-waiters
    python benchmarks/waiters.py --quick

Every contestant gets a fresh state server, one API process and one worker's part that ends jobs when it is told to. A
round of one:

1. Some requests that end at once; then the process's memory.
2. The waiters are opened. While nothing happens: connections to the state server, memory, threads, CPU.
3. Half of the jobs end at a steady rate: time from before the job is ended until its client has the answer.
4. A quarter ends at that rate; in the middle the state server cuts every subscription.
5. The rest ends as fast as the worker's part can.

Every waiter must get the answer of its own job. Memory is the process's proportional share (PSS): what the kernel keeps
for sockets and threads is not in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import resource
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import report
from benchmarks.peer_environments import environment
from benchmarks.processes import START_S, Command, Dialogue, Worker, free_port, module, peer, state_server, wait_for
from benchmarks.waiting_client import HOST
from pool.store.connection import Client, connect
from pool.store.keys import ModelKeys

MODEL = "waiting"
WARM_UP = 20
#: Names of connections to the state server that are not the API's.
NOT_THE_API = frozenset({"bench-driver", "bench-worker"})
#: Within this a phase has ended, or the benchmark fails.
PHASE_S = 120.0

_KEYS = ModelKeys(f"{MODEL}:0")
_CONFIGURATION = """\
[server]
port = {port}
threads = {threads}
[state]
url = "{url}"
[limits]
pending_per_model = 100000
[models.waiting]
source = "random:0"
[models.smollm2-135m-instruct]
enabled = false
"""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured in a round: waiters of each kind, jobs ended a second, seconds of nothing, threads."""

    waiters: int
    rate: float
    idle_s: float
    threads: int


@dataclass(frozen=True, slots=True)
class Contestant:
    """A way of waiting. `queued(client)` counts the jobs that wait for a worker; it must be O(1)."""

    api: Callable[[str, int, Path, Size], Command]
    worker: Callable[[str, Size], Command]
    queued: Callable[[Client], int]


def measure(contestant: Contestant, size: Size) -> report.Sample:
    """One round of one contestant, on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name:
        folder, port = Path(name), free_port()
        with state_server(folder) as server:
            worker = Dialogue(contestant.worker(server.url, size), folder / "worker.log")
            api = Worker(contestant.api(server.url, port, folder, size), folder / "api.log")
            client = Dialogue(module("benchmarks.waiting_client", str(port), MODEL), folder / "client.log")
            state = connect(server.url, max_connections=1)
            state.client_setname("bench-driver")
            try:
                wait_for(partial(_listens, api, port), what="the API", timeout_s=START_S, every_s=0.1)
                return Round(contestant, size, api, worker, client, state).run()
            finally:
                client.stop()
                api.stop()
                worker.stop()
                state.connection_pool.disconnect()


class Round:
    """The phases of one round."""

    def __init__(
        self, contestant: Contestant, size: Size, api: Worker, worker: Dialogue, client: Dialogue, state: Client
    ) -> None:
        self._queued = contestant.queued
        self._size = size
        self._api, self._worker, self._client, self._state = api, worker, client, state

    def run(self) -> dict[str, float]:
        """All of them, in order."""
        self._open(WARM_UP)
        self._worker.ask("take", 2 * WARM_UP)
        self._worker.ask("burst", 2 * WARM_UP)
        warm = Answers(self._client.ask("answers", 2 * WARM_UP), [])
        if warm.wrong:
            raise RuntimeError(f"{warm.wrong} of {2 * WARM_UP} first answers are wrong")
        before_bytes = self._pss_bytes()
        self._open(self._size.waiters)
        figures = self._idle(before_bytes)
        self._worker.ask("take", 2 * self._size.waiters)
        quarter = self._size.waiters // 2
        return figures | self._steady(2 * quarter) | self._cut(quarter) | self._burst(2 * self._size.waiters)

    def _open(self, count: int) -> None:
        self._client.ask("open", count)
        waiting = 2 * count

        def all_queued() -> bool:
            self._api.check()
            return self._queued(self._state) >= waiting

        wait_for(all_queued, what=f"{waiting} waiting requests", timeout_s=PHASE_S, every_s=0.05)

    def _idle(self, before_bytes: int) -> dict[str, float]:
        time.sleep(self._size.idle_s / 3)
        cpu_s, started_s = self._api.cpu_s(), time.perf_counter()
        time.sleep(self._size.idle_s)
        cpu_s, took_s = self._api.cpu_s() - cpu_s, time.perf_counter() - started_s
        waiters = 2 * self._size.waiters
        return {
            "connections": self._connections(),
            "KB/waiter": (self._pss_bytes() - before_bytes) / waiters / 1000,
            "threads": sum(len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in self._pids()),
            "idle CPU %": cpu_s / took_s * 100,
        }

    def _steady(self, count: int) -> dict[str, float]:
        ended = self._worker.ask("end", count)
        answers = Answers(self._client.ask("answers", count), ended)
        self._done = Tally(count, answers)
        figures: dict[str, float] = {}
        for kind in ("sync", "stream"):
            times_ms = answers.times_ms(kind)
            figures |= {f"{kind} p{percent} ms": report.percentile(times_ms, percent) for percent in (50, 95)}
        return figures

    def _cut(self, count: int) -> dict[str, float]:
        """Subscriptions are cut while jobs end; what was hinted at meanwhile must be found all the same."""
        self._worker.say("end", count)
        time.sleep(count / self._size.rate / 2)
        self._state.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        ended = self._worker.answer()
        answers = Answers(self._client.ask("answers", count), ended)
        self._done += Tally(count, answers)
        return {"cut max ms": max(answers.times_ms())}

    def _burst(self, all_waiters: int) -> dict[str, float]:
        count = all_waiters - self._done.expected
        ended = self._worker.ask("burst", count)
        answers = Answers(self._client.ask("answers", count), ended)
        self._done += Tally(count, answers)
        times_ms = answers.times_ms()
        return {
            "burst p50 ms": report.percentile(times_ms, 50),
            "burst p95 ms": report.percentile(times_ms, 95),
            "connections after": self._connections(),
            "unanswered": self._done.unanswered,
            "wrong": self._done.wrong,
        }

    def _connections(self) -> int:
        """The API's connections to the state server: nobody else has any but those with a name."""
        return sum(each["name"] not in NOT_THE_API for each in self._state.client_list())

    def _pids(self) -> list[int]:
        """gunicorn's workers: the children of the process that was started."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it ended while we looked
            if parent == self._api.pid:
                found.append(int(stat.parent.name))
        return found

    def _pss_bytes(self) -> int:
        lines = [line for pid in self._pids() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()]
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Answers:
    """What clients got, beside when the jobs were ended: `[token, kind, ns, right]` and `[token, ns]`."""

    def __init__(self, answers: Sequence[tuple[str, str, int, bool]], ended: Sequence[tuple[str, int]]) -> None:
        ended_ns = dict(ended)
        self._times_ms = [
            (kind, (at_ns - ended_ns[token]) / 1e6) for token, kind, at_ns, _ in answers if token in ended_ns
        ]
        self.wrong = sum(not right for *_, right in answers)
        self.right = sum(right for *_, right in answers)

    def times_ms(self, kind: str = "") -> list[float]:
        """From before a job's end to its answer."""
        return [took_ms for of, took_ms in self._times_ms if kind in ("", of)]


class Tally:
    """Answers expected, missing and wrong."""

    def __init__(self, expected: int, answers: Answers) -> None:
        self.expected = expected
        self.unanswered = expected - answers.right - answers.wrong
        self.wrong = answers.wrong

    def __iadd__(self, other: Tally) -> Tally:
        self.expected += other.expected
        self.unanswered += other.unanswered
        self.wrong += other.wrong
        return self


# --- the contestants


def genpool() -> Contestant:
    """The API as it is served, with as many threads as it takes."""

    def api(url: str, port: int, folder: Path, size: Size) -> Command:
        config = folder / "genpool.toml"
        config.write_text(_CONFIGURATION.format(url=url, port=port, threads=size.threads), encoding="utf-8")
        arguments = ("-c", "python:webapp.gunicorn_conf", "webapp.app:create_app()")
        return module("gunicorn", *arguments, variables={"GENPOOL_CONFIG": str(config), "TMPDIR": str(folder)})

    return Contestant(
        api=api,
        worker=lambda url, size: module("benchmarks.ending_worker", url, MODEL, str(size.rate)),
        queued=lambda client: int(client.zcard(_KEYS.index)),
    )


def plain(programs: Path) -> Contestant:
    """Flask and gunicorn's threads, each waiter blocking on a connection of its own."""

    def api(url: str, port: int, folder: Path, size: Size) -> Command:  # noqa: ARG001 - a contestant's signature
        options = ("-k", "gthread", "--threads", str(size.threads), "-b", f"{HOST}:{port}", "--no-control-socket")
        limits = ("--worker-connections", str(size.threads + 512))
        argv = [str(programs / "gunicorn"), *options, *limits, "plain_waits:app"]
        return peer(argv, variables={"BENCH_STATE": url})

    def worker(url: str, size: Size) -> Command:
        return peer([str(programs / "python"), "plain_waits.py", url, MODEL, str(size.rate)])

    return Contestant(api=api, worker=worker, queued=lambda client: int(client.llen("queue")))


def contestants(only: str) -> dict[str, Contestant]:
    """Both, or the one of this name; the peer only if it can be installed."""
    programs = environment("flask") if only in ("", "plain") else None
    found = {"genpool": genpool()} | ({"plain": plain(programs)} if programs else {})
    return {name: each for name, each in found.items() if only in ("", name)}


def _listens(api: Worker, port: int) -> bool:
    api.check()
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


# --- the whole


def targets(samples: dict[str, list[report.Sample]]) -> list[report.Target]:
    """Bounds on what a waiter costs, no wake-up lost in any round, and latency as a ratio."""
    ours = samples.get("genpool", [])
    medians = {name: report.medians(rounds) for name, rounds in samples.items()}
    found, peer = medians.get("genpool", {}), medians.get("plain", {})

    def worst(*names: str) -> float | None:
        return max((sample[name] for sample in ours for name in names), default=None)

    lost = sum(sample["unanswered"] + sample["wrong"] for sample in ours) if ours else None
    return [
        report.Target("connections, most in any round", worst("connections", "connections after"), at_most=4),
        report.Target("KB a waiter", found.get("KB/waiter"), at_most=100),
        report.Target("waiters without their answer, all rounds", lost, at_most=0),
        *(
            report.Target(f"{kind} p{percent} / plain", report.ratio(found.get(name), peer.get(name)), at_most=2)
            for kind in ("sync", "stream")
            for percent in (50, 95)
            for name in [f"{kind} p{percent} ms"]
        ),
    ]


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--waiters", type=int, default=1000, help="waiters of each kind (1000)")
    parser.add_argument("--rate", type=float, default=200, help="jobs that end a second in the steady phases (200)")
    parser.add_argument("--idle", type=float, default=10, help="seconds in which nothing happens (10)")
    parser.add_argument("--only", default="", choices=("genpool", "plain"), help="one contestant")
    options = parser.parse_args()
    if options.quick:
        options.waiters, options.idle, options.rounds = min(options.waiters, 40), 1.0, 1

    # Both sides hold a socket a waiter; the children inherit this.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    size = Size(options.waiters, options.rate, options.idle, threads=2 * options.waiters + 48)
    samples = report.interleaved(
        {name: partial(measure, each, size) for name, each in contestants(options.only).items()}, options.rounds
    )
    result = report.Report(
        name="waiters",
        parameters={"waiters": size.waiters, "rate": size.rate, "threads": size.threads, "rounds": options.rounds},
        samples=samples,
        targets=targets(samples),
        machine=report.machine(),
    )
    whole = not options.quick and not options.only and options.waiters >= 1000 and options.rounds >= report.MIN_ROUNDS
    report.publish(result, json_file=options.json, record=whole)


if __name__ == "__main__":
    main()
