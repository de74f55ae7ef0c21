"""The client of the queue benchmark: submits through genpool's own door and waits as an API node does."""

from __future__ import annotations

from benchmarks.peers.dialogue import CALL, serve
from pool.store.records import NewJob
from tasks.config import load_settings
from tasks.generate import request_of
from tasks.services import Services, open_services
from webapp.waits import Waits

WAIT_S = 60.0


class Client:
    """One process's way in."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._waits = Waits(services.store, services.client, grace_ms=15_000)

    def enqueue(self) -> None:
        """Submit one job that nobody waits for."""
        self._services.store.submit(self._prepare(watch=""))

    def round_trip(self) -> None:
        """Submit one job and wait for its terminal record."""
        job = self._prepare(watch=self._waits.node_id)
        waiter = self._waits.open(job.ref)
        try:
            self._services.store.submit(job)
            waiter.arm()
            while True:
                view = waiter.next(WAIT_S)
                if view is None:
                    raise TimeoutError(f"no news of a job for {WAIT_S:g} s")
                if view.record.terminal:
                    return
        finally:
            waiter.close()

    def _prepare(self, *, watch: str) -> NewJob:
        return self._services.submitter.prepare(request_of(CALL), door="responses", watch=watch)


if __name__ == "__main__":
    client = Client(open_services(load_settings()))
    serve(client.enqueue, client.round_trip)
