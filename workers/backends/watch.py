"""Looks after a server: finds it back when it was away, and starts it again where it is a child that ended."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx2

from pool.errors import ConfigurationError, GenpoolError
from workers.backends.endpoint import LOOPBACK, PROBE_S, Endpoint
from workers.backends.gate import backoff_s
from workers.backends.server_process import ServerProcess

log = logging.getLogger("genpool.upstream")

#: How often it is seen whether a child still runs.
CHILD_S = 0.25
#: How often a child is asked whether it is well.
HEALTH_S = 5.0
READY_S = 0.1
#: A child that ran for so long was well: the next restart comes soon.
WELL_S = 60.0

#: Where each kind of server says that it serves. Any answer but a refusal counts where it is no question of health.
HEALTH = {"vllm": "/health", "llama_cpp": "/health", "openai": "models"}


class Watch:
    """`kind`: of the server; `process`: it, where it is a child; `unwell_s`: how long a child may be silent about its
    health before it is ended."""

    def __init__(
        self, name: str, endpoint: Endpoint, kind: str, *, process: ServerProcess | None, unwell_s: float
    ) -> None:
        self._name = name
        self._endpoint = endpoint
        self._health = HEALTH[kind]
        self._strict = kind != "openai"
        self._process = process
        self._unwell_s = unwell_s
        self._client = endpoint.probe()
        self._wake = threading.Event()
        self._stopping = False
        #: Seconds to wait before the first look, None while nobody has found it away.
        self._lost: float | None = None
        self._thread = threading.Thread(target=self._run, name="genpool-upstream-watch", daemon=True)

    # -- loading -----------------------------------------------------------------------------------------------------

    def await_ready(self, within_s: float, is_wanted: Callable[[], bool]) -> None:
        """Start the child where there is one, and wait until the server serves. Raises GenpoolError by name where it
        does not in that time, where its child ends, or where it is wanted no more."""
        deadline_s = time.monotonic() + within_s
        process = self._process
        if process is not None:
            process.start()
            self._point_at(process)
        while not self._serves():
            if process is not None and not process.alive:
                raise GenpoolError(
                    f"The server ended with {process.exit_code} before it was ready. It said:\n{process.tail()}",
                    code="upstream_ended",
                )
            if not is_wanted():
                raise GenpoolError("The model is not wanted any more.", code="upstream_away")
            if time.monotonic() > deadline_s:
                said = "" if process is None else f" It said:\n{process.tail()}"
                raise GenpoolError(f"The server was not ready within {within_s:g} s.{said}", code="upstream_away")
            time.sleep(READY_S)

    def _point_at(self, process: ServerProcess) -> None:
        self._endpoint.base = f"http://{LOOPBACK}:{process.port}/v1"
        self._endpoint.key = process.key
        self._client.headers.update(self._endpoint.headers)

    def _serves(self) -> bool:
        """Whether it says that it does. Raises ConfigurationError where it does not know our key, before it has served:
        later a key may be on its way."""
        status = self._ask()
        if status in (401, 403) and not self._thread.is_alive():
            raise ConfigurationError(
                f"Model {self._name}: the server refuses our key (status {status}).", param="upstream.api_key_env"
            )
        return status == 200 or (not self._strict and 200 <= status < 500 and status not in (401, 403, 429))

    def _ask(self) -> int:
        """The status of its answer, 0 without one."""
        try:
            return self._client.get(self._endpoint.url(self._health)).status_code
        except httpx2.HTTPError:
            return 0

    # -- serving -----------------------------------------------------------------------------------------------------

    def start(self, ended: Callable[[str], None], back: Callable[[], None]) -> None:
        """Begin to look after it, in a thread of its own, which tells when a child has ended, and when it is back."""
        self._ended, self._back = ended, back
        self._thread.start()

    def look(self, wait_s: float) -> None:
        """The server was found away: find out when it is back, from so many seconds on."""
        self._lost = wait_s
        self._wake.set()

    def close(self) -> None:
        """End the thread, and the child."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._process is not None:
            self._process.stop()
        self._client.close()

    def _run(self) -> None:
        process = self._process
        began_s = well_s = asked_s = time.monotonic()
        failures = 0
        while not self._stopping:
            self._wake.wait(None if process is None else CHILD_S)
            self._wake.clear()
            now_s = time.monotonic()
            if process is not None and not process.alive:
                failures = 1 if now_s - began_s > WELL_S else failures + 1
                self._restart(process, failures)
                began_s = well_s = asked_s = time.monotonic()
            elif self._lost is not None:
                self._find_back(process)
                well_s = asked_s = time.monotonic()
            elif process is not None and now_s - asked_s > HEALTH_S:
                asked_s = now_s
                if self._serves():
                    well_s = now_s
                elif now_s - well_s > self._unwell_s:
                    log.warning("%s: its server hangs; ending it", self._name)
                    process.kill()

    def _find_back(self, process: ServerProcess | None) -> None:
        """Look until it serves, in growing intervals. Of a child, only while it lives and is not given up."""
        assert self._lost is not None
        log.warning("%s: the server at %s is away", self._name, self._endpoint.base)
        wait_s, failures, since_s = self._lost, 0, time.monotonic()
        self._lost = None
        while not self._pause(wait_s):
            if process is not None and not process.alive:
                return
            if self._serves():
                log.info("%s: the server at %s is back", self._name, self._endpoint.base)
                self._back()
                return
            failures += 1
            wait_s = backoff_s(failures)
            if process is not None and time.monotonic() - since_s > self._unwell_s:
                log.warning("%s: its server hangs; ending it", self._name)
                process.kill()

    def _restart(self, process: ServerProcess, failures: int) -> None:
        """Start a child that ended again, after a while, and wait until it serves."""
        log.warning("%s: its server ended with %s; starting it again", self._name, process.exit_code)
        self._ended("The server's process ended, and is being started again.")
        # Its own children, if it has left any.
        process.kill()
        if self._pause(backoff_s(failures)):
            return
        process.start()
        self._point_at(process)
        while process.alive and not self._serves():
            if self._pause(READY_S):
                return
        self._lost = None
        if process.alive:
            log.info("%s: its server is back, process %d", self._name, process.pid)
            self._back()

    def _pause(self, wait_s: float) -> bool:
        """Wait; whether this is to end."""
        deadline_s = time.monotonic() + wait_s
        while not self._stopping and (left_s := deadline_s - time.monotonic()) > 0:
            time.sleep(min(left_s, PROBE_S / 10))
        return self._stopping
