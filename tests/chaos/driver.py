"""Keeps killing, and shows that nothing is lost: `python -m tests.chaos.driver --seconds 600 --seed 7`.

Two API nodes, three workers and a state server, each behind a link that can be held or cut; callers of every kind send
jobs all the time; every few seconds something is done to one of the processes. At the end all is let alone, every
client waits for its answer, and the verdict compares what the clients wrote down with what is stored and with what an
undisturbed run gives. Exit code 0: nothing lost, nothing twice, no invariant broken, every text the same.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from pool.errors import StateUnavailable
from pool.store.audit import Violation
from pool.store.connection import Client
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.program_keys import ProgramKeys
from tasks.celery import create_app
from tests.chaos.clients import Callers
from tests.chaos.faults import KINDS, PACE_S, STATE_KINDS, Injector
from tests.chaos.ledger import Ledger, Verdict, judge
from tests.chaos.links import Links
from tests.chaos.work import WorkSource
from tests.system import SCRIPTED, TINY, System
from workers.engines.paged_kv import position_bytes
from workers.engines.tiny import TINY as TINY_SHAPE

APIS, WORKERS = 2, 3
KV_TOKENS = 1024
SECTIONS: dict[str, dict[str, Any]] = {
    "server": {"sync_wait_seconds": 30, "orphan_grace_seconds": 40, "threads": 128},
    "limits": {"pending_per_model": 400},
    "state": {"celery_results": "celery"},
    # Small windows and waits: statistics count, places are lost and Programs are forced within a run.
    "programs": {
        "enabled": True,
        "global_queue": True,
        "metrics_interval_seconds": 0.3,
        "max_active_programs_per_target": 5,
        "stats_window_size": 4,
        "max_acting_ttl_seconds": 1.5,
        "paused_retention_ttl_seconds": 15,
        "max_segment_rounds": 3,
        "force_resume_timeout_seconds": 10,
        "rank_gone_seconds": 8,
    },
    "programs.prefill_cost_model": {"intercept_seconds": 1.0},
    f"programs.models.{TINY}": {"token_capacity_per_dp_rank": KV_TOKENS},
}
#: The real engine's KV holds its largest job and little more, so that jobs that run together preempt each other.
TIGHT = {"kv_budget_bytes": KV_TOKENS * position_bytes(TINY_SHAPE), "kv_overcommit": 16}
MODELS = {SCRIPTED: {"target_inflight": 12}, TINY: {"target_inflight": 8, "threads": 1, **TIGHT}}
REST_S = 60.0
#: Each must have happened in a full run.
MOVES = ("pause:ttl_expired", "pause:health_failover", "pause:capacity_repair", "release:finished")
SAY_EVERY_S = 30.0
LOOK_EVERY_S = 1.0
#: A run of this length must do each fault to each victim, and so many of both.
FULL_S, FULL_FAULTS, FULL_JOBS = 600.0, 60, 1000


class ChaosSystem(System):
    """A System whose processes reach the state server over links."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, apis=0, workers=0, sections=SECTIONS, models=MODELS, serves=f"{SCRIPTED},{TINY}", delay_ms=15
        )
        names = [f"api-{number}" for number in range(APIS)] + [f"worker-{number}" for number in range(WORKERS)]
        self.links = Links(self.port, names)
        self.apis = [self.api_part(number, self.links.url(f"api-{number}")) for number in range(APIS)]
        self.workers = [self.worker_part(number, self.links.url(f"worker-{number}")) for number in range(WORKERS)]

    def close(self) -> None:
        """End the processes, then the links."""
        super().close()
        self.links.close()


class Run:
    """One run of the driver."""

    def __init__(self, folder: Path, *, seed: int, seconds: float, rate: float, pace_s: tuple[float, float]) -> None:
        self.seed = seed
        self._seconds = seconds
        self._rate = rate
        self._began_s = time.monotonic()
        self.system = ChaosSystem(folder)
        self.ledger = Ledger(folder / "clients.jsonl")
        self.injector = Injector(self.system, self.system.links, seed, self._note, pace_s)
        self._events = folder / "faults.log"
        self.violations: list[Violation] = []
        self.leftovers: list[str] = []
        self.dead_letters = 0
        #: What became of Programs, as WHAT:REASON.
        self.moves: Counter[str] = Counter()
        #: What each process of the real engine's last told of itself, by incarnation.
        self._figures: dict[str, Mapping[str, int]] = {}

    def go(self) -> Verdict:
        """Everything, from the start to the verdict."""
        self.system.start()
        urls = [self.system.api_url(api) for api in self.system.apis]
        work = WorkSource(self.seed, urls[0])
        undisturbed = set(self._records())
        callers = Callers(urls, self.ledger, create_app(self.system.settings))
        self.injector.start()
        threads = self._send(callers, work)
        self.injector.stop_faults()
        self._say("faults end; waiting for the clients")
        for thread in threads:
            thread.join()
        callers.close()
        self.leftovers += callers.problems
        self._rest()
        self.injector.close()
        return judge(self.ledger, {job: record for job, record in self._records().items() if job not in undisturbed})

    def _send(self, callers: Callers, work: WorkSource) -> list[threading.Thread]:
        """Start clients at the run's rate until its time is over; returns those that still wait."""
        rng = random.Random(self.seed + 1)
        end_s = time.monotonic() + self._seconds
        say_s, look_s = time.monotonic() + SAY_EVERY_S, 0.0
        threads: list[threading.Thread] = []
        while time.monotonic() < end_s:
            time.sleep(rng.expovariate(self._rate))
            threads = [thread for thread in threads if thread.is_alive()]
            thread = threading.Thread(target=work.draw(callers), daemon=True)
            thread.start()
            threads.append(thread)
            if time.monotonic() > look_s:
                look_s = time.monotonic() + LOOK_EVERY_S
                self._look()
            if time.monotonic() > say_s:
                say_s += SAY_EVERY_S
                faults = sum(self.injector.done.values())
                self._say(f"{len(self.ledger.accounts)} jobs sent, {len(threads)} waiting, {faults} faults done")
        return threads

    def _look(self) -> None:
        """Read what the real engine's workers tell of themselves; they may not live long."""
        with suppress(redis.RedisError, StateUnavailable):
            self._figures |= {rank.incarnation: rank.facts for rank in self.system.ranks(TINY)}

    def total(self, figure: str) -> int:
        """A figure of the real engine's, over all processes."""
        return sum(facts.get(figure, 0) for facts in self._figures.values())

    def _rest(self) -> None:
        """Wait until nothing is under way, and look for what broke an invariant or was left over."""
        keys = [self.system.keys(model) for model in (SCRIPTED, TINY)]
        deadline_s = time.monotonic() + REST_S
        with self.system.client() as client:
            while time.monotonic() < deadline_s and any(client.zcard(model.index) for model in keys):
                time.sleep(0.2)
            time.sleep(2 * self.system.settings.worker.lease_seconds)
            for model in keys:
                for name, size in (("index", client.zcard(model.index)), ("leases", client.zcard(model.leases))):
                    self._expect_none(f"{name} of {model.tag}", size)
                self._expect_none(f"timers of {model.tag}", client.zcard(model.timers))
                self._expect_none(f"outbox of {model.tag}", client.zcard(model.outbox))
                self._expect_none(f"entries of {model.tag}", client.xlen(model.queue))
                self._expect_none(f"lanes of {model.tag}", client.exists(model.lanes["backlog"]))
                groups = client.xinfo_groups(model.queue) if client.exists(model.queue) else []
                self._expect_none(f"pending of {model.tag}", sum(group["pending"] for group in groups))
                self.dead_letters += client.xlen(model.dead)
                self._expect_programs_at_rest(client, ProgramKeys(model.tag))
        self.violations = self.system.audit()
        poisoned = sum(account.error_code == "poison" for account in self.ledger.accounts)
        self._expect_none("dead letters too many", max(0, self.dead_letters - poisoned))
        self.leftovers += self.injector.problems

    def _expect_programs_at_rest(self, client: Client, keys: ProgramKeys) -> None:
        """Nothing of theirs waits, is with a rank, or leaves one."""
        for rank in client.zrange(keys.members, 0, -1):
            place = keys.place(rank.decode())
            self._expect_none(f"Programs that wait for {rank.decode()}", client.zcard(place["waiting"]))
            self._expect_none(f"entries of {rank.decode()}", client.xlen(place["stream"]))
            self._expect_none(f"leaving of {rank.decode()}", client.hlen(place["leaving"]))
        self._expect_none(f"pools of {keys.tag}", sum(1 for _ in client.scan_iter(match=keys.pool("*"), count=1000)))
        moves = client.hgetall(keys.placement)
        for name, count in moves.items():
            if b":" in name:
                self.moves[name.decode()] += int(count)

    def _expect_none(self, what: str, count: int) -> None:
        if count:
            self.leftovers.append(f"{count} {what}")

    def _records(self) -> dict[str, Any]:
        """Every job in the store, by id."""
        found: dict[str, Any] = {}
        with self.system.client() as client:
            store = JobStore(client, result_ttl_ms=1, pending_per_model=1)
            for model in (SCRIPTED, TINY):
                for key in client.scan_iter(match=self.system.keys(model).job("*"), count=1000):
                    token = key.decode().rpartition(":")[2]
                    door = client.hget(key, "kind").decode()
                    record = store.read(new_ref(door, model, token=token))
                    found[record.id] = record
        return found

    def _note(self, what: str) -> None:
        with self._events.open("a") as log:
            log.write(f"{time.monotonic() - self._began_s:8.1f} {what}\n")

    def _say(self, what: str) -> None:
        self._note(what)
        print(f"[{time.monotonic() - self._began_s:6.0f} s] {what}", flush=True)


def fault_table(injector: Injector) -> dict[str, dict[str, int]]:
    """Faults done, by victim and kind."""
    table: dict[str, Counter[str]] = {}
    for card, count in injector.done.items():
        table.setdefault(card.victim, Counter())[card.kind] += count
    return {victim: dict(table[victim]) for victim in sorted(table)}


def missing_faults(injector: Injector) -> list[str]:
    """Kinds that were not done to a victim they apply to."""
    wanted = [(kind, part.name) for kind in KINDS for part in injector.parts]
    wanted += [(kind, "state") for kind in STATE_KINDS]
    done = {(card.kind, card.victim) for card in injector.done}
    return [f"{kind} {victim}" for kind, victim in wanted if (kind, victim) not in done]


def report(run: Run, verdict: Verdict) -> dict[str, Any]:
    """The run's figures as JSON."""
    faults = fault_table(run.injector)
    took = sorted(account.took_s for account in run.ledger.accounts)
    return {
        "seed": run.seed,
        "jobs": {name: verdict.jobs[name] for name in sorted(verdict.jobs)},
        "lost": verdict.jobs["lost"] + verdict.jobs["unanswered"],
        "duplicated": verdict.jobs["duplicated"],
        "unexpected": verdict.jobs["unexpected"],
        "texts_that_differ": verdict.jobs["text differs"],
        "violations": len(run.violations),
        "leftovers": len(run.leftovers),
        "resends": sum(account.resends for account in run.ledger.accounts),
        "preempted": run.total("preempted_total"),
        "prompt_tokens_reused": run.total("prompt_tokens_cached_total"),
        "program_moves": dict(sorted(run.moves.items())),
        "seconds_p50_p99": [round(took[len(took) // 2], 2), round(took[len(took) * 99 // 100], 2)] if took else [],
        "faults": faults,
        "faults_done": sum(run.injector.done.values()),
        "processes_restarted_by_the_supervisor": dict(run.injector.restarted),
        "faults_missing": missing_faults(run.injector),
    }


def shortcomings(figures: dict[str, Any]) -> list[str]:
    """What a full run must have done to prove anything."""
    found = [f"never done: {fault}" for fault in figures["faults_missing"]]
    if figures["faults_done"] < FULL_FAULTS:
        found.append(f"only {figures['faults_done']} faults; {FULL_FAULTS} are asked for")
    if figures["jobs"].get("acknowledged", 0) < FULL_JOBS:
        found.append(f"only {figures['jobs'].get('acknowledged', 0)} jobs; {FULL_JOBS} are asked for")
    found += [f"no Program did {move}" for move in MOVES if not figures["program_moves"].get(move)]
    found += [f"nothing was {name}" for name in ("preempted", "prompt_tokens_reused") if not figures[name]]
    return found


def show(figures: dict[str, Any], problems: list[str]) -> None:
    """The table for people."""
    kinds = [*KINDS, *STATE_KINDS]
    print(f"\nFaults done ({figures['faults_done']}):")
    print(f"{'victim':10}" + "".join(f"{kind:>14}" for kind in kinds))
    for victim, counts in figures["faults"].items():
        print(f"{victim:10}" + "".join(f"{counts.get(kind, 0) or '':>14}" for kind in kinds))
    print("\nJobs:")
    for name, count in figures["jobs"].items():
        print(f"  {name:24}{count:7}")
    print()
    for name in ("lost", "duplicated", "unexpected", "texts_that_differ", "violations", "leftovers"):
        print(f"  {name.replace('_', ' '):24}{figures[name]:7}")
    print(f"  job seconds p50, p99    {figures['seconds_p50_p99']}")
    print(f"  {figures['preempted']} preemptions, {figures['prompt_tokens_reused']} prompt tokens reused (real engine)")
    print(f"  of Programs: {figures['program_moves']}")
    for problem in problems[:40]:
        print(f"PROBLEM {problem}")


def main() -> int:
    """Run once; 0 when nothing is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600, help="how long faults are done")
    parser.add_argument("--rate", type=float, default=3.0, help="jobs sent per second, on average")
    parser.add_argument(
        "--pace", type=float, nargs=2, default=PACE_S, metavar="S", help="seconds between two faults, least and most"
    )
    parser.add_argument("--seed", type=int, default=None, help="replays the choices of an earlier run")
    parser.add_argument("--json", type=Path, default=None, help="append the run's figures to this file, a line a run")
    parser.add_argument(
        "--keep", action="store_true", help="keep the run's folder (it is kept when something is wrong)"
    )
    options = parser.parse_args()
    seed = secrets.randbits(31) if options.seed is None else options.seed
    # A shell starts background commands with this one ignored, and a worker would inherit that until Celery is up.
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    folder = Path(tempfile.mkdtemp(prefix="genpool-chaos-"))
    print(f"seed {seed}, {options.seconds:g} s, {options.rate:g} jobs/s, logs in {folder}", flush=True)
    run = Run(folder, seed=seed, seconds=options.seconds, rate=options.rate, pace_s=tuple(options.pace))
    try:
        verdict = run.go()
    finally:
        run.system.close()
    problems = [*verdict.faults, *map(str, run.violations), *run.leftovers]
    figures = report(run, verdict)
    if options.seconds >= FULL_S:
        problems += shortcomings(figures)
    show(figures, problems)
    if options.json:
        with options.json.open("a") as out:
            out.write(json.dumps(figures) + "\n")
    if problems:
        print(f"\nFAILED. Logs: {folder}. Replay: python -m tests.chaos.driver --seconds {options.seconds:g} "
              f"--rate {options.rate:g} --pace {options.pace[0]:g} {options.pace[1]:g} --seed {seed}")  # fmt: skip
        return 1
    if not options.keep:
        shutil.rmtree(folder, ignore_errors=True)
    print("\nNothing was lost.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
