"""F13: a time without work. (A state server that stands still: `test_faulty_server.py`.)

IDLE=long in the environment makes it a minute (`make idle`).
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from pool.store.connection import connect
from tests.faults.conftest import StartSystem
from tests.processes import descendants
from tests.system import Part, System
from tests.waiting import wait_until
from workers.intake import BLOCK_MS, reading_client

IDLE_S = 60.0 if os.environ.get("IDLE") == "long" else 15.0
COMPLAINT = re.compile(r"warning|error|critical|traceback|time-?out", re.IGNORECASE)


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """As it is run, with two workers."""
    return start_shared_system(workers=2)


def cpu_s(part: Part) -> float:
    """CPU time of a part's processes so far."""
    ticks = 0
    for pid in (part.pid, *descendants(part.pid)):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_f13_a_blocking_read_outlasts_its_block() -> None:
    """The worker's reading connection waits longer for a reply than the server may take for one."""
    client = reading_client("redis://127.0.0.1:1/0")
    assert client.connection_pool.connection_kwargs["socket_timeout"] * 1000 >= BLOCK_MS + 1000
    assert connect("redis://127.0.0.1:1/0").connection_pool.connection_kwargs["socket_timeout"]


@pytest.mark.timeout(180)
def test_f13_a_time_without_work_is_silent_and_cheap(system: System) -> None:
    """No error line anywhere, each process under 1 % of a CPU, and then a job starts at once."""
    system.assert_recovered()
    quiet_s = time.monotonic() + 3  # what the last job set going is over
    wait_until(lambda: time.monotonic() > quiet_s, description="the last job's upkeep", timeout_s=5)
    begun = {part.name: (cpu_s(part), len(part.output())) for part in system.parts}
    idle_s = time.monotonic()
    wait_until(lambda: time.monotonic() > idle_s + IDLE_S, description="the time", timeout_s=IDLE_S + 5, every_s=0.5)
    for part in system.parts:
        used_s, said = begun[part.name]
        share = (cpu_s(part) - used_s) / (time.monotonic() - idle_s)
        assert share < 0.01, f"{part.name} uses {share:.2%} of a CPU"
        assert not COMPLAINT.search(part.output()[said:]), part.output()[said:]
    job = system.submit("say x")
    wait_until(lambda: system.starts(job) == 1, description="the job to start", timeout_s=1)
    system.assert_recovered()
