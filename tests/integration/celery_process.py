"""Real Celery workers as processes, for tests that look at them, stop them and kill them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from pool.store.connection import connect
from pool.store.ranks import RankRegistry
from tasks.config import Settings, load_configuration
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
#: What Celery calls a worker that got no name.
UNNAMED = f"celery@{socket.gethostname()}"


class Site:
    """One state server's settings, and the processes started on it."""

    def __init__(self, url: str, folder: Path, **worker: Any) -> None:
        self.folder = folder
        config = folder / "genpool.toml"
        lines = {"lease_seconds": 1.5, "renew_seconds": 0.4, "drain_grace_seconds": 10} | worker
        config.write_text(
            f'[state]\nurl = "{url}"\n[worker]\n'
            + "".join(f"{name} = {value}\n" for name, value in lines.items())
            + '[models.tiny]\nsource = "random:7"\ntarget_inflight = 8\nmax_active_sessions = 16\n'
            + '[models.other]\nsource = "random:8"\ntarget_inflight = 2\n'
        )
        self.env = {name: value for name, value in os.environ.items() if not name.startswith("GENPOOL_")}
        self.env |= {"GENPOOL_CONFIG": str(config), "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.settings: Settings = load_configuration(config, environ={}).settings
        self.url = url
        self._workers: list[Worker] = []

    def worker(self, *arguments: str, model: str = "tiny", wait: bool = True) -> Worker:
        """Start `celery -A tasks worker -Q MODEL ARGUMENTS`, and wait until one more rank serves the model."""
        before = len(self.ranks(model))
        worker = Worker(self, model, arguments, len(self._workers))
        self._workers.append(worker)
        if wait:
            wait_until(
                lambda: len(self.ranks(model)) > before or worker.process.poll() is not None,
                description=f"a worker for {model}",
                timeout_s=60,
            )
            assert worker.process.poll() is None, worker.output()
        return worker

    def ranks(self, model: str = "tiny") -> list[dict[str, Any]]:
        """Facts of the live ranks."""
        client = connect(self.url, max_connections=1)
        try:
            return [{"id": rank.id, "pid": rank.pid, **rank.facts} for rank in RankRegistry(client, model).live()]
        finally:
            client.connection_pool.disconnect()

    def celery(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `celery -A tasks ARGUMENTS` to its end."""
        return self._run("-m", "celery", "-A", "tasks", *arguments)

    def run_genpool(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `genpool ARGUMENTS` to its end."""
        return self._run(str(ROOT / "genpool.py"), *arguments)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def inspect(self, command: str) -> dict[str, Any]:
        """`celery inspect COMMAND`, by node; asked of the worker that was started without a name, and over when it has
        answered."""
        done = self.celery("inspect", "--timeout", "20", "--destination", UNNAMED, "--json", command)
        answers: dict[str, Any] = json.loads(done.stdout or "{}")
        return answers

    def close(self) -> None:
        """End what still runs."""
        for worker in self._workers:
            worker.end()


class Worker:
    """One Celery worker process; its output goes to a file."""

    def __init__(self, site: Site, model: str, arguments: tuple[str, ...], number: int) -> None:
        self._log = site.folder / f"worker-{number}.log"
        command = [sys.executable, "-m", "celery", "-A", "tasks", "worker", "-Q", model, "-l", "INFO"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--without-mingle", "--without-gossip", *arguments],
                cwd=ROOT,
                env=site.env,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def output(self) -> str:
        """Everything it has printed."""
        return self._log.read_text(errors="replace")

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 30) -> int:
        """Its exit code."""
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
