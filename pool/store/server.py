"""The embedded state server: a Valkey process of one folder, reached through a private unix socket.

Files of the folder: `appendonlydir/` (all state), `valkey.log`, `server.lock` (held by whoever runs the server, and by
the server itself), `valkey.sock`. The server runs on a leash (`pool.store.leash`): it ends with its starter.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import redis

from pool.errors import ConfigurationError, StateUnavailable
from pool.store import leash
from pool.store.connection import connect
from pool.store.log_sync import LogSync
from pool.store.server_binary import find_binary
from pool.store.torn_log import cut_torn_transaction

#: `sun_path` holds 108 bytes on Linux, 104 on macOS, a closing NUL included.
SOCKET_PATH_BYTES = 103
LOG_ROTATE_BYTES = 10 * 2**20
SILENCE_LIMIT_S = 30.0
LOCK_WAIT_S = 5.0


def socket_path(folder: Path) -> Path:
    """Where the folder's server listens: inside it, or, when that name is too long for a unix socket, in a directory of
    this user under the system's temporary one, named after a hash of the folder."""
    inside = folder.absolute() / "valkey.sock"
    if len(os.fsencode(inside)) <= SOCKET_PATH_BYTES:
        return inside
    digest = hashlib.sha256(os.fsencode(folder.absolute())).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"genpool-{os.getuid()}-{digest}" / "valkey.sock"


def socket_url(folder: Path) -> str:
    """The URL of the folder's server, in redis-py's form."""
    return f"unix://{socket_path(folder)}"


def answers(url: str, *, timeout_s: float = 1.0) -> bool:
    """Whether a server answers PING at `url`. False while it still loads its data."""
    try:
        return _ping(url, timeout_s)
    except redis.BusyLoadingError:
        return False


def _ping(url: str, timeout_s: float) -> bool:
    """True: ready; False: nobody there. Raises BusyLoadingError while the server loads its data."""
    client = connect(url, max_connections=1, read_timeout_s=timeout_s)
    try:
        return bool(client.ping())
    except redis.BusyLoadingError:
        raise
    except redis.RedisError:
        return False
    finally:
        client.close()


class StateServer:
    """One server process on `folder`. `port` None: unix socket only; else it listens on 127.0.0.1 at that port (0: a
    free one) without any password, which is meant for tests and tools on this machine.

    `appendfsync` "everysec": whoever holds the folder syncs once a second (`pool.store.log_sync`), not the server."""

    def __init__(
        self,
        folder: Path,
        *,
        appendfsync: Literal["everysec", "always"] = "everysec",
        loglevel: Literal["debug", "verbose", "notice", "warning"] = "notice",
        port: int | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        self.folder = folder.absolute()
        self.log_path = self.folder / "valkey.log"
        self._syncs_itself = appendfsync == "always"
        self._log_sync: LogSync | None = None
        self._loglevel = loglevel
        self._port = _free_port() if port == 0 else port
        self._extra_args = tuple(extra_args)
        self._lock_fd: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect, in redis-py's form."""
        return socket_url(self.folder) if self._port is None else f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """The running server's process id. Raises RuntimeError when it was not started."""
        if self._process is None:
            raise RuntimeError("the state server was not started")
        return self._process.pid

    def start(self) -> None:
        """Start the server and wait until it serves; returns at once when it already runs.

        Raises ConfigurationError (no binary, folder in use by another starter) or StateUnavailable (it ended, or says
        nothing for 30 s).
        """
        if self._process is not None and self._process.poll() is None:
            return
        self.acquire()
        try:
            with leash.open_private_log(self.log_path) as log:
                self._process = leash.spawn(self.argv(), stdout=log, pass_fds=self.pass_fds, private_files=True)
            self._wait_ready(self._process)
        except BaseException:
            self.stop()
            raise

    def stop(self, timeout_s: float = 10) -> None:
        """SIGTERM, SIGKILL after `timeout_s`; then socket and lock go. Safe to call at any time, also twice."""
        if self._process is not None:
            _end(self._process, timeout_s)
            self._process = None
        self.release()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # --- the parts a supervisor puts together itself

    def argv(self) -> list[str]:
        """The command line. Raises ConfigurationError when there is no server to run."""
        if self._port is None:
            listen = ["--port", "0", "--unixsocket", str(socket_path(self.folder)), "--unixsocketperm", "700"]
        else:
            listen = ["--port", str(self._port), "--bind", "127.0.0.1"]
        return [
            *(str(find_binary()), *listen, "--dir", str(self.folder), "--daemonize", "no"),
            *("--appendonly", "yes", "--appendfsync", "always" if self._syncs_itself else "no", "--save", ""),
            # A slow command would be kept with its arguments, and so a prompt that nothing else remembers any more.
            *("--slowlog-max-len", "0", "--maxmemory-policy", "noeviction", "--loglevel", self._loglevel),
            *self._extra_args,
        ]

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """The lock, inherited by the server: while an orphan of it lives, the folder stays taken."""
        return () if self._lock_fd is None else (self._lock_fd,)

    def acquire(self) -> None:
        """Make the folder, take its lock, put an old large log aside, cut a torn end off the data, see to its syncs.
        Idempotent.

        Raises ConfigurationError when somebody else holds the lock, or the folder cannot be used.
        """
        if self._lock_fd is not None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._port is None:
                _private_folder(socket_path(self.folder).parent, self.folder)
            self._lock_fd = _lock(self.folder, self.url)
            _rotate(self.log_path)
            cut_torn_transaction(self.folder)
            if not self._syncs_itself:
                self._log_sync = LogSync(self.folder)
                self._log_sync.start()
        except OSError as error:
            raise ConfigurationError(
                f"The state folder {self.folder} cannot be used: {error.strerror}", param="state.folder"
            ) from error

    def release(self) -> None:
        """Remove the socket and let go of the folder. Idempotent; only for a server that has ended."""
        if self._lock_fd is None:
            return
        if self._log_sync is not None:
            self._log_sync.stop()
            self._log_sync = None
        if self._port is None:
            path = socket_path(self.folder)
            path.unlink(missing_ok=True)
            if path.parent != self.folder:
                shutil.rmtree(path.parent, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = None

    def is_ready(self) -> bool:
        """Whether the server answers now."""
        return answers(self.url)

    def _wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        heard_at = time.monotonic()
        while True:
            try:
                if _ping(self.url, timeout_s=1.0):
                    return
            except redis.BusyLoadingError:
                heard_at = time.monotonic()  # a large append-only file takes as long as it takes
            if process.poll() is not None:
                raise StateUnavailable(
                    f"The state server ended at start (exit code {process.returncode}). {self._tail()}"
                )
            if time.monotonic() - heard_at > SILENCE_LIMIT_S:
                raise StateUnavailable(
                    f"The state server did not answer within {SILENCE_LIMIT_S:.0f} s. {self._tail()}"
                )
            time.sleep(0.01)

    def _tail(self) -> str:
        try:
            lines = self.log_path.read_text(errors="replace").strip().splitlines()[-5:]
        except OSError:
            lines = []
        return f"Last lines of {self.log_path}:\n" + "\n".join(lines)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _private_folder(path: Path, folder: Path) -> None:
    """Make the socket's own directory. Others can write beside it, so what is found there must be ours and closed."""
    if path == folder:
        return
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigurationError(
            f"{path} must be a directory that only this user can enter; it holds the state server's socket, because "
            f"{folder} is too long for one.",
            param="state.folder",
        )


def _lock(folder: Path, url: str) -> int:
    """The folder's lock, as a descriptor. A holder that no longer serves gets 5 s to end."""
    fd = os.open(folder / "server.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not answers(url) and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
            os.close(fd)
            raise ConfigurationError(
                f"The state folder {folder} is in use by another genpool (process {holder or 'unknown'}).",
                param="state.folder",
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        return fd


def _rotate(log: Path) -> None:
    """Keep one old log beside the current one."""
    if log.exists() and log.stat().st_size > LOG_ROTATE_BYTES:
        log.replace(log.with_name(f"{log.name}.1"))


def _end(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
