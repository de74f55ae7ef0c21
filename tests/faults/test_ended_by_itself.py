"""A worker that can serve no longer ends by itself, with an exit code that has any supervisor start it again."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, TINY, System
from tests.waiting import wait_until

STALL_S = 2.0
#: Celery's exit code for that.
NOBODY_ANSWERED = 69


def control(system: System, *arguments: str) -> None:
    """Run `celery control ARGUMENTS` for the only worker, as an operator does: again while nobody answers, since a
    worker that has just started may run jobs before it hears commands."""
    node = f"{system.workers[0].name}@{socket.gethostname()}"
    argv = [sys.executable, "-m", "celery", "-A", "tasks", "control", "--timeout", "5", "-d", node, *arguments]

    def answered() -> bool:
        done = subprocess.run(argv, check=False, env=system.workers[0].env, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, NOBODY_ANSWERED), done.stderr
        return done.returncode == 0

    wait_until(answered, description=f"an answer to {arguments[0]}", timeout_s=60)


def test_a_worker_whose_engine_thread_died_ends_with_an_error(start_system: StartSystem) -> None:
    """Its jobs are queued again at once, with what they have, and the exit code is not that of a wish to end."""
    system = start_system(workers=1)
    (worker,) = system.workers
    other = system.submit("repeat 60 x")
    wait_until(lambda: system.record(other).logged_tokens, description="a running job")
    culprit = system.submit("quit 3")
    assert worker.wait() == os.EX_SOFTWARE
    assert [system.record(job).state for job in (other, culprit)] == ["queued"] * 2
    system.jobs.cancel(culprit)
    worker.start()
    assert system.ended(other).outputs[0].text == "x" * 60
    assert system.fact(other, "losses") == ""
    system.await_worker(worker)
    system.assert_recovered()


def test_a_hang_is_seen_although_its_model_is_being_drained(start_system: StartSystem) -> None:
    """One worker serves two models. An operator takes away the queue of one whose engine hangs: the worker cannot drain
    it, and ends after the stall timeout; so it does when it is told to leave."""
    sections = {"worker": {"stall_timeout_seconds": STALL_S, "lease_seconds": 2, "renew_seconds": 0.5}}
    system = start_system(workers=1, serves=f"{SCRIPTED},{TINY}", sections=sections)
    (worker,) = system.workers
    for leave in (lambda: control(system, "cancel_consumer", SCRIPTED), lambda: control(system, "drain")):
        culprit = system.submit("hang 0")
        wait_until(lambda job=culprit: system.starts(job), description="the hang")
        leave()
        assert worker.wait() == os.EX_TEMPFAIL
        system.jobs.cancel(culprit)
        worker.start()
        system.await_worker(worker)
    system.assert_recovered()
