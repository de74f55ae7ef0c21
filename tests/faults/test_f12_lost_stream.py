"""F12: the state server loses the group or the stream of a model while nothing runs. (Under work, and with restarts:
`test_faulty_server.py`.)"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from pool.store.keys import GROUP
from tests.faults.conftest import StartSystem
from tests.system import Part, System
from tests.waiting import wait_until

IDLE_WATCH_S = 2.0


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker."""
    return start_shared_system(workers=1)


@pytest.mark.parametrize("loss", ["group", "stream"])
def test_f12_an_idle_worker_notices_and_stays_idle(system: System, loss: str) -> None:
    """The group is soon there again, and the worker uses less than a tenth of a core."""
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


def test_f12_a_stream_lost_while_no_worker_runs_is_there_for_the_next(system: System) -> None:
    """Jobs that were queued then run as soon as a worker starts."""
    (worker,) = system.workers
    assert worker.terminate() == 0
    jobs = [system.submit("say x") for _ in range(3)]
    with system.client() as client:
        client.delete(system.keys().queue)
    worker.start()
    for job in jobs:
        assert system.ended(job).outputs[0].text == "x"
    system.await_worker(worker)
    system.assert_recovered()


def cpu_s(part: Part) -> float:
    """CPU time that a process has used, in seconds."""
    fields = Path(f"/proc/{part.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
