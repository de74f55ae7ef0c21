"""`genpool api`, and the health checks of containers, on a state server whose password is in a file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pool.store.server import StateServer
from tests.integration.celery_process import ROOT
from tests.processes import free_port
from tests.waiting import wait_until

PASSWORD = "a word: with/signs@"


@pytest.fixture
def env(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of processes on a state server that wants a password."""
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    port = free_port()
    config = tmp_path / "genpool.toml"
    config.write_text(
        f"[server]\nport = {free_port()}\n[state]\n"
        f"url = {json.dumps(f'redis://127.0.0.1:{port}/0')}\npassword_file = {json.dumps(str(tmp_path / 'password'))}\n"
        "[models.smollm2-135m-instruct]\nenabled = false\n[models.tiny]\nsource = 'random:1'\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GENPOOL_", "PROM"))}
    state = tmp_path / "state"
    # The starter of the server knows no password, so it cannot wait for it; the processes do.
    server = StateServer(state, port=port, extra_args=("--requirepass", PASSWORD))
    server.acquire()
    process = subprocess.Popen(server.argv(), stdout=subprocess.DEVNULL, pass_fds=server.pass_fds)
    yield kept | {"GENPOOL_CONFIG": str(config), "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    process.terminate()
    process.wait(20)
    server.release()


def health(env: dict[str, str], what: str) -> int:
    """The exit code of a health check."""
    command = [sys.executable, "-m", "tasks.health", what]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, check=False, timeout=110).returncode


@pytest.mark.parametrize("what", ["api", "worker"])
def test_a_process_is_well_while_it_runs(env: dict[str, str], what: str) -> None:
    """Not before it serves, then well, and not after it has ended, which a SIGTERM makes it do with exit code 0."""
    assert health(env, what) == 1
    arguments = ["api"] if what == "api" else ["worker", "tiny"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "genpool.py"), *arguments], cwd=env["TMPDIR"], env=env, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: health(env, what) == 0, description=f"a healthy {what}", timeout_s=90)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert health(env, what) == 1


def test_an_api_without_keys_stays_on_this_machine(env: dict[str, str]) -> None:
    """As a container's does, when nobody has given it any."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "genpool.py"), "api"],
        cwd=env["TMPDIR"],
        env=env | {"GENPOOL_SERVER__HOST": "0.0.0.0"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 1
    assert "0.0.0.0" in ended.stderr and "Traceback" not in ended.stderr
