"""Many cancels and disconnects at random moments of a generation's life, and nothing left of any of them.

CANCELS says how many (`make cancels`: 1,000), SEED repeats a run.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from pool.rules.jobs import is_terminal
from tests.conftest import leaking
from tests.faults.conftest import StartSystem
from tests.faults.gauges import api_waits, engine_sessions, engine_work, gauge
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until

CANCELS = int(os.environ.get("CANCELS", "60"))
SEED = int(os.environ.get("SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
#: Clients at once: half of them find a place in the engines, the others queue.
CLIENTS = 16
PLACES = 4
STEP_S = 0.01
RESULT_TTL_S = 20
READ_LIMIT_S = 30


@dataclass(frozen=True)
class Leaving:
    """One client's plan. `kind`: sync, stream or background. `after_s`: leave then, None: with the last token."""

    number: int
    kind: str
    script: str
    tokens: int
    after_s: float | None
    by_cancel: bool

    @classmethod
    def plan(cls, number: int, chance: random.Random) -> Leaving:
        """Long and short, with and without a long prefill; most leave while it runs, a fifth as it ends."""
        tokens = chance.choice((1, 5, 20, 60))
        padding = "." * chance.choice((0, 0, 0, 3000)) + "|"
        life_s = 2 * STEP_S * tokens  # half of them wait for a place first
        return cls(
            number=number,
            kind=chance.choice(("sync", "stream", "background")),
            script=f"{padding}repeat {tokens} x",
            tokens=tokens,
            after_s=None if chance.random() < 0.2 else chance.uniform(0, 1.3 * life_s),
            by_cancel=chance.random() < 0.5,
        )


class Client:
    """A client on one raw connection, so that it can leave at any byte."""

    def __init__(self, system: System, api: Part, plan: Leaving) -> None:
        self._system = system
        self._plan = plan
        self._port = int(system.api_url(api).rsplit(":", 1)[1])
        self._heard = b""
        # A background job's last token is only seen in its stream; leaving that changes nothing for the job.
        self._streams = plan.kind == "stream" or (plan.kind == "background" and plan.after_s is None)

    def run(self) -> str:
        """Do as planned; what came of it, for the count."""
        plan = self._plan
        body: dict[str, Any] = {"model": SCRIPTED, "input": plan.script}
        if plan.kind == "background":
            body["background"] = True
        if self._streams:
            body["stream"] = True
        connection = self._post("/v1/responses", body)
        try:
            way = self._leave(connection)
        finally:
            connection.close()
        return f"{plan.kind}, {way}"

    def _leave(self, connection: socket.socket) -> str:
        plan = self._plan
        if plan.kind == "background" and not plan.by_cancel and plan.after_s is not None:
            return "went without reading the id"
        end_s = time.monotonic() + (READ_LIMIT_S if plan.after_s is None else plan.after_s)
        whole = self._listen(connection, end_s, until_last=plan.after_s is None)
        job = self._job()
        if plan.kind == "background" and not job:
            self._listen(connection, time.monotonic() + READ_LIMIT_S, until_last=False, until_id=True)
            job = self._job()
        if not plan.by_cancel or not job:
            return "read to the end" if whole else "hung up"
        answer = self._system.http.post(f"http://127.0.0.1:{self._port}/v1/responses/{job}/cancel")
        if answer.status_code == 200:
            assert answer.json()["status"] == "cancelled"
            return "cancelled"
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "not_cancellable", answer.text
        return "cancelled too late"

    def _post(self, path: str, body: dict[str, Any]) -> socket.socket:
        payload = json.dumps(body).encode()
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=READ_LIMIT_S)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
        connection.sendall(f"{head}\r\n\r\n".encode() + payload)
        return connection

    def _listen(self, connection: socket.socket, end_s: float, *, until_last: bool, until_id: bool = False) -> bool:
        """Read until `end_s`, or the last token of a stream, or the id; whether the answer was read to its end."""
        while (left_s := end_s - time.monotonic()) > 0:
            if until_id and self._job():
                return False
            connection.settimeout(left_s)
            try:
                piece = connection.recv(65536)
            except TimeoutError:
                return False
            self._heard += piece
            deltas = self._heard.count(b"event: response.output_text.delta")
            if until_last and self._streams and deltas >= self._plan.tokens:
                return False
            if not piece or self._heard.endswith(b"0\r\n\r\n") or self._is_whole():
                return True
        return False

    def _is_whole(self) -> bool:
        head, found, body = self._heard.partition(b"\r\n\r\n")
        lengths = [line.split(b":")[1] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        return bool(found) and bool(lengths) and len(body) >= int(lengths[0])

    def _job(self) -> str:
        """The id, as soon as it was heard."""
        _, found, rest = self._heard.partition(b'"id":"resp_')
        token, whole, _ = rest.partition(b'"')
        return f"resp_{token.decode()}" if found and whole else ""


#: What workers tell of their work, in one process of Celery's own client.
INSPECT = """
import json
from tasks.celery import app

ask = app.control.inspect(timeout=20, limit={workers})
print(json.dumps([ask._request("generations"), ask.active(), ask.reserved()]))
"""


def inspected(system: System) -> list[dict[str, list[Any]]]:
    """The workers' generations, active and reserved tasks, by worker."""
    code = INSPECT.format(workers=len(system.workers))
    argv = [sys.executable, "-c", code]
    env = system.workers[0].env
    done = subprocess.run(argv, check=False, env=env, cwd=system.folder, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, list[Any]]] = json.loads(done.stdout)
    return found


@pytest.mark.timeout(120 + CANCELS)
def test_nothing_is_left_of_those_who_left(start_system: StartSystem) -> None:
    """Synchronous, streamed and background work, left by a cancel or by hanging up: queued, in prefill, while tokens
    come, as it ends. Afterwards no engine holds a session, no node a waiter, no gauge a count, and the store only
    results that have a time to live."""
    system = start_system(
        apis=2,
        workers=2,
        delay_ms=1000 * STEP_S,
        sections={"state": {"result_ttl_seconds": RESULT_TTL_S}},
        models={SCRIPTED: {"target_inflight": PLACES, "max_prefill_tokens_per_tick": 64}},
    )
    chance = random.Random(SEED)
    plans = [Leaving.plan(number, chance) for number in range(CANCELS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        ways = Counter(pool.map(lambda plan: Client(system, system.apis[plan.number % 2], plan).run(), plans))
    told = f"seed {SEED}: {dict(sorted(ways.items()))}"
    assert sum(ways.values()) == CANCELS, told
    assert ways["background, cancelled"] and any("hung up" in way for way in ways), told

    system.assert_recovered()
    idle = {"active_sessions": 0, "queue_depth": 0, "kv_total_bytes": 0, "runtime_inflight": 0}
    wait_until(lambda: engine_work(system) == idle, description=f"idle engines ({told})")
    assert engine_sessions(system) == set(), told
    for answers in inspected(system):
        assert len(answers) == len(system.workers), told
        assert not any(answers.values()), told
    for api in system.apis:
        wait_until(lambda api=api: api_waits(system, api) == (0, 0), description=f"no waiter on {api.name} ({told})")
        assert gauge(system, "genpool_jobs_queued", api) == gauge(system, "genpool_jobs_running", api) == 0, told
    with system.client() as client:
        assert leaking(client) == [], told
        states = [client.hget(key, "state") for key in client.scan_iter(match=system.keys().job("*"))]
        assert all(is_terminal(state.decode()) for state in states if state), told
        assert client.xlen(system.keys().dead) == 0
    for part in [*system.apis, *system.workers]:
        assert "Traceback" not in part.output(), f"{told}\n{part.output()[-4000:]}"
