"""How long the reader of a running stream waits for its next new token when a process is killed in the middle.

Two API nodes, two workers, one state server. Some clients read background streams all the time, one after the other,
and continue a broken one at the other node with `starting_after`. At a random moment one process is killed (SIGKILL),
and started again at once; for every stream that it served, the clock runs from the kill to the next new token:

| victim | streams it served | the next new token |
|---|---|---|
| worker | those whose job it ran | the first that was not in the log when it was dead: another worker made it |
| API node | those read from it | the first over a new connection |
| state server | all | the first that was not in the log when the server was back |

An end counts as a token where no more came. A worker that takes a stream over prefills the prompt and feeds what was
logged; how long the engine takes for just that is measured before, alone, with as many streams in its batch.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from pool.rules.admission import Budgets
from pool.settings import ModelSettings
from pool.store.connection import connect
from pool.store.ids import parse_ref
from pool.store.jobs import JobStore, View
from tasks.config import Settings
from tasks.payloads import Sampling
from tasks.ports import Engine, Generation, Tokens
from tests.chaos.readers import LOST_S, Arrival, Reader, Readers
from tests.scripted.engine import ScriptedEngine
from tests.system import SCRIPTED, TINY, Part, System
from tests.waiting import wait_until
from workers.engines import load_engine
from workers.loop import BatchingLoop

VICTIMS = ("worker", "api", "state")
#: How long one step of the scripted engine takes.
STEP_MS = 4.0
#: Beside the lease and the engine's own work, this is allowed to a recovery.
ALLOWED_S = 1.0
#: About what the chat template makes of the prompts below.
PROMPT_TOKENS = 96
ORDINARY_TOKEN = 100


@dataclass(frozen=True)
class Plan:
    """What is done. `streams`: read at any time; `texts`: different ones; `tokens`: of each; a kill comes within
    `phase_s` after the streams run again; `replays`: how often the engine's own work is measured."""

    model: str = TINY
    kills: int = 50
    seed: int = 1
    streams: int = 3
    texts: int = 5
    tokens: int = 800
    lease_s: float = 3.0
    phase_s: float = 1.0
    replays: int = 3

    @property
    def bound_s(self) -> float:
        """How long a recovery may take beside the engine's own work."""
        return self.lease_s + ALLOWED_S

    def bodies(self) -> list[dict[str, Any]]:
        """The streams' requests: always the same ones, so that each has one text."""
        return [{"model": self.model, **self._body(number)} for number in range(self.texts)]

    def _body(self, number: int) -> dict[str, Any]:
        if self.model == SCRIPTED:
            return {"input": f"repeat {self.tokens // 10} text {number:04d} ", "max_output_tokens": 2 * self.tokens}
        words = "Tell what became of the little house by the sea, and of those who lived in it. "
        sampling = {"temperature": 0.8, "seed": number, "ignore_eos": True}
        return {"input": f"{words}{number}", "max_output_tokens": self.tokens, **sampling}

    def system(self, folder: Path) -> System:
        """The processes that are killed."""
        return System(
            folder,
            apis=2,
            workers=2,
            sections={"worker": {"lease_seconds": self.lease_s, "renew_seconds": self.lease_s / 4}},
            models={name: {"target_inflight": self.streams, "threads": 1} for name in (SCRIPTED, TINY)},
            serves=self.model,
            delay_ms=STEP_MS,
        )


# --- the engine alone


class Replay:
    """How long the engine takes from the prompt to the first new token, with N logged tokens in between: measured with
    the worker's own loop, all streams in its batch, nothing else running."""

    def __init__(self, plan: Plan, settings: Settings, folder: Path) -> None:
        engine = _engine(settings, plan.model, folder)
        self._tokens = [0, plan.tokens // 2, plan.tokens - 1]
        with threadpool_limits(limits=1, user_api="blas"):  # as a rank does
            self._seconds = [
                statistics.median(
                    _replay_s(engine, settings.models[plan.model], logged, plan.streams) for _ in range(plan.replays)
                )
                for logged in self._tokens
            ]
        engine.close()

    def seconds(self, logged_tokens: int) -> float:
        """For streams of which this much was logged; interpolated."""
        return float(np.interp(logged_tokens, self._tokens, self._seconds))


def _engine(settings: Settings, model: str, folder: Path) -> Engine:
    if model == SCRIPTED:
        return ScriptedEngine(delay_ms=STEP_MS, log_path=folder / "replay.log")
    return load_engine(model, settings.models[model], weights=None)


def _replay_s(engine: Engine, settings: ModelSettings, logged: int, streams: int) -> float:
    """From the first step until every stream has a new token."""
    loop = BatchingLoop(engine, replace(Budgets.of(settings), max_active_sessions=streams), streams)
    for number in range(streams):
        loop.submit(
            Generation(
                job=f"replay-{number}",
                attempt=1,
                prompt=np.full(PROMPT_TOKENS, ORDINARY_TOKEN, dtype=np.int32),
                sampling=Sampling(temperature=0.8, ignore_eos=True),
                max_tokens=logged + 1,
                seed=number,
                replay=((ORDINARY_TOKEN,) * logged,),
            )
        )
    started_s = time.perf_counter()
    new: set[str] = set()
    while len(new) < streams:
        new |= {event.job for event in loop.tick().events if isinstance(event, Tokens)}
    took_s = time.perf_counter() - started_s
    loop.stop()
    return took_s


# --- the kills


@dataclass(frozen=True, slots=True)
class Recovery:
    """One stream over one kill: from the kill to the next new token, and what the engine's own work is of that."""

    took_s: float
    engine_s: float

    @property
    def over_s(self) -> float:
        """What is left without the engine's work."""
        return self.took_s - self.engine_s


@dataclass
class Outcome:
    """All kills of one victim. `problems`: whatever must not be; empty when all went well."""

    victim: str
    kills: int = 0
    recoveries: list[Recovery] = field(default_factory=list)
    streams: int = 0
    lost: int = 0
    duplicated: int = 0
    different: int = 0
    problems: list[str] = field(default_factory=list)


class Killer:
    """Kills processes of a running system and times what follows."""

    def __init__(self, system: System, plan: Plan, replay: Replay) -> None:
        self._system = system
        self._plan = plan
        self._replay = replay
        self._rng = random.Random(plan.seed)
        self._client = connect(system.url, max_connections=2)
        self._store = JobStore(self._client, result_ttl_ms=1, pending_per_model=1)
        self._urls = [system.api_url(api) for api in system.apis]
        self._bodies = plan.bodies()
        self._texts = [self._undisturbed(body) for body in self._bodies]

    def close(self) -> None:
        """Close its connections."""
        self._client.connection_pool.disconnect()

    def kill(self, victim: str, say: Callable[[str], None]) -> Outcome:
        """The plan's kills of one victim, each after the streams have recovered from the one before."""
        outcome = Outcome(victim)
        readers = Readers(self._urls, self._bodies, self._texts)
        readers.start(self._plan.streams)
        while outcome.kills < self._plan.kills and not outcome.problems:
            self._await_streams(readers)
            time.sleep(self._rng.uniform(0, self._plan.phase_s))
            if self._once(victim, readers, outcome) and outcome.kills % 10 == 0:
                say(f"{outcome.kills} kills of {victim}, {len(outcome.recoveries)} recoveries")
        readers.stop()
        outcome.streams, outcome.lost, outcome.duplicated = readers.streams, readers.lost, readers.duplicated
        outcome.different = readers.different
        outcome.problems += readers.problems
        return outcome

    def _undisturbed(self, body: Mapping[str, Any]) -> str:
        reader = Reader(self._urls, body, 0)
        reader.run()
        assert reader.text == reader.final != "", f"the undisturbed run of {reader.job} has no text"
        return reader.text

    def _await_streams(self, readers: Readers) -> None:
        """Until some stream runs and has a token."""
        wait_until(
            lambda: any(reader.arrivals for reader in readers.running()),
            description="a stream to run",
            timeout_s=LOST_S,
        )

    def _once(self, victim: str, readers: Readers, outcome: Outcome) -> bool:
        """One kill. False: it came when nothing ran on the victim, and does not count."""
        part, ranks = self._choose(victim, readers)
        if part is None:
            return False
        connections = {
            reader: reader.connection for reader in readers.running() if self._may_feel(victim, part, reader)
        }
        killed_s = time.monotonic()
        part.kill()
        logged = self._logged(part, connections)
        cut = [
            (reader, view)
            for reader, view in logged.items()
            if not view.record.terminal and (victim != "worker" or view.record.rank in ranks)
        ]
        outcome.kills += bool(cut)
        for reader, view in cut:
            recovery = self._recovery(reader, _is_new(victim, view, connections[reader]), killed_s)
            if recovery is None:
                outcome.problems.append(f"{reader.job}: no new token for {LOST_S:g} s after a kill of {victim}")
            else:
                engine_s = self._replay.seconds(_tokens(view)) if victim == "worker" else 0.0
                outcome.recoveries.append(Recovery(recovery, engine_s))
        self._await_ready(victim, part)
        return bool(cut)

    def _may_feel(self, victim: str, part: Part, reader: Reader) -> bool:
        return victim != "api" or reader.url == self._url(part)

    def _choose(self, victim: str, readers: Readers) -> tuple[Part | None, set[str]]:
        """A process that serves some stream, and the ids of its ranks. None: just now there is none."""
        if victim == "state":
            return self._system.state, set()
        if victim == "api":
            urls = {reader.url for reader in readers.running()}
            serving = [api for api in self._system.apis if self._url(api) in urls]
            return (self._rng.choice(serving) if serving else None), set()
        ranks = {rank.id: rank.pid for rank in self._system.ranks(self._plan.model)}
        records = [self._store.read(parse_ref(reader.job)) for reader in readers.running()]
        pids = {ranks[record.rank] for record in records if record.state == "running" and record.rank in ranks}
        holding = [worker for worker in self._system.workers if worker.pid in pids]
        if not holding:
            return None, set()
        part = self._rng.choice(holding)
        return part, {rank for rank, pid in ranks.items() if pid == part.pid}

    def _logged(self, part: Part, readers: Iterable[Reader]) -> dict[Reader, View]:
        """Start the dead process again, and see what the log holds of each stream: before a worker could add to it, and
        as soon as a state server tells."""
        if part is self._system.state:
            part.start()
            self._system.await_state()
        found: dict[Reader, View] = {}
        for _ in range(2):  # what a dead process sent may still be on its way at the first look
            found = {reader: self._store.view(parse_ref(reader.job)) for reader in readers}
        part.start()
        return found

    def _recovery(self, reader: Reader, new: Callable[[Arrival], bool], killed_s: float) -> float | None:
        """Seconds from the kill to the first new token; None when it did not come."""
        try:
            arrival = wait_until(lambda: reader.first(new), description="a new token", timeout_s=LOST_S)
        except AssertionError:
            return None
        return arrival.at_s - killed_s if arrival else None

    def _await_ready(self, victim: str, part: Part) -> None:
        if victim == "worker":
            self._system.await_worker(part)
        elif victim == "api":
            self._system.await_api(part)

    def _url(self, api: Part) -> str:
        return self._system.api_url(api)


def _tokens(view: View) -> int:
    return sum(len(entry.token_ids) for entry in view.entries)


def _is_new(victim: str, view: View, connection: int) -> Callable[[Arrival], bool]:
    if victim == "api":
        return lambda arrival: arrival.connection > connection
    logged = sum(len(entry.text) for entry in view.entries)
    return lambda arrival: arrival.characters > logged or arrival.ended


def run(
    folder: Path, plan: Plan, *, victims: Sequence[str] = VICTIMS, say: Callable[[str], None] = lambda _: None
) -> list[Outcome]:
    """Everything, for each victim: a system of its own, measured and killed. Nothing is left running."""
    with plan.system(folder) as system:
        replay = Replay(plan, system.settings, folder)
        system.start()
        killer = Killer(system, plan, replay)
        try:
            outcomes = []
            for victim in victims:
                outcomes.append(killer.kill(victim, say))
                system.assert_at_rest(timeout_s=LOST_S)
            return outcomes
        finally:
            killer.close()
