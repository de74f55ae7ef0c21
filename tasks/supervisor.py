"""Child processes under one parent: start in stages, restart, stop in the opposite order, leave nothing.

| event | what happens |
|---|---|
| a child ends | its process group is killed; it starts again after 0.5 s, 1 s, 2 s, ... (30 s at most), always |
| a vital one never served, and ended within 30 s of its start five times in a row | its last lines, all stop, code 1 |
| one is retired | SIGTERM, SIGKILL after its grace; the others go on |
| SIGINT, SIGTERM, SIGHUP | stages stop last to first: SIGTERM, SIGKILL after the child's grace; exit code 0 |
| the same again | SIGKILL to what is left, after the hurry signal where a child has one |
| the supervisor is killed | the kernel kills the children (`pool.store.leash`) |

A child that never served is broken or wrongly configured, and whoever started it should be told. One that did serve is
ended by what it is given to do, or by the machine: neither is a reason to take down the others. Nor is one that is not
vital, because it came while others served: it is told of, and tried again for as long as it is wanted.

Every child leads its own process group, so a terminal's Ctrl-C reaches the supervisor alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO, TextIO

from pool.store import leash

TURN_S = 0.05
TAIL_LINES = 20
LINE_BYTES = 64 * 1024
#: How long a child that was told to hurry may take.
HURRY_S = 3.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_COLOURS = ("36", "33", "32", "35", "34", "31")


@dataclass(frozen=True, slots=True)
class Child:
    """What to run. `env` is added to this process's own; `ready` (None: at once) says whether it serves; `served`
    (None: it did once it was ready or lived long) tells of a process that has ended, by its id, whether it ever served;
    `stop_grace_s` lies between `stop_signal` and SIGKILL; output is appended to `log_path` instead of the supervisor's
    own, where given. A second request to stop sends `hurry_signal`, if there is one, says `hurry_note`, and kills
    HURRY_S later. `parting` is called before it is told to stop; what it returns is called when the child has ended,
    and may return a line to print. `vital`: whether all others stop where it never serves."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    ready: Callable[[], bool] | None = None
    served: Callable[[int], bool] | None = None
    stop_signal: signal.Signals = signal.SIGTERM
    stop_grace_s: float = 10.0
    log_path: Path | None = None
    pass_fds: tuple[int, ...] = ()
    hurry_signal: signal.Signals | None = None
    hurry_note: str = ""
    parting: Callable[[], Callable[[], str]] | None = None
    vital: bool = True


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Delays double from `first_delay_s` to `longest_delay_s`; an end within `fast_s` of the start is a fast one, and
    `give_up_after` of them in a row are the last of a child that never served."""

    first_delay_s: float = 0.5
    longest_delay_s: float = 30.0
    fast_s: float = 30.0
    give_up_after: int = 5

    def delay_s(self, fast_deaths: int) -> float:
        """The wait before the next start, after `fast_deaths` fast ends in a row."""
        return min(self.first_delay_s * 2.0 ** max(0, fast_deaths - 1), self.longest_delay_s)


class Output:
    """One stream for the lines of all children, each behind its child's name."""

    def __init__(self, stream: TextIO, names: Iterable[str], *, colour: bool) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        names = list(names)
        self._colour = colour
        self._width = max(map(len, names), default=0)
        self._prefixes: dict[str, str] = {}
        for name in names:
            self.add(name)

    def add(self, name: str) -> None:
        """Know one more name."""
        if name in self._prefixes:
            return
        prefix = f"{name:<{self._width}} | "
        if self._colour:
            prefix = f"\x1b[{_COLOURS[len(self._prefixes) % len(_COLOURS)]}m{prefix}\x1b[0m"
        self._prefixes[name] = prefix

    def line(self, text: str, name: str = "") -> None:
        """Print one line. A stream that is gone (a closed pipe) swallows it: children must go on."""
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(f"{self._prefixes.get(name, '')}{text}\n")
            self._stream.flush()


class _Life:
    """One child: its current process, its record of deaths, its last lines."""

    def __init__(self, child: Child, output: Output) -> None:
        self.child = child
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.fast_deaths = 0
        #: Whether it has ever served, in whichever of its processes.
        self.proven = False
        self.restart_at: float | None = None
        #: When it is killed, of one that was told to leave while others go on.
        self.kill_at: float | None = None
        self.started_at = 0.0
        self.process: subprocess.Popen[bytes] | None = None
        self._output = output
        self._pump: threading.Thread | None = None

    def start(self) -> None:
        self.restart_at, self.started_at = None, time.monotonic()
        env = {**os.environ, "PYTHONUNBUFFERED": "1", **self.child.env}
        if self.child.log_path is not None:
            with leash.open_private_log(self.child.log_path) as log:
                self.process = leash.spawn(
                    self.child.argv, stdout=log, env=env, pass_fds=self.child.pass_fds, private_files=True
                )
            return
        self.process = leash.spawn(self.child.argv, stdout=subprocess.PIPE, env=env, pass_fds=self.child.pass_fds)
        assert self.process.stdout is not None  # it was asked for
        self._pump = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._pump.start()

    def _read(self, pipe: BinaryIO) -> None:
        with pipe:
            while raw := pipe.readline(LINE_BYTES):
                line = raw.decode(errors="replace").rstrip("\r\n")
                self.tail.append(line)
                self._output.line(line, self.child.name)

    def ended(self) -> bool:
        """Whether the process has ended. Its id stays reserved (it is not reaped), so `reap` cannot hit another."""
        if self.process is None:
            return True
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: reaped at once, with a hair of that risk
            return self.process.poll() is not None
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def is_up(self) -> bool:
        """Whether a process runs now."""
        return self.restart_at is None and not self.ended()

    def signal(self, number: signal.Signals, *, group: bool = False) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                (os.killpg if group else os.kill)(self.process.pid, number)

    def reap(self) -> tuple[int, int]:
        """End what is left of the group of an ended process; its id and its exit code."""
        assert self.process is not None  # only a started child can be reaped
        self.signal(signal.SIGKILL, group=True)
        pid, code = self.process.pid, self.process.wait()
        self.process = None
        if self._pump is not None:
            self._pump.join(timeout=5)
            self._pump = None
        return pid, code

    def last_lines(self) -> list[str]:
        """The newest output, at most 20 lines."""
        if self.child.log_path is None:
            return list(self.tail)
        try:
            return self.child.log_path.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        except OSError:
            return []


class Supervisor:
    """Runs `stages` of children: a stage starts once all of the stage before are ready.

    `run` serves a whole process; `start`, `turn` and `stop` are its parts, for callers with a loop of their own. All
    of them belong to one thread.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Child]],
        *,
        stream: TextIO | None = None,
        colour: bool | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        stream = stream or sys.stdout
        names = [child.name for stage in stages for child in stage]
        if len(set(names)) != len(names):
            raise ValueError(f"children need names of their own: {names}")
        self.output = Output(stream, names, colour=stream.isatty() if colour is None else colour)
        self.failure: str | None = None
        self._policy = policy or RestartPolicy()
        #: Those of `_started` are the same lists.
        self._stages = [[_Life(child, self.output) for child in stage] for stage in stages]
        self._started: list[list[_Life]] = []
        self._signals = 0

    def pid(self, name: str) -> int | None:
        """The child's current process id; None while it is down."""
        for life in self._all():
            if life.child.name == name and life.process is not None and not life.ended():
                return life.process.pid
        return None

    @property
    def is_stopping(self) -> bool:
        """Whether it was told to stop, or has given up: children end now because they shall. For any thread."""
        return bool(self._signals) or self.failure is not None

    def names(self) -> list[str]:
        """All children there are, those included that were told to leave and have not ended."""
        return [life.child.name for life in self._all()]

    def add(self, child: Child, stage: int) -> None:
        """Start one more child, which stops with this stage. Raises ValueError for a name that is there."""
        if child.name in self.names():
            raise ValueError(f"children need names of their own: {child.name}")
        self.output.add(child.name)
        life = _Life(child, self.output)
        self._stages[stage].append(life)
        self._begin(life)

    def retire(self, name: str) -> None:
        """Stop one child for good; `turn` sees to its end. Nothing happens where it leaves already."""
        for life in (life for life in self._all() if life.child.name == name and life.kill_at is None):
            life.kill_at = time.monotonic() + life.child.stop_grace_s
            life.restart_at = None
            life.signal(life.child.stop_signal)
            self.output.line(f"{name} is told to end: mostly seconds, at most {life.child.stop_grace_s:g} s")

    def run(self, on_ready: Callable[[], None] = lambda: None, *, each_turn: Callable[[], None] = lambda: None) -> int:
        """Start everything, serve until a signal or a child that keeps dying, stop everything; the exit code.
        `each_turn` is called now and then, from when all are ready: it may add and retire children."""
        with self.heeding_signals():
            try:
                if self.start():
                    on_ready()
                while self.turn():
                    each_turn()
                    time.sleep(TURN_S)
            finally:
                self._announce_stop()
                self.stop()
                self.output.line("stopped")
        return 0 if self.failure is None else 1

    @contextmanager
    def heeding_signals(self) -> Iterator[None]:
        """Within the block SIGINT, SIGTERM and SIGHUP are requests to stop. For the main thread."""
        previous = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def start(self) -> bool:
        """Start all stages; True once all children are ready, False when stopped or given up before."""
        for stage in self._stages:
            self._started.append(stage)
            for life in stage:
                life.start()
            while not all(life.child.ready is None or life.child.ready() for life in stage):
                if not self.turn():
                    return False
                time.sleep(TURN_S)
            for life in stage:
                life.proven |= life.child.ready is not None
        return True

    def turn(self) -> bool:
        """Look after the children once. False: it is time to `stop` (`failure` says why, if not by a signal)."""
        if self.is_stopping:
            return False
        now = time.monotonic()
        for life in [life for stage in self._started for life in stage]:
            if life.kill_at is not None:
                self._see_off(life, now)
            elif life.restart_at is not None:
                if now >= life.restart_at:
                    self._begin(life)
            elif life.ended():
                self._after_death(life, now)
        return self.failure is None

    def stop(self) -> None:
        """Stop the stages in reverse order and leave no process behind. Idempotent."""
        while self._started:
            self._stop_stage(self._started[-1])
            self._started.pop()

    def request_stop(self) -> None:
        """What a signal does: the next `turn` is False; a second request makes `stop` kill."""
        self._signals += 1

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.request_stop()

    def _announce_stop(self) -> None:
        """One line when stopping begins: what stops, in which order, and how long that may take."""
        stages = [[life for life in stage if life.is_up()] for stage in reversed(self._started)]
        stages = [stage for stage in stages if stage]
        if stages:
            names = ", then ".join(" and ".join(life.child.name for life in stage) for stage in stages)
            longest_s = sum(max(life.child.stop_grace_s for life in stage) for stage in stages)
            self.output.line(f"stopping: {names}; mostly seconds, at most {longest_s:g} s; a second signal hurries")

    def _begin(self, life: _Life) -> None:
        """Start one beside others. Where the system has no room for a process that is not vital, it is tried later."""
        try:
            life.start()
        except OSError as error:
            if life.child.vital:
                raise
            life.restart_at = time.monotonic() + self._policy.longest_delay_s
            self.output.line(f"{life.child.name} cannot be started ({error.strerror}); it is tried again later")

    def _see_off(self, life: _Life, now: float) -> None:
        """One that was told to leave: kill it when its grace is over, forget it when it has ended."""
        assert life.kill_at is not None
        if life.ended():
            if life.process is not None:
                life.reap()
            for stage in self._stages:
                if life in stage:
                    stage.remove(life)
            self.output.line(f"{life.child.name} has ended")
        elif now >= life.kill_at:
            life.signal(signal.SIGKILL, group=True)

    def _after_death(self, life: _Life, now: float) -> None:
        pid, code = life.reap()
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        is_fast = now - life.started_at < self._policy.fast_s
        life.fast_deaths = life.fast_deaths + 1 if is_fast else 0
        if not life.proven:
            life.proven = not is_fast or (life.child.served is not None and life.child.served(pid))
        if life.fast_deaths >= self._policy.give_up_after and not life.proven and life.child.vital:
            self._give_up(life, how)
            return
        delay_s = self._policy.delay_s(life.fast_deaths)
        life.restart_at = now + delay_s
        often = f", {life.fast_deaths} times in a row" if life.fast_deaths > 1 else ""
        self.output.line(f"{life.child.name} ended with {how}{often}; starting it again in {delay_s:g} s")

    def _give_up(self, life: _Life, how: str) -> None:
        self.failure = f"{life.child.name} ended {life.fast_deaths} times in a row, the last time with {how}."
        self.output.line(f"{self.failure} Its last lines:")
        for line in life.last_lines():
            self.output.line(f"    {line}")

    def _stop_stage(self, stage: list[_Life]) -> None:
        running = [life for life in stage if life.is_up()]
        farewells = [life.child.parting() for life in running if life.child.parting is not None]
        for life in (life for life in running if life.kill_at is None):
            life.signal(life.child.stop_signal)
        began = time.monotonic()
        hurried: float | None = None
        while running:
            running = [life for life in running if not life.ended()]
            if self._signals > 1 and hurried is None:
                hurried = time.monotonic()
                for life in running:
                    self._hurry(life)
            for life in running:
                patience_s = HURRY_S if life.child.hurry_signal is not None else 0.0
                impatient = hurried is not None and time.monotonic() - hurried >= patience_s
                if impatient or time.monotonic() - began > life.child.stop_grace_s:
                    life.signal(signal.SIGKILL, group=True)
            if running:
                time.sleep(TURN_S)
        for life in stage:
            if life.process is not None:
                life.reap()
        for line in (farewell() for farewell in farewells):
            if line:
                self.output.line(line)

    def _hurry(self, life: _Life) -> None:
        if life.child.hurry_signal is None:
            return
        life.signal(life.child.hurry_signal)
        if life.child.hurry_note:
            self.output.line(f"{life.child.name}: {life.child.hurry_note}")

    def _all(self) -> Iterable[_Life]:
        return (life for stage in self._stages for life in stage)
