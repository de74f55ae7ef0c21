"""The host: everything genpool runs inside one Celery worker process.

It follows the worker's queues (so `add_consumer` and `cancel_consumer` load and drain models), and it answers control
commands.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import Any

from celery.worker import state as celery_state

from pool.errors import GenpoolError, JobNotCancellable, JobUnknown
from pool.settings import ModelSettings
from pool.store.handouts import Ending, Handout
from pool.store.ids import JobRef, new_ref, parse_ref
from tasks.config import Settings
from tasks.maintenance import Maintenance
from tasks.program_log import set_log_level
from tasks.results import outbox_chore
from tasks.services import Services
from workers.backends import parts_of
from workers.station import Station
from workers.trials import TrialGate
from workers.visible import Visible, given_up_chore

log = logging.getLogger("genpool.host")

FOLLOW_S = 0.5

RankKey = tuple[str, int]


class Host:
    """The ranks of one worker process. Created in the main thread, driven by a thread of its own."""

    def __init__(self, worker: Any, services: Services, *, limit: int | None) -> None:
        self._worker = worker
        self._services = services
        self._settings: Settings = services.settings
        self._limit = limit
        #: By model and part: of a model whose servers offer several ranks, this process has as many.
        self._ranks: dict[RankKey, Station] = {}
        #: Ranks whose queue is no longer consumed, with the thread that drains each.
        self._leaving: dict[RankKey, tuple[Station, threading.Thread]] = {}
        self._gate = TrialGate()
        self._visible = Visible(worker)
        # Those that are disabled or were removed, too: what they hold must end.
        models = services.catalogue.known
        chores = [
            services.catalogue.follow,
            outbox_chore(worker.app, services, models),
            given_up_chore(self._visible, services.client, models),
        ]
        self._maintenance = Maintenance(services.sweeper, models, chores=chores)
        self._stopping = threading.Event()
        self._stop_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="genpool-host", daemon=True)

    def start(self) -> None:
        """Begin to serve the worker's queues."""
        self._visible.start()
        self._maintenance.start()
        if self._services.programs is not None:
            set_log_level(self._services.settings.programs)
            self._services.programs.start(self.wanted(self._worker.app, self._services.catalogue.models))
        self._thread.start()

    def stop(self, grace_s: float) -> None:
        """Drain all ranks at once, each with this grace, and end all threads. Idempotent; a second caller waits."""
        self._stopping.set()
        if grace_s == 0:
            for rank in self._all_ranks():
                rank.hurry()
        with self._stop_lock:
            if not self._thread.is_alive() and not self._all_ranks():
                return
            self._thread.join()
            drains = [drain for _, drain in self._leaving.values()]
            drains += [_drain(rank, grace_s) for rank in self._ranks.values()]
            while running := [drain for drain in drains if drain.is_alive()]:
                running[0].join(FOLLOW_S)
                self._end_if_stalled()
            self._ranks.clear()
            self._leaving.clear()
            if self._services.programs is not None:
                self._services.programs.stop()
            self._maintenance.stop()
            self._visible.stop()
            self._services.close()

    # -- control commands --------------------------------------------------------------------------------------------

    def generations(self) -> list[dict[str, Any]]:
        """Running generations of all ranks, those that are being drained included."""
        return [generation for rank in self._all_ranks() for generation in rank.generations()]

    def ranks(self) -> list[dict[str, Any]]:
        """State of each rank."""
        names = ("model", "rank", "state", "last_error", "configured_target_inflight", "effective_target_inflight",
                 "runtime_inflight", "queue_depth")  # fmt: skip
        return [{name: fact for name, fact in rank.facts().items() if name in names} for rank in self._all_ranks()]

    def engine(self) -> dict[str, Any]:
        """What each rank's heartbeat tells, as of now, by model (`MODEL/1`: its second rank here). Reads figures that
        the engine's thread writes, and waits for nothing: a step may hang."""
        return {f"{rank.model}/{rank.part}" if rank.part else rank.model: rank.facts() for rank in self._all_ranks()}

    def drain(self) -> None:
        """Drain in the background, answering control commands meanwhile, then let the worker exit."""
        threading.Thread(target=self._drain_and_exit, name="genpool-drain", daemon=True).start()

    def _drain_and_exit(self) -> None:
        self.stop(self._settings.worker.drain_grace_seconds)
        celery_state.should_stop = 0

    def resize(self, by: int) -> None:
        """`pool_grow` and `pool_shrink`."""
        for rank in list(self._ranks.values()):
            rank.resize(by)

    def cancel(self, task_ids: list[str]) -> int:
        """Cancel generations by job id or by the uuid of a `send_task`, wherever they are. Returns how many were."""
        return sum(self._cancel(ref) for task_id in task_ids for ref in self._candidates(task_id))

    def _candidates(self, task_id: str) -> list[JobRef]:
        try:
            return [parse_ref(task_id)]
        except JobUnknown:
            token = task_id.replace("-", "")
            refs = [f"gen_{model}.0_{token}" for model in self._services.submitter.models()]
        try:
            return [parse_ref(ref) for ref in refs]
        except JobUnknown:
            return []

    def _begun(self, handout: Handout, model: str) -> None:
        ref = new_ref("celery", model, token=handout.lease.token)
        self._visible.begun(handout, model, lambda: self._cancel(ref))

    def _cancel(self, ref: JobRef) -> bool:
        try:
            self._services.store.cancel(ref)
        except (JobUnknown, JobNotCancellable):
            return False
        except GenpoolError as error:
            log.warning("revoke: %s", error.message)
            return False
        return True

    # -- the host's thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            # Without this thread nothing is served and no stall is seen, though the process answers pings.
            log.critical("the worker's own thread died (%s); ending this worker", type(error).__name__)
            self._give_up()
            raise

    def _follow(self) -> None:
        while not self._stopping.is_set():
            self._follow_queues(self.wanted(self._worker.app, self._services.catalogue.models))
            self._follow_targets()
            self._end_if_stalled()
            if any(rank.broken() for rank in self._ranks.values()):
                log.critical("a thread of the batching loop died; ending this worker so that its jobs go elsewhere")
                self._give_up()
                return
            self._stopping.wait(FOLLOW_S)

    def _follow_queues(self, models: list[str]) -> None:
        wanted = [(model, part) for model in models for part in range(parts_of(self._services.catalogue.last(model)))]
        for key in [key for key, (_, drain) in self._leaving.items() if not drain.is_alive()]:
            del self._leaving[key]
        for key in [key for key in self._ranks if key not in wanted]:
            # In a thread of its own: it may take for ever, and somebody has to see that.
            rank = self._ranks[key]
            self._leaving[key] = (rank, _drain(rank, self._settings.worker.drain_grace_seconds))
            del self._ranks[key]
        for key in wanted:
            if key not in self._ranks and key not in self._leaving and not self._stopping.is_set():
                self._begin(*key)

    def _follow_targets(self) -> None:
        targets = []
        for rank in self._ranks.values():
            rank.retarget()
            targets.append(rank.target)
        if targets:
            # What Celery shows of its pool, and shrinks it by.
            self._worker.pool.limit = max(targets)

    def _all_ranks(self) -> list[Station]:
        # A rank that leaves is in both for a moment, and never in none.
        serving = list(self._ranks.values())
        return list(dict.fromkeys([*serving, *(rank for rank, _ in list(self._leaving.values()))]))

    def _end_if_stalled(self) -> None:
        for rank in self._all_ranks():
            if rank.stalled():
                log.critical(
                    "%s: the engine hangs, or keeps its model for too long; ending this process: its jobs go elsewhere",
                    rank.model,
                )
                # No cleaner way out: the engine's thread would be waited for, for ever.
                os._exit(os.EX_TEMPFAIL)

    def _give_up(self) -> None:
        """End this process, with an exit code that tells any supervisor to start it again."""
        # Celery ends by `should_terminate` but does not take its exit code from there.
        self._worker.exitcode = os.EX_SOFTWARE
        celery_state.should_terminate = os.EX_SOFTWARE

    @staticmethod
    def wanted(app: Any, models: Mapping[str, ModelSettings]) -> list[str]:
        """The enabled ones of these models among the queues that the worker consumes now."""
        return [name for name in list(app.amqp.queues.consume_from) if name in models and models[name].enabled]

    def _begin(self, model: str, part: int) -> None:
        station = Station(
            model,
            self._settings,
            self._worker.hostname,
            self._limit,
            part=part,
            catalogue=self._services.catalogue,
            gate=self._gate,
            on_begun=self._begun,
            on_left=self._left,
            on_failed=self._cannot_serve,
            programs=self._services.programs,
        )
        self._ranks[model, part] = station
        station.start()

    def _cannot_serve(self, model: str) -> None:
        log.error("%s: cannot be served; ending this worker", model)
        self._give_up()

    def _left(self, handout: Handout, state: str, ending: Ending | None) -> None:
        self._visible.left(handout, state, ending)
        if ending is not None and handout.celery:
            self._maintenance.wake()


def _drain(rank: Station, grace_s: float) -> threading.Thread:
    """Drain a rank in a thread of its own."""
    drain = threading.Thread(target=rank.drain, args=(grace_s,), name="genpool-drain", daemon=True)
    drain.start()
    return drain
