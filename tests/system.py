"""A whole genpool of real processes that a test may kill, stop, restart and cut off: state server, API nodes, workers.

Workers run the scripted engine for the model `scripted` and the real numpy engine for `tiny`. Every process leads a
group of its own, so a signal reaches its children too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from signal import Signals
from typing import Any

import httpx
import redis

from pool.store.audit import Audit, Violation
from pool.store.connection import Client, connect
from pool.store.ids import parse_ref
from pool.store.keys import ModelKeys
from pool.store.ranks import Rank, RankRegistry
from pool.store.records import JobRecord
from pool.store.server import StateServer
from tasks.client import Client as JobClient
from tasks.config import Settings, load_configuration
from tasks.payloads import GenerationRequest, Sampling, TextPrompt
from tests.processes import free_port, is_running
from tests.scripted.engine import BLOCK_TOKENS, CONTEXT
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
SCRIPTED, TINY = "scripted", "tiny"
READY_S = 60.0

#: Budgets that leave `target_inflight` alone to bound a model.
ROOMY = {"max_active_sessions": 1024, "scratch_budget_bytes": 2**30, "max_queue_depth": 1024}
#: Short times, so that a test sees leases end and grace pass.
SECTIONS: dict[str, dict[str, Any]] = {
    "server": {"threads": 64, "sync_wait_seconds": 20, "keepalive_seconds": 0.3, "orphan_grace_seconds": 10},
    "worker": {"lease_seconds": 3, "renew_seconds": 0.8, "drain_grace_seconds": 3, "stall_timeout_seconds": 20},
    "limits": {"pending_per_model": 200},
    "state": {},
}


class Part:
    """One process that can be started again and again; its output goes to one file."""

    def __init__(self, name: str, argv: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.name = name
        self.argv = list(argv)
        self.env = dict(env)
        self.log_path = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.paused = False

    def start(self) -> None:
        """Start it; does not wait until it is ready. Does nothing while it runs."""
        if self.alive:
            return
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.argv, cwd=ROOT, env=self.env, stdout=log, stderr=log, start_new_session=True
            )
        self.paused = False

    @property
    def alive(self) -> bool:
        """Whether the process runs (paused counts)."""
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    def signal(self, number: Signals) -> None:
        """To the process itself."""
        if self.alive:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, children included, and collect it."""
        if self.process is not None:
            self._signal_group(signal.SIGKILL)
            self.process.wait(10)

    def pause(self) -> None:
        """SIGSTOP, children included."""
        self._signal_group(signal.SIGSTOP)
        self.paused = True

    def resume(self) -> None:
        """SIGCONT, children included."""
        self._signal_group(signal.SIGCONT)
        self.paused = False

    def terminate(self, timeout_s: float = 30) -> int:
        """SIGTERM; its exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout_s)

    def wait(self, timeout_s: float = 30) -> int:
        """Its exit code, once it ends."""
        assert self.process is not None
        return self.process.wait(timeout_s)

    def output(self) -> str:
        """What it printed, over all its lives."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def end(self) -> None:
        """Make sure that nothing of it runs, paused or not."""
        if self.process is not None:
            self._signal_group(signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)

    def _signal_group(self, number: Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)


class System:
    """One state server, `apis` nodes and `workers` worker processes; nothing runs until `start` or a part's own.

    `sections` add to or replace SECTIONS, `models` entries of `[models.NAME]`, other names included. `binary` is the
    state server's program (None: as genpool finds it), `appendfsync` and `server_args` its options, `gunicorn` those of
    the nodes. `delay_ms` is the time of a scripted step, `context_tokens` what a scripted session holds, in blocks of
    `block_tokens`, `key` what the system's own client sends. `url`: a state server of the caller's; `api_ports`: where
    the first nodes listen. A model's inner tables are given by dotted names (`upstream.base_urls`).
    """

    def __init__(
        self,
        folder: Path,
        *,
        apis: int = 1,
        workers: int = 2,
        binary: Path | None = None,
        appendfsync: str = "everysec",
        server_args: Sequence[str] = (),
        gunicorn: Sequence[str] = (),
        sections: Mapping[str, Mapping[str, Any]] | None = None,
        models: Mapping[str, Mapping[str, Any]] | None = None,
        serves: str = SCRIPTED,
        delay_ms: float = 20,
        context_tokens: int = CONTEXT,
        block_tokens: int = BLOCK_TOKENS,
        key: str = "",
        url: str = "",
        api_ports: Sequence[int] = (),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port()
        self.url = url or f"redis://127.0.0.1:{self.port}/0"
        self.scripted_log = folder / "scripted.log"
        self.scripted_log.touch()
        #: While it is there, a load of the scripted model waits, or fails with what it says.
        self.scripted_load = folder / "scripted.load"
        self._serves = serves
        self._delay_ms = delay_ms
        self._scripted_env = {"SCRIPTED_CONTEXT": str(context_tokens), "SCRIPTED_BLOCK": str(block_tokens)}
        self._given_ports = list(api_ports)
        self._api_ports: dict[str, int] = {}
        given = sections or {}
        self._sections = {name: {**SECTIONS.get(name, {}), **given.get(name, {})} for name in (*SECTIONS, *given)}
        self._models = {
            SCRIPTED: {"source": "random:1", "target_inflight": 8, **ROOMY, **(models or {}).get(SCRIPTED, {})},
            TINY: {"source": "random:7", "target_inflight": 8, **ROOMY, **(models or {}).get(TINY, {})},
        }
        self._models |= {name: dict(fields) for name, fields in (models or {}).items() if name not in self._models}
        self.settings: Settings = load_configuration(self.config(self.url, "client"), environ={}).settings
        self.http = httpx.Client(timeout=30, headers={"Authorization": f"Bearer {key}"} if key else {})
        self.jobs = JobClient(self.settings)
        self.accepted: list[str] = []
        self.state = self._state_part(binary, appendfsync, server_args)
        self.apis = [self.api_part(number, "", *gunicorn) for number in range(apis)]
        self.workers = [self.worker_part(number) for number in range(workers)]

    # --- parts

    def config(self, url: str, name: str, **server: Any) -> Path:
        """Write a configuration that reaches the state server at `url` (a proxy's, perhaps)."""
        sections = {**self._sections, "state": {**self._sections["state"], "url": url}}
        sections["server"] = {**sections["server"], **server}
        lines: list[str] = []
        for section, values in sections.items():
            lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        for model, values in self._models.items():
            lines += [f"[models.{model}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items())]
        path = self.folder / f"{name}.toml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def _state_part(self, binary: Path | None, appendfsync: str, extra: Sequence[str]) -> Part:
        data = self.folder / "state"
        data.mkdir(exist_ok=True)
        server = StateServer(data, port=self.port, appendfsync=appendfsync, extra_args=extra)  # type: ignore[arg-type] # a test's literal
        argv = server.argv()
        if binary is not None:
            argv[0] = str(binary)
        return Part("state", argv, os.environ, self.folder)

    def api_part(self, number: int, url: str = "", *arguments: str) -> Part:
        """An API node `api-N`, gunicorn with these further arguments; `api_url` tells where it listens."""
        name, port = f"api-{number}", self._given_ports.pop(0) if self._given_ports else free_port()
        env = self._environment(self.config(url or self.url, name, port=port))
        env["TMPDIR"] = str(self.folder)
        self._api_ports[name] = port
        argv = [sys.executable, "-m", "gunicorn", "-c", "python:webapp.gunicorn_conf", *arguments]
        return Part(name, [*argv, "webapp.app:create_app()"], env, self.folder)

    def worker_part(self, number: int, url: str = "", *arguments: str) -> Part:
        """A worker `worker-N`."""
        name = f"worker-{number}"
        env = self._environment(self.config(url or self.url, name))
        env |= {"SCRIPTED_LOG": str(self.scripted_log), "SCRIPTED_DELAY_MS": str(self._delay_ms)}
        env |= self._scripted_env | {"SCRIPTED_LOAD": str(self.scripted_load)}
        argv = [sys.executable, "-m", "tests.scripted.worker", "-Q", self._serves, "-l", "INFO", "-n", f"{name}@%h"]
        argv += ["--without-mingle", "--without-gossip", *arguments]
        return Part(name, argv, env, self.folder)

    def _environment(self, config: Path) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GENPOOL_", "PROM"))}
        return kept | {
            "GENPOOL_CONFIG": str(config),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "OPENBLAS_NUM_THREADS": "1",
        }

    @property
    def parts(self) -> list[Part]:
        """All of them, the state server first."""
        return [self.state, *self.apis, *self.workers]

    # --- life

    def start(self) -> None:
        """Start all parts and wait until each serves."""
        self.state.start()
        self.await_state()
        for part in [*self.apis, *self.workers]:
            part.start()
        for api in self.apis:
            self.await_api(api)
        for worker in self.workers:
            self.await_worker(worker)

    def await_state(self) -> None:
        """Until the state server answers."""
        wait_until(lambda: self._serves_state() or self._dead(self.state), description="the state server", timeout_s=30)

    def await_api(self, api: Part) -> None:
        """Until the node answers."""
        wait_until(lambda: self._healthy(api) or self._dead(api), description=api.name, timeout_s=READY_S)

    def await_worker(self, worker: Part) -> None:
        """Until the worker is registered for all its models, those of its queues that are configured yet."""

        def registered() -> bool:
            live = [
                any(rank.pid == worker.pid for rank in RankRegistry(client, model).live())
                for model in self._serves.split(",")
                if model in self._models
            ]
            return all(live)

        with self.client() as client:
            wait_until(lambda: registered() or self._dead(worker), description=worker.name, timeout_s=READY_S)

    def await_readers(self, count: int) -> None:
        """Until so many of its workers know of each other and block at the stream."""

        def blocked() -> int:
            with self.client() as client:
                known: int = client.hlen(self.keys().load)
                clients = client.client_list()
            waiting = [each for each in clients if "b" in each["flags"] and each["cmd"].startswith("xread")]
            return min(known, len(waiting))

        wait_until(lambda: blocked() >= count, description=f"{count} workers to wait for work", timeout_s=20)

    def _dead(self, part: Part) -> bool:
        if not part.alive:
            raise AssertionError(f"{part.name} ended:\n{part.output()[-3000:]}")
        return False

    def _serves_state(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _healthy(self, api: Part) -> bool:
        try:
            return httpx.get(f"{self.api_url(api)}/healthz", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def close(self) -> None:
        """End everything that runs."""
        self.http.close()
        self.jobs.close()
        for part in reversed(self.parts):
            part.end()

    def __enter__(self) -> System:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- jobs

    def submit(self, script: str, *, api: int = 0, session: str = "", **body: Any) -> str:
        """Submit a background job of this input at a node; its id, which is also kept in `accepted`. `session`: what
        its header says of that, "" for none."""
        url = f"{self.api_url(self.apis[api])}/v1/responses"
        headers = {"x-session-id": session} if session else {}
        said = {"model": SCRIPTED, "input": script, "background": True, **body}
        answer = self.http.post(url, json=said, headers=headers)
        assert answer.status_code == 200, answer.text
        self.accepted.append(answer.json()["id"])
        return self.accepted[-1]

    def submit_choices(self, script: str, n: int) -> str:
        """A job of `n` choices, straight to the state server; its id, which is also kept in `accepted`."""
        prompt = TextPrompt(text=f"{script}\n")
        request = GenerationRequest(
            model=SCRIPTED, prompt=prompt, sampling=Sampling(temperature=0.0), n=n, max_tokens=200
        )
        self.accepted.append(self.jobs.submit(request))
        return self.accepted[-1]

    def submit_running(self, script: str, *, tokens: int = 4, **body: Any) -> str:
        """Submit a background job; its id, once it has made so many tokens."""
        job = self.submit(script, **body)
        wait_until(lambda: self.tokens(job) >= tokens, description=f"{tokens} tokens of {job}")
        return job

    def poll(self, job: str, *, api: int = 0) -> dict[str, Any]:
        """The response object as a client sees it now."""
        answer = self.http.get(f"{self.api_url(self.apis[api])}/v1/responses/{job}")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def record(self, job: str) -> JobRecord:
        """The job's record."""
        return self.jobs.get(job)

    def ended(self, job: str, *, timeout_s: float = 30) -> JobRecord:
        """The job's record, once it has ended."""
        wait_until(lambda: self.record(job).terminal, description=f"{job} to end", timeout_s=timeout_s)
        return self.record(job)

    def fact(self, job: str, field: str) -> str:
        """A field of the job's stored record that no reader needs (`crashes`, `losses`, ...); empty: never set."""
        ref = parse_ref(job)
        with self.client() as client:
            return (client.hget(ModelKeys(ref.tag).job(ref.token), field) or b"").decode()

    # --- looking

    def api_url(self, api: Part) -> str:
        """Where the node listens."""
        return f"http://127.0.0.1:{self._api_ports[api.name]}"

    @contextmanager
    def client(self, url: str = "") -> Iterator[Client]:
        """A plain client of the state server."""
        client = connect(url or self.url, max_connections=2)
        try:
            yield client
        finally:
            client.connection_pool.disconnect()

    def keys(self, model: str = SCRIPTED) -> ModelKeys:
        """The model's keys."""
        return ModelKeys(f"{model}:0")

    def ranks(self, model: str = SCRIPTED) -> list[Rank]:
        """The model's live ranks."""
        with self.client() as client:
            return RankRegistry(client, model).live()

    def holder(self, job_rank: str, model: str = SCRIPTED) -> Part:
        """The worker part whose rank has this id."""
        pids = [rank.pid for rank in self.ranks(model) if rank.id == job_rank]
        return next(worker for worker in self.workers if worker.alive and worker.pid in pids)

    def starts(self, job: str) -> int:
        """How often the scripted engine began the job, over all workers. Each takeover replays it: that is a start."""
        token = job.rsplit("_", 1)[-1]
        lines = self.scripted_log.read_text().splitlines()
        return sum(line.startswith("start ") and token in line.split()[1] for line in lines)

    def tokens(self, job: str) -> int:
        """How many token lines the scripted engine wrote for the job, over all workers."""
        token = job.rsplit("_", 1)[-1]
        lines = self.scripted_log.read_text().splitlines()
        return sum(line.startswith("tok ") and token in line.split()[1] for line in lines)

    def audit(self) -> list[Violation]:
        """What `genpool check` finds, all models together."""
        with self.client() as client:
            return [violation for model in self._models for violation in Audit(client, model).run()]

    def assert_at_rest(self, *, timeout_s: float = 15) -> None:
        """Everything ended, nothing pending, no invariant broken, each API node answers at once."""
        with self.client() as client:
            for model in self._models:
                keys = self.keys(model)
                for name in (keys.index, keys.leases, keys.timers):
                    wait_until(partial(_is_empty, client, name), description=f"{name} to be empty", timeout_s=timeout_s)
                assert client.xlen(keys.queue) == 0
                assert not client.exists(keys.lanes["backlog"])
                if client.exists(keys.queue):
                    assert all(group["pending"] == 0 for group in client.xinfo_groups(keys.queue))
        assert self.audit() == []
        for api in self.apis:
            if api.alive:
                began_s = time.monotonic()
                assert self._healthy(api), api.output()[-2000:]
                assert time.monotonic() - began_s < 5
        for part in self.parts:
            assert not part.alive or is_running(part.pid)

    def assert_recovered(self, *, dead: int = 0) -> None:
        """What holds after every fault: a fresh job of one token succeeds, every accepted job has ended, all is at
        rest, and there are as many dead letters as the fault explains."""
        fresh = self.submit("say x", max_output_tokens=1)
        assert self.ended(fresh, timeout_s=10).outputs[0].text == "x"
        for job in self.accepted:
            self.ended(job, timeout_s=10)
        self.assert_at_rest()
        with self.client() as client:
            assert client.xlen(self.keys().dead) == dead


def _is_empty(client: Client, sorted_set: str) -> bool:
    return not client.zcard(sorted_set)
