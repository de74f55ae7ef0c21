"""What a process supervisor does to workers that end: it starts them again."""

from __future__ import annotations

import threading
from types import TracebackType

from tests.system import Part, System


class Supervising:
    """While entered, restarts each worker of the system that ends; `restarts` counts them."""

    def __init__(self, system: System) -> None:
        self._workers: list[Part] = list(system.workers)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.restarts = 0

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            for worker in self._workers:
                if not worker.alive:
                    self.restarts += 1
                    worker.start()

    def __enter__(self) -> Supervising:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
