"""The supervisor with real child processes: order, restarts, giving up, signals, and nothing left behind."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pool.store import leash
from tasks.supervisor import Child, RestartPolicy, Supervisor
from tests.processes import is_running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
QUICK = RestartPolicy(first_delay_s=0.01, longest_delay_s=0.02, fast_s=60, give_up_after=5)

#: A child that writes its pid to a file, notes SIGTERM in another, and then leaves unless it is stubborn.
SERVICE = """
import os, signal, sys, time
name, folder, stubborn = sys.argv[1], sys.argv[2], sys.argv[3:] == ["stubborn"]
def on_term(*_):
    with open(f"{folder}/stopped", "a") as file:
        file.write(name + "\\n")
    if not stubborn:
        sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
with open(f"{folder}/{name}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(f"{folder}/{name}.part", f"{folder}/{name}.pid")
print("serving", name)
while True:
    time.sleep(0.05)
"""


def service(folder: Path, name: str, *mode: str, grace_s: float = 10.0) -> Child:
    """A well-behaved child, ready once its pid file is there."""
    return Child(
        name=name,
        argv=[sys.executable, "-c", SERVICE, name, str(folder), *mode],
        ready=(folder / f"{name}.pid").exists,
        stop_grace_s=grace_s,
    )


def dying(name: str, last_words: str = "", log_path: Path | None = None) -> Child:
    """A child that ends at once with exit code 3."""
    argv = [sys.executable, "-c", f"print({last_words!r}); raise SystemExit(3)"]
    return Child(name=name, argv=argv, log_path=log_path)


def pid_of(folder: Path, name: str) -> int:
    """The pid the child wrote, once it has."""
    path = folder / f"{name}.pid"
    return int(wait_until(lambda: path.exists() and path.read_text(), description=f"{name} to write its pid"))


def stopped(folder: Path) -> list[str]:
    """Names of the children that got SIGTERM, in order."""
    path = folder / "stopped"
    return path.read_text().split() if path.exists() else []


def turn_until(supervisor: Supervisor, predicate: Callable[[], bool], description: str) -> None:
    """Keep the supervisor going until something holds."""

    def turned() -> bool:
        supervisor.turn()
        return predicate()

    wait_until(turned, description=description)


@pytest.fixture
def output() -> io.StringIO:
    """What the supervisor prints."""
    return io.StringIO()


def test_a_stage_starts_when_the_one_before_is_ready_and_stops_before_it(tmp_path: Path, output: io.StringIO) -> None:
    """Stages start in order and stop in the opposite order."""
    stages = [[service(tmp_path, "first")], [service(tmp_path, "second"), service(tmp_path, "third")]]
    supervisor = Supervisor(stages, stream=output, policy=QUICK)
    try:
        assert supervisor.start()
        pids = [pid_of(tmp_path, name) for name in ("first", "second", "third")]
        first, second = (tmp_path / "first.pid").stat(), (tmp_path / "second.pid").stat()
        assert first.st_mtime_ns < second.st_mtime_ns
    finally:
        supervisor.stop()
    assert sorted(stopped(tmp_path)[:2]) == ["second", "third"]
    assert stopped(tmp_path)[2:] == ["first"]
    assert not any(map(is_running, pids))


def test_the_next_stage_waits_for_readiness(tmp_path: Path, output: io.StringIO) -> None:
    """A stage that never becomes ready keeps the next one from starting."""
    waiting = Child(name="waiting", argv=service(tmp_path, "waiting").argv, ready=lambda: False)
    supervisor = Supervisor([[waiting], [service(tmp_path, "next")]], stream=output, policy=QUICK)
    threading.Timer(0.5, supervisor.request_stop).start()
    try:
        assert not supervisor.start()
    finally:
        supervisor.stop()
    assert not (tmp_path / "next.pid").exists()


def test_a_killed_child_starts_again(tmp_path: Path, output: io.StringIO) -> None:
    """A child that dies is started again, and the death is reported."""
    supervisor = Supervisor([[service(tmp_path, "api")]], stream=output, policy=QUICK)
    try:
        assert supervisor.start()
        before = pid_of(tmp_path, "api")
        os.kill(before, signal.SIGKILL)
        turn_until(supervisor, lambda: pid_of(tmp_path, "api") != before, "a new process")
        assert supervisor.pid("api") == pid_of(tmp_path, "api")
        assert "api ended with signal 9; starting it again" in output.getvalue()
    finally:
        supervisor.stop()


def test_five_fast_deaths_end_everything_with_the_last_lines(tmp_path: Path, output: io.StringIO) -> None:
    """A child that keeps dying is named with its last output, all others stop, and the exit code is not 0."""
    supervisor = Supervisor(
        [[service(tmp_path, "state")], [dying("worker", "no such model file")]], stream=output, policy=QUICK
    )
    assert supervisor.run() == 1
    assert supervisor.failure == "worker ended 5 times in a row, the last time with exit code 3."
    assert output.getvalue().count("worker | no such model file") == 5
    assert "Its last lines:\n" + "    no such model file\n" * 5 in output.getvalue()
    assert output.getvalue().endswith(
        "stopping: state; mostly seconds, at most 10 s; a second signal hurries\nstopped\n"
    )
    assert stopped(tmp_path) == ["state"]
    assert not is_running(pid_of(tmp_path, "state"))


#: A child that serves for a moment and dies, over and over.
SHORT_LIVED = """
import sys
open(f"{sys.argv[1]}/served", "w").close()
raise SystemExit(3)
"""


def test_a_child_that_has_served_is_started_again_for_ever(tmp_path: Path, output: io.StringIO) -> None:
    """What kills it is what it is given to do: the others go on, and each restart is one line."""
    served = tmp_path / "served"
    worker = Child(name="worker", argv=[sys.executable, "-c", SHORT_LIVED, str(tmp_path)], ready=served.exists)
    supervisor = Supervisor([[service(tmp_path, "api")], [worker]], stream=output, policy=QUICK)
    try:
        assert supervisor.start()
        turn_until(supervisor, lambda: "worker ended with exit code 3, 8 times in a row" in output.getvalue(), "8 ends")
        assert supervisor.failure is None
        assert supervisor.pid("api") == pid_of(tmp_path, "api")
        assert "worker ended with exit code 3; starting it again in 0.01 s\n" in output.getvalue()
        assert "worker ended with exit code 3, 8 times in a row; starting it again in 0.02 s\n" in output.getvalue()
    finally:
        supervisor.stop()


@pytest.mark.parametrize("has_served", [True, False])
def test_whether_a_process_served_may_be_told_after_its_end(output: io.StringIO, has_served: bool) -> None:
    """By its id: it may have served too shortly to be seen ready."""
    asked: list[int] = []

    def served(pid: int) -> bool:
        asked.append(pid)
        return has_served and len(asked) == 3

    worker = Child(name="worker", argv=[sys.executable, "-c", "raise SystemExit(3)"], served=served)
    supervisor = Supervisor([[worker]], stream=output, policy=QUICK)
    try:
        supervisor.start()
        turn_until(
            supervisor,
            lambda: supervisor.failure is not None or "8 times in a row" in output.getvalue(),
            "8 ends or an end of all",
        )
        assert (supervisor.failure is None) == has_served
        # Once it is known to have served, nobody is asked again.
        assert len(set(asked)) == len(asked) == (3 if has_served else 5)
    finally:
        supervisor.stop()


def test_a_child_that_lived_long_enough_starts_with_a_clean_record(output: io.StringIO) -> None:
    """Only ends soon after the start count towards giving up."""
    policy = RestartPolicy(first_delay_s=0.01, fast_s=0.0, give_up_after=2)
    supervisor = Supervisor([[dying("worker")]], stream=output, policy=policy)
    try:
        supervisor.start()
        turn_until(supervisor, lambda: output.getvalue().count("starting it again") >= 4, "four restarts")
        assert supervisor.failure is None
    finally:
        supervisor.stop()


def test_restart_delays_double_up_to_a_limit() -> None:
    """0.5 s, 1 s, 2 s, ... 30 s."""
    policy = RestartPolicy()
    assert [policy.delay_s(deaths) for deaths in (1, 2, 3, 4, 20)] == [0.5, 1.0, 2.0, 4.0, 30.0]


def test_what_a_dead_child_left_running_is_killed(tmp_path: Path, output: io.StringIO) -> None:
    """Grandchildren do not survive the child's death: the next one may need their port."""
    code = f"""
import subprocess, sys, os, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open({str(tmp_path / "part")!r}, "w") as file:
    file.write(str(grandchild.pid))
os.rename({str(tmp_path / "part")!r}, {str(tmp_path / "grandchild.pid")!r})
time.sleep(600)
"""
    supervisor = Supervisor(
        [[Child(name="api", argv=[sys.executable, "-c", code])]],
        stream=output,
        policy=RestartPolicy(first_delay_s=600, longest_delay_s=600),
    )
    try:
        supervisor.start()
        grandchild, child = pid_of(tmp_path, "grandchild"), supervisor.pid("api")
        assert child is not None
        assert is_running(grandchild)
        os.kill(child, signal.SIGKILL)
        turn_until(supervisor, lambda: not is_running(grandchild), "the grandchild to go")
    finally:
        supervisor.stop()


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace(tmp_path: Path, output: io.StringIO) -> None:
    """Stopping never hangs on a stubborn child."""
    supervisor = Supervisor([[service(tmp_path, "worker", "stubborn", grace_s=0.1)]], stream=output, policy=QUICK)
    assert supervisor.start()
    supervisor.stop()
    assert stopped(tmp_path) == ["worker"]
    assert not is_running(pid_of(tmp_path, "worker"))


def test_output_can_go_to_a_file_and_is_still_quoted_on_failure(tmp_path: Path, output: io.StringIO) -> None:
    """A quiet child writes to its log; giving up shows the log's end."""
    log = tmp_path / "worker.log"
    supervisor = Supervisor([[dying("worker", "broken", log_path=log)]], stream=output, policy=QUICK)
    assert supervisor.run() == 1
    assert log.read_text() == "broken\n" * 5
    assert "worker | broken" not in output.getvalue()
    assert "    broken\n" in output.getvalue()


def test_a_child_may_be_stopped_by_another_signal(tmp_path: Path, output: io.StringIO) -> None:
    """Its own way to stop soon."""
    program = (
        "import pathlib, signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGQUIT, lambda *_: sys.exit(0))\n"
        "(pathlib.Path(sys.argv[1]) / 'up').touch()\n"
        "while True: signal.pause()\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path)]
    up = (tmp_path / "up").exists
    supervisor = Supervisor(
        [[Child(name="worker", argv=argv, ready=up, stop_signal=signal.SIGQUIT, stop_grace_s=600)]],
        stream=output,
        policy=QUICK,
    )
    assert supervisor.start()
    pid = supervisor.pid("worker")
    supervisor.stop()
    assert pid is not None
    assert not is_running(pid)


def test_a_second_request_hurries_a_child_that_can(tmp_path: Path, output: io.StringIO) -> None:
    """It gets its hurry signal, with a word about it, and ends by itself; a child that cannot hurry is killed at once.
    What is to be said at its end is asked for before it is told to stop, and said after."""
    told: list[bool] = []
    program = (
        "import pathlib, signal, sys\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "signal.signal(signal.SIGTERM, lambda *_: (folder / 'termed').touch())\n"
        "def hurried(*_):\n"
        "    (folder / 'hurried').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGQUIT, hurried)\n"
        "(folder / 'up').touch()\n"
        "while True: signal.pause()\n"
    )
    child = Child(
        name="slow",
        argv=[sys.executable, "-c", program, str(tmp_path)],
        ready=(tmp_path / "up").exists,
        stop_grace_s=600,
        hurry_signal=signal.SIGQUIT,
        hurry_note="nothing is lost",
        parting=lambda: (
            told.append((tmp_path / "termed").exists()) or (lambda: f"gone: {(tmp_path / 'hurried').exists()}")
        ),
    )
    supervisor = Supervisor([[child]], stream=output, policy=QUICK)
    assert supervisor.start()
    stopping = threading.Thread(target=supervisor.stop)
    supervisor.request_stop()
    stopping.start()
    wait_until((tmp_path / "termed").exists, description="the child to get SIGTERM")
    assert not (tmp_path / "hurried").exists()
    supervisor.request_stop()
    stopping.join(timeout=20)
    assert not stopping.is_alive()
    assert (tmp_path / "hurried").exists()
    assert told == [False]
    assert output.getvalue().endswith("slow: nothing is lost\ngone: True\n")


def test_lines_carry_the_childs_name_in_colour_on_a_terminal(output: io.StringIO) -> None:
    """Prefixes are aligned; each child has its colour."""
    children = [dying("api", "one"), dying("worker", "two")]
    Supervisor([children], stream=output, colour=True, policy=QUICK).run()
    assert "\x1b[36mapi    | \x1b[0mone\n" in output.getvalue()
    assert "\x1b[33mworker | \x1b[0mtwo\n" in output.getvalue()


def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    """The leash is tied to the process, not to whichever thread called `spawn`."""
    started: list[subprocess.Popen[bytes]] = []
    argv = [sys.executable, "-c", "print('up', flush=True); import time; time.sleep(600)"]
    thread = threading.Thread(target=lambda: started.append(leash.spawn(argv, stdout=subprocess.PIPE)))
    thread.start()
    thread.join()
    with started[0] as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert process.poll() is None
            assert os.getpgid(process.pid) == process.pid
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT], ids=lambda number: number.name)
def test_a_child_can_be_stopped_though_its_starter_ignores_the_signal(number: signal.Signals) -> None:
    """As it is under a shell's `&`: what the child has not yet a handler for has to end it."""
    code = (
        "import signal, subprocess, sys; from pool.store import leash\n"
        f"signal.signal({int(number)}, signal.SIG_IGN)\n"
        "child = leash.spawn(['sleep', '30'], stdout=subprocess.DEVNULL)\n"
        "import time, pathlib\n"
        "while pathlib.Path(f'/proc/{child.pid}/comm').read_text() != 'sleep\\n': time.sleep(0.01)\n"
        f"child.send_signal({int(number)}); print(child.wait(10))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert int(done.stdout) == -number


def test_a_program_that_does_not_exist_is_reported_by_name(output: io.StringIO) -> None:
    """The reason of a failed start is among the child's last lines."""
    supervisor = Supervisor([[Child(name="flower", argv=["/nonexistent/program"])]], stream=output, policy=QUICK)
    assert supervisor.run() == 1
    assert "cannot run /nonexistent/program: No such file or directory" in output.getvalue()


# --- the supervisor as a process of its own

DRIVER = """
import sys
from pathlib import Path
sys.path[:0] = [{root!r}]
from tests.integration.test_supervisor import service
from tasks.supervisor import Supervisor
folder = Path(sys.argv[1])
children = [service(folder, "state"), service(folder, "worker", *sys.argv[2:], grace_s=600)]
supervisor = Supervisor([[child] for child in children])
sys.exit(supervisor.run(on_ready=lambda: print("ready", flush=True)))
"""


def supervise(folder: Path, *mode: str) -> subprocess.Popen[str]:
    """A supervisor process with the children `state` and `worker`, once both are ready."""
    code = textwrap.dedent(DRIVER).format(root=str(ROOT))
    process = subprocess.Popen([sys.executable, "-c", code, str(folder), *mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "ready\n":
            return process
    raise AssertionError(f"the supervisor ended with {process.wait()} before it was ready")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_children_in_order(tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a closed terminal all end in an orderly stop with exit code 0."""
    with supervise(tmp_path) as process:
        process.send_signal(number)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out.count("stopping: worker, then state; mostly seconds, at most 610 s; a second signal hurries\n") == 1
    assert out.endswith("\nstopped\n")
    assert stopped(tmp_path) == ["worker", "state"]
    assert not is_running(pid_of(tmp_path, "worker"))
    assert not is_running(pid_of(tmp_path, "state"))


def test_a_second_interrupt_kills(tmp_path: Path) -> None:
    """Whoever presses Ctrl-C twice does not wait for a drain of ten minutes."""
    with supervise(tmp_path, "stubborn") as process:
        process.send_signal(signal.SIGINT)
        wait_until(lambda: stopped(tmp_path) == ["worker"], description="the worker to get SIGTERM")
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0
    assert not is_running(pid_of(tmp_path, "worker"))
    assert not is_running(pid_of(tmp_path, "state"))


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    """kill -9 of the supervisor leaves no process behind."""
    with supervise(tmp_path, "stubborn") as process:
        pids = [pid_of(tmp_path, name) for name in ("state", "worker")]
        assert all(map(is_running, pids))
        process.kill()
        process.wait()
        wait_until(lambda: not any(map(is_running, pids)), description="the children to die")


def test_children_come_and_go_beside_others(tmp_path: Path, output: io.StringIO) -> None:
    """One is added to a stage that was empty; one is retired, gets its time, and does not come back, though its name
    may; all that are left stop in order."""
    supervisor = Supervisor([[], [service(tmp_path, "api")]], stream=output, policy=QUICK)
    try:
        assert supervisor.start()
        api = pid_of(tmp_path, "api")
        supervisor.add(service(tmp_path, "one"), 0)
        supervisor.add(service(tmp_path, "two"), 0)
        with pytest.raises(ValueError, match="one"):
            supervisor.add(service(tmp_path, "one"), 0)
        one, two = pid_of(tmp_path, "one"), pid_of(tmp_path, "two")
        for _ in range(2):
            supervisor.retire("one")
        assert supervisor.names() == ["one", "two", "api"], "it may take its time"
        turn_until(supervisor, lambda: "one" not in supervisor.names(), "one to be gone")
        assert not is_running(one) and stopped(tmp_path) == ["one"]
        assert output.getvalue().count("one is told to end") == 1
        (tmp_path / "one.pid").unlink()
        supervisor.add(service(tmp_path, "one"), 0)
        again = pid_of(tmp_path, "one")
        assert (supervisor.pid("two"), supervisor.pid("api")) == (two, api)
    finally:
        supervisor.stop()
    assert stopped(tmp_path)[1] == "api" and sorted(stopped(tmp_path)[2:]) == ["one", "two"]
    assert not any(map(is_running, (api, two, again)))


def test_one_that_is_told_to_end_and_does_not_is_killed(tmp_path: Path, output: io.StringIO) -> None:
    """When its grace is over; nobody else is."""
    plan = [[service(tmp_path, "deaf", "stubborn", grace_s=0.2), service(tmp_path, "other")]]
    supervisor = Supervisor(plan, stream=output, policy=QUICK)
    try:
        assert supervisor.start()
        deaf, other = pid_of(tmp_path, "deaf"), pid_of(tmp_path, "other")
        supervisor.retire("deaf")
        turn_until(supervisor, lambda: supervisor.names() == ["other"], "it to be gone")
        assert not is_running(deaf) and supervisor.pid("other") == other
    finally:
        supervisor.stop()


def test_one_that_is_not_vital_ends_nobody_else(tmp_path: Path, output: io.StringIO) -> None:
    """However often it ends, or when the system does not start it (of so long a command line); it is tried again until
    it is retired."""
    supervisor = Supervisor([[service(tmp_path, "api")]], stream=output, policy=replace(QUICK, give_up_after=2))
    try:
        assert supervisor.start()
        supervisor.add(replace(dying("lame"), vital=False), 0)
        supervisor.add(Child(name="none", argv=[sys.executable, "-c", "#" * 2**20], vital=False), 0)
        turn_until(supervisor, lambda: "exit code 3, 4 times in a row" in output.getvalue(), "four ends")
        turn_until(supervisor, lambda: output.getvalue().count("none cannot be started") > 1, "a second try")
        for name in ("lame", "none"):
            supervisor.retire(name)
        turn_until(supervisor, lambda: supervisor.names() == ["api"], "both to be forgotten")
        assert supervisor.failure is None and supervisor.turn()
    finally:
        supervisor.stop()
