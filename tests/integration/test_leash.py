"""Children on a leash that have children of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import is_running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
#: Starts a child of its own, which ignores SIGTERM, and says who both are.
PROGRAM = """\
import os, signal, subprocess, sys, time
inner = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", inner], stdout=subprocess.PIPE)
child.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
open(sys.argv[1] + ".new", "w").write(f"{os.getpid()} {child.pid}")
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(600)
"""
#: Starts that on a leash and waits.
STARTER = """\
import subprocess, sys, time
sys.path[:0] = [sys.argv[1]]
from pool.store.leash import spawn
process = spawn([sys.executable, "-c", sys.argv[2], sys.argv[3]], stdout=subprocess.DEVNULL, with_children=True)
print(process.pid, flush=True)
print(process.wait(), flush=True)
"""


@pytest.fixture
def starter(tmp_path: Path) -> subprocess.Popen[str]:
    """A process that has such a child."""
    argv = [sys.executable, "-c", STARTER, str(ROOT), PROGRAM, str(tmp_path / "pids")]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def family(starter: subprocess.Popen[str], folder: Path) -> list[int]:
    """The keeper, the program and its child."""
    assert starter.stdout is not None
    keeper = int(starter.stdout.readline())
    wait_until((folder / "pids").exists, description="the program to run")
    return [keeper, *map(int, (folder / "pids").read_text().split())]


def test_all_of_it_dies_with_its_starter(starter: subprocess.Popen[str], tmp_path: Path) -> None:
    """Also what the child has started, which nobody else knows."""
    pids = family(starter, tmp_path)
    assert all(map(is_running, pids))
    starter.kill()
    starter.communicate()
    wait_until(lambda: not any(map(is_running, pids)), description="all three to be gone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 7), (signal.SIGKILL, 128 + 9)])
def test_it_exits_as_its_program_does(
    starter: subprocess.Popen[str], tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """A signal to the whole group is the program's to answer; what is left of the group can still be killed."""
    keeper, program, child = family(starter, tmp_path)
    if number is signal.SIGTERM:
        os.killpg(keeper, number)
    else:
        os.kill(program, number)
    assert starter.communicate()[0].strip() == str(code)
    assert is_running(child)
    os.killpg(keeper, signal.SIGKILL)
    wait_until(lambda: not is_running(child), description="the group to be gone")
