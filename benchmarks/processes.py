"""The processes of a benchmark: workers that can be held and let go, and clients that are told what to do."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pool.store.server import StateServer

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
START_S = 60.0
STOP_S = 10.0

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run: its arguments, folder and further environment variables."""

    argv: Sequence[str]
    folder: Path = ROOT
    variables: Mapping[str, str] | None = None

    def start(self, log: Path, *, piped: bool = False) -> subprocess.Popen[bytes]:
        """Start it in a process group of its own, its output (without stdout, when `piped`) going to `log`."""
        with log.open("ab") as file:
            return subprocess.Popen(
                self.argv,
                cwd=self.folder,
                env=_environment() | dict(self.variables or {}),
                stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
                stdout=subprocess.PIPE if piped else file,
                stderr=file,
                bufsize=0,
                start_new_session=True,
            )


def module(name: str, *arguments: str, variables: Mapping[str, str] | None = None) -> Command:
    """One of our own modules, in this environment."""
    return Command([sys.executable, "-m", name, *arguments], variables=variables)


def peer(argv: Sequence[str], variables: Mapping[str, str] | None = None) -> Command:
    """A module of `peers/`, in an environment that does not know genpool; `argv` names its program."""
    return Command(argv, folder=PEERS, variables={"PYTHONPATH": str(ROOT), **(variables or {})})


class Worker:
    """A worker with all its processes."""

    def __init__(self, command: Command, log: Path) -> None:
        self._process = command.start(log)
        self._log = log

    @property
    def pid(self) -> int:
        """Of the process that was started; it leads the group of all others."""
        return self._process.pid

    def check(self) -> None:
        """Raises RuntimeError, with its last words, when it has ended."""
        if self._process.poll() is not None:
            raise RuntimeError(f"a worker ended (exit code {self._process.returncode}):\n{tail(self._log)}")

    def hold(self) -> None:
        """Freeze it as it is: it goes on waiting for work, and takes none."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def go(self) -> None:
        """Let it run again."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU seconds that its living processes have used; 0 where there is no /proc."""
        total = 0
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = stat.read_text().rpartition(")")[2].split()
                if int(fields[2]) == self._process.pid:
                    total += int(fields[11]) + int(fields[12])
        return total / _TICKS_PER_S

    def stop(self) -> None:
        """End it: SIGTERM, then SIGKILL for whatever is left of its group."""
        with suppress(ProcessLookupError):
            self.go()
            os.killpg(self._process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class Dialogue:
    """A child that answers each line `WORD NUMBER` with one line of JSON (`benchmarks.peers.dialogue`)."""

    def __init__(self, command: Command, log: Path) -> None:
        self._log = log
        self._process = command.start(log, piped=True)

    def ask(self, word: str, number: int = 0, *, timeout_s: float = 300) -> Any:
        """Say it, and return the answer."""
        self.say(word, number)
        return self.answer(timeout_s=timeout_s)

    def say(self, word: str, number: int = 0) -> None:
        """Say it; `answer` follows."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {number}\n".encode())

    def answer(self, *, timeout_s: float = 300) -> Any:
        """The answer to what was said. Raises RuntimeError when the child has ended, TimeoutError when it is silent."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            raise TimeoutError(f"a benchmark's client was silent for {timeout_s:g} s:\n{tail(self._log)}")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a benchmark's client ended:\n{tail(self._log)}")
        return json.loads(line)

    def stop(self) -> None:
        """Close its input, which ends it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


@contextmanager
def state_server(folder: Path) -> Iterator[StateServer]:
    """A fresh state server with the settings of the embedded one. Its log is not rewritten in the middle of a run."""
    with StateServer(folder / "state", loglevel="warning", extra_args=("--auto-aof-rewrite-percentage", "0")) as server:
        yield server


def wait_for(predicate: Callable[[], bool], *, what: str, timeout_s: float, every_s: float = 0.003) -> None:
    """Poll until it holds. Raises TimeoutError naming `what`."""
    deadline_s = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"waited {timeout_s:g} s for {what}")
        time.sleep(every_s)


def free_port() -> int:
    """A port of this machine that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _environment() -> dict[str, str]:
    """This process's variables without those that configure genpool."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GENPOOL_")}
