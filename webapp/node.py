"""What one API process holds: the store, the way in, its waits, its upkeep. Made once by `create_app`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from flask import current_app

from pool.errors import ProgramUnknown, StateUnavailable
from pool.store.jobs import AT_ONCE_S, JobStore
from pool.store.records import NewJob
from tasks.config import Settings
from tasks.maintenance import Maintenance
from tasks.program_intake import Entrance, ProgramIntake
from tasks.programs import Programs
from tasks.services import Services, open_services
from tasks.vocabulary import Vocabulary
from webapp.errors import TooManyWaiting
from webapp.waits import OnCount, Waits, no_count

EXTENSION = "genpool"

#: Connections to the state server a process has at most, the reader's included, however many requests wait.
CONNECTIONS = 4
#: How long a request waits for a free connection, and then for a reply: a state server that hangs is said within 5 s.
STATE_TIMEOUT_S = 2.0
#: The pauses after which a submit is repeated while the state server is away, as long as it says so at once.
SUBMIT_PAUSES_S = (0.1, 0.4, 1.0)


class WaitingPlaces:
    """Bounds the requests that hold a thread while they wait, so that polls, cancels and probes always find one: an
    eighth of the threads is kept for them, but no more than `MOST_RESERVED`."""

    MOST_RESERVED = 32

    def __init__(self, threads: int) -> None:
        self.limit = max(1, threads - min(max(1, threads // 8), self.MOST_RESERVED))
        self.on_change: OnCount = no_count
        self._free = threading.BoundedSemaphore(self.limit)

    def take(self) -> None:
        """Raises TooManyWaiting when all are taken."""
        if not self._free.acquire(blocking=False):
            raise TooManyWaiting(
                f"{self.limit} requests are waiting on this node, its limit; try again later, or use background."
            )
        self.on_change(1)

    def give_back(self) -> None:
        """The opposite of `take`."""
        self._free.release()
        self.on_change(-1)

    @contextmanager
    def held(self) -> Iterator[None]:
        """A place for the time of a block."""
        self.take()
        try:
            yield
        finally:
            self.give_back()

    @contextmanager
    def handed_on(self) -> Iterator[None]:
        """A place that whoever the block made gives back; only a failure in the block gives it back here."""
        self.take()
        try:
            yield
        except BaseException:
            self.give_back()
            raise


@dataclass
class Node:
    """One API process. `stopping` tells whether it was asked to end; gunicorn's worker answers that, and tells
    `on_raw_answer` the status of each answer that it gave without the application."""

    services: Services
    waits: Waits
    places: WaitingPlaces
    maintenance: Maintenance
    stopping: Callable[[], bool] = field(default=lambda: False)
    on_raw_answer: OnCount = no_count

    @property
    def settings(self) -> Settings:
        """The process's settings."""
        return self.services.settings

    @property
    def store(self) -> JobStore:
        """The callers' side of the store."""
        return self.services.store

    def vocabulary_of(self, model: str) -> Callable[[], Vocabulary]:
        """Gets the model's published vocabulary, or raises StateUnavailable."""

        def vocabulary() -> Vocabulary:
            known = self.services.submitter.cards.get(model)
            if known is None or known[1] is None:
                raise StateUnavailable("The model's vocabulary is not there; a worker brings it back.")
            return known[1]

        return vocabulary

    def submit(self, job: NewJob, *, entrance: Entrance | None = None, key: str | None = None) -> None:
        """Store a job; `entrance`: of a Program's. While the state server refuses connections (a restart takes a
        moment) the same job is sent again, which is safe; not while it hangs, the caller has waited enough then. If
        that does not help, the job is cancelled as soon as the server is back, since it may be there and only the
        reply got lost: a client may resend after a 503. A job with an Idempotency-Key stays, because the resend will
        find it.

        Raises QueueFull and StateUnavailable.
        """
        pauses_s = iter(SUBMIT_PAUSES_S)
        while True:
            began_s = time.monotonic()
            try:
                return self._submit(job, entrance, key)
            except StateUnavailable:
                hangs = time.monotonic() - began_s > AT_ONCE_S
                pause_s = None if hangs else next(pauses_s, None)
                if pause_s is None:
                    if key is None:
                        self.waits.abandon_later(job.ref)
                    raise
            time.sleep(pause_s)

    def _submit(self, job: NewJob, entrance: Entrance | None, key: str | None) -> None:
        if entrance is None:
            self.store.submit(job, key=key)
        else:
            self.intake().submit(job, entrance, key=key)

    def intake(self) -> ProgramIntake:
        """The way in for requests of Programs, where those are on."""
        return ProgramIntake(self.programs())

    def programs(self) -> Programs:
        """This process's Programs. Raises ProgramUnknown where they are off."""
        if self.services.programs is None:
            raise ProgramUnknown("Programs are off here ([programs] enabled).", code="programs_off")
        return self.services.programs

    def close(self) -> None:
        """End the reader, the planner and the connections."""
        self.waits.close()
        if self.services.programs is not None:
            self.services.programs.stop()
        self.services.close()


def make_node(settings: Settings) -> Node:
    """Connects on first use and starts no thread."""
    services = open_services(settings, max_connections=CONNECTIONS, timeout_s=STATE_TIMEOUT_S)
    return Node(
        services=services,
        waits=Waits(services.store, services.client, grace_ms=round(settings.server.orphan_grace_seconds * 1000)),
        places=WaitingPlaces(settings.server.threads),
        # Models that are disabled or were removed, too: what they hold must end.
        maintenance=Maintenance(services.sweeper, services.catalogue.known, chores=[services.catalogue.follow]),
    )


def current_node() -> Node:
    """The current app's."""
    node: Node = current_app.extensions[EXTENSION]
    return node
