"""F12: the state server restarts, or loses the group or the stream of a model, under one worker with work queued."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pool.store.keys import GROUP
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until

IDLE_WATCH_S = 2.0


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker that runs one job at a time, 20 ms a token."""
    return start_shared_system(
        workers=1,
        models={SCRIPTED: {"target_inflight": 1}},
        sections={"worker": {"lease_seconds": 3, "renew_seconds": 0.6}},
        delay_ms=20,
    )


def load(system: System) -> list[str]:
    """A running job and three queued ones."""
    jobs = [system.submit("repeat 80 x"), *(system.submit(f"repeat {count} y") for count in (5, 6, 7))]
    wait_until(lambda: system.tokens(jobs[0]) > 3, description="the first to run")
    return jobs


def assert_ended(system: System, jobs: list[str], pids: list[int]) -> None:
    """All four have ended, whole, in the processes that were there before."""
    texts = [system.ended(job).outputs[0].text for job in jobs]
    assert texts == ["x" * 80, "y" * 5, "y" * 6, "y" * 7]
    assert [part.pid for part in (*system.apis, *system.workers)] == pids
    system.assert_recovered()


def pids(system: System) -> list[int]:
    """Of the processes that must survive."""
    return [part.pid for part in (*system.apis, *system.workers)]


def complaints(part: Part, since: int) -> int:
    """Lines of level WARNING or worse, or that name the lost group, after the first `since` characters."""
    words = ("WARNING/", "ERROR/", "CRITICAL/", "NOGROUP")
    return sum(any(word in line for word in words) for line in part.output()[since:].splitlines())


def test_f12_two_restarts_in_three_seconds(system: System) -> None:
    """The state server is killed and started twice with one job running and three queued: all four end, nobody else
    was restarted, and complaints come no faster than one a second a thread."""
    before, since, began_s = pids(system), len(system.workers[0].output()), time.monotonic()
    jobs = load(system)
    for _ in range(2):
        system.state.kill()
        system.state.start()
        system.await_state()
        wait_until(lambda: system.record(jobs[0]), description="an answer")
    assert_ended(system, jobs, before)
    # Celery's own consumer prints a traceback a lost connection, one line of which has a level.
    assert complaints(system.workers[0], since) <= 10 + (time.monotonic() - began_s)


@pytest.mark.parametrize("loss", ["group", "stream"])
def test_f12_a_lost_group_or_stream_is_made_again(system: System, loss: str) -> None:
    """The consumer group or the whole stream is gone: it is rebuilt, queued jobs come back from their records, what has
    ended is not run again, and nothing runs hot over it."""
    ended = system.submit("say z")
    system.ended(ended)
    before, since, began_s = pids(system), len(system.workers[0].output()), time.monotonic()
    jobs = load(system)
    queue = system.keys().queue
    with system.client() as client:
        if loss == "group":
            client.xgroup_destroy(queue, GROUP)
        else:
            client.delete(queue)
        assert_ended(system, jobs, before)
        (group,) = client.xinfo_groups(queue)
        assert group["pending"] == 0
    assert [system.starts(job) for job in (ended, *jobs)] == [1] * 5
    assert [system.record(job).attempt for job in jobs] == [1] * 4
    assert complaints(system.workers[0], since) <= 1 + (time.monotonic() - began_s)


@pytest.mark.parametrize("loss", ["group", "stream"])
def test_f12_an_idle_worker_notices_and_stays_idle(system: System, loss: str) -> None:
    """The same without any work: the group is soon there again, and the worker uses less than a tenth of a core."""
    queue = system.keys().queue
    with system.client() as client:

        def there() -> bool:
            return bool(client.exists(queue) and client.xinfo_groups(queue))

        wait_until(there, description="the group")
        if loss == "group":
            client.xgroup_destroy(queue, GROUP)
        else:
            client.delete(queue)
        wait_until(there, description="the group again")
    used_s, began_s = cpu_s(system.workers[0]), time.monotonic()
    wait_until(lambda: time.monotonic() > began_s + IDLE_WATCH_S, description="some idle time")
    assert cpu_s(system.workers[0]) - used_s < 0.1 * (time.monotonic() - began_s)
    system.assert_recovered()


def test_f12_a_stream_lost_while_no_worker_runs_is_there_for_the_next(start_system: StartSystem) -> None:
    """Jobs that were queued then run as soon as a worker starts."""
    system = start_system(workers=0, delay_ms=1)
    jobs = [system.submit("say x") for _ in range(3)]
    with system.client() as client:
        client.delete(system.keys().queue)
    system.workers = [system.worker_part(0)]
    system.workers[0].start()
    for job in jobs:
        assert system.ended(job).outputs[0].text == "x"
    system.assert_recovered()


def cpu_s(part: Part) -> float:
    """CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
