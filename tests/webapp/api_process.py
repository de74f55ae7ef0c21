"""gunicorn serving the real application, as a child process of the test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
from openai import OpenAI

from tests.processes import free_port
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]


class ApiProcess:
    """One node of the API. `settings` are GENPOOL_ variables without their prefix, `arguments` those of gunicorn."""

    def __init__(self, url: str, folder: Path, *arguments: str, **settings: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log_path = folder / "api.log"
        variables = {
            "STATE__URL": url,
            "SERVER__PORT": str(self.port),
            "SERVER__THREADS": "24",
            "SERVER__KEEPALIVE_SECONDS": "0.3",
            "MODELS__TINY__SOURCE": "random:1",
            "MODELS__SMOLLM2_135M_INSTRUCT__ENABLED": "false",
            **settings,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("GENPOOL_", "PROM"))}
        self._env = inherited | {f"GENPOOL_{name}": value for name, value in variables.items()}
        self._env |= {"PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
        self._folder = folder
        self._arguments = arguments
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> ApiProcess:
        """Start and wait until it answers."""
        argv = [sys.executable, "-m", "gunicorn", "-c", "python:webapp.gunicorn_conf", *self._arguments]
        argv.append("webapp.app:create_app()")
        with self._log_path.open("ab") as output:
            self.process = subprocess.Popen(argv, stdout=output, stderr=output, cwd=self._folder, env=self._env)
        wait_until(self._answers, description=f"the API at {self.base_url}", timeout_s=30)
        return self

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, self.log()
        try:
            return httpx.get(f"{self.base_url}/healthz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def log(self) -> str:
        """What it printed so far."""
        return self._log_path.read_text(errors="replace")

    def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        """End it and return its exit code."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(sign)
        return self.process.wait(timeout=30)

    def openai(self, **options: object) -> OpenAI:
        """The official client for this node; it resends nothing unless asked to."""
        return OpenAI(base_url=f"{self.base_url}/v1", api_key="unused", **{"max_retries": 0, "timeout": 20, **options})
