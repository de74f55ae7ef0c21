"""A model server as a child of this process: it dies with it, and so does whatever it has started.

Started without a shell, on a loopback port that was free, with a key made for this one start. What it prints is kept in
memory, the last lines, and shown only while it has never served: later it might hold prompts.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from pool.store.leash import spawn
from workers.backends.endpoint import LOOPBACK

log = logging.getLogger("genpool.upstream")

MAX_LINES = 40
MAX_LINE_CHARS = 400
#: How long it may take to end by itself; a model has to be freed soon after that.
STOP_S = 5.0

#: The command that serves on a port.
Command = Callable[[int], Sequence[str]]


class ServerProcess:
    """`key_variable`: in which environment variable the program expects its key."""

    def __init__(self, name: str, command: Command, key_variable: str, variables: Mapping[str, str]) -> None:
        self._name = name
        self._command = command
        self._key_variable = key_variable
        self._variables = dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._lock = threading.Lock()
        self._stopped = False
        self.port = 0
        self.key = ""
        self.starts = 0

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process group of it and its children, 0 before it was started."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """How it ended, None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, on another port, with another key. Nothing happens after `stop`."""
        with self._lock:
            if self._stopped:
                return
            self.port, self.key = _free_port(), secrets.token_urlsafe(24)
            self._lines.clear()
            env = {**os.environ, **self._variables, self._key_variable: self.key}
            self._process = spawn(self._command(self.port), stdout=subprocess.PIPE, env=env, with_children=True)
            self.starts += 1
        log.info("%s: started its server, process %d, port %d", self._name, self._process.pid, self.port)
        threading.Thread(target=self._read, args=(self._process,), name="genpool-upstream-log", daemon=True).start()

    def tail(self) -> str:
        """What it printed last."""
        return "\n".join(self._lines)

    def kill(self) -> None:
        """End it and its children now, and collect it."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """End it, politely at first; it cannot be started any more. Idempotent."""
        with self._lock:
            self._stopped = True
        if self.alive and self._process is not None:
            self._signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_S)
        self.kill()

    def _signal(self, number: signal.Signals) -> None:
        """To the whole group: some servers have children."""
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            while line := output.readline(4096):
                self._lines.append(line.decode("utf-8", "replace").rstrip()[:MAX_LINE_CHARS])


def _free_port() -> int:
    """A port nobody listens on now. Should somebody take it before the server does, the server ends, and is started
    again."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
