"""F39: a prompt is in its job's record and nowhere else, and Flower shows what has ended as ended."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from celery import Celery

from pool.store.connection import Client
from tasks import launch
from tasks.celery import create_app
from tasks.payloads import GenerationRequest, Sampling, TextPrompt
from tests.celery_answers import answer
from tests.faults.conftest import StartSystem
from tests.faults.supervising import Supervising
from tests.processes import free_port
from tests.system import ROOT, SCRIPTED, Part, System
from tests.waiting import wait_until

CANARY = "ZQ-CANARY-17"
#: Who may know a prompt: the job's record, its log, its input.
OWN_KEY = re.compile(rf"gp:\{{{SCRIPTED}:0\}}:(job|log|input):[0-9a-f]{{32,64}}")
LOGIN = ("ann", "secret-of-ann")
FINISHED_WITHIN_S = 10
INSPECTED = ("active", "reserved", "scheduled", "revoked", "registered", "stats", "active_queues", "conf")
OUR_OWN = ("generations", "ranks", "engine")


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """Two workers that send events."""
    system = start_shared_system(
        workers=0,
        sections={"worker": {"lease_seconds": 1.5, "renew_seconds": 0.4, "max_deliveries": 2}},
        delay_ms=10,
    )
    system.workers = [system.worker_part(number, "", "-E") for number in range(2)]
    for worker in system.workers:
        worker.start()
    for worker in system.workers:
        system.await_worker(worker)
    return system


class Flower:
    """Flower as `genpool up --flower` runs it, in any number of lives."""

    def __init__(self, system: System) -> None:
        self.port = free_port()
        env = dict(system.workers[0].env)
        self.part = Part("flower", launch.flower_child(self.port).argv, env, system.folder)
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self, **variables: str) -> None:
        """Start it (FLOWER_ variables) and wait until it has heard both workers."""
        self.part.env.update(variables)
        self.part.start()
        wait_until(lambda: self.page("/healthcheck"), description="Flower", timeout_s=60)
        wait_until(
            lambda: self.page("/workers").count("@") >= 2, description="Flower to hear the workers", timeout_s=30
        )

    def page(self, path: str) -> str:
        """A page, with login; empty while it does not answer."""
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self.url}{path}", auth=LOGIN, timeout=20)
            return answer.text if answer.status_code == 200 else ""
        return ""

    def status(self, path: str, auth: tuple[str, str] | None = None) -> int:
        """The status that a visitor gets."""
        return httpx.get(f"{self.url}{path}", auth=auth, timeout=20).status_code

    def states(self) -> dict[str, str]:
        """Tasks and their states."""
        return {task: about["state"] for task, about in json.loads(self.page("/api/tasks") or "{}").items()}

    def pages(self) -> dict[str, str]:
        """All that it shows."""
        states = self.states()
        workers = json.loads(self.page("/api/workers?refresh=1"))
        paths = ["/", "/workers", "/tasks", "/broker", "/metrics", "/api/tasks", "/api/workers", "/api/task/types",
                 *(f"/worker/{name}" for name in workers), *(f"/task/{task}" for task in states),
                 *(f"/api/task/info/{task}" for task in states)]  # fmt: skip
        return {path: self.page(path) for path in paths}


@pytest.fixture(scope="module")
def flower(system: System) -> Iterator[Flower]:
    """Flower, running, with a login."""
    flower = Flower(system)
    flower.start(FLOWER_BASIC_AUTH=":".join(LOGIN))
    yield flower
    flower.part.end()


@pytest.fixture(scope="module")
def celery(system: System) -> Iterator[Celery]:
    """The Celery application as a caller has it."""
    app = create_app(system.settings)
    yield app
    app.tasks["genpool.generate"].services.close()
    app.close()


def carried(script: str, **fields: Any) -> dict[str, Any]:
    """A body with the canary in every field that can hold text."""
    body = {
        "model": SCRIPTED,
        "input": f"{CANARY}|{script}",
        "instructions": f"{CANARY} above all",
        "user": CANARY,
        "safety_identifier": CANARY,
        "metadata": {"note": f"{CANARY} {CANARY}", CANARY: "x"},
        "stop": [CANARY],
    }
    return body | fields


def inspected(celery: Celery) -> str:
    """What all workers say of themselves, Celery's questions and ours."""
    inspect = celery.control.inspect(timeout=10, limit=2)  # as many answers as there are workers
    answers = [getattr(inspect, name)() for name in INSPECTED]
    answers += [inspect._request(name) for name in OUR_OWN]
    assert all(answers), "a question got no answer"
    return json.dumps(answers)


def contents(client: Client, key: bytes) -> bytes:
    """All that a key holds."""
    readers: dict[bytes, Callable[[], Any]] = {
        b"string": lambda: client.get(key),
        b"hash": lambda: client.hgetall(key),
        b"list": lambda: client.lrange(key, 0, -1),
        b"set": lambda: client.smembers(key),
        b"zset": lambda: client.zrange(key, 0, -1),
        b"stream": lambda: client.xrange(key),
    }
    kind = client.type(key)
    return b"" if kind == b"none" else repr(readers[kind]()).encode()


def strangers_that_know(client: Client) -> list[str]:
    """Keys beside the jobs' own whose name or content holds the canary."""
    keys = [key for key in client.scan_iter(count=1000) if not OWN_KEY.fullmatch(key.decode())]
    return [key.decode() for key in keys if CANARY.encode() in key + contents(client, key)]


def refusals(system: System) -> Iterator[httpx.Response]:
    """Bad requests that hold the canary in a value."""
    url = system.api_url(system.apis[0])
    bad = (
        {"temperature": CANARY}, {"input": {CANARY: CANARY}}, {"input": [{"role": CANARY, "content": CANARY}]},
        {"stop": [CANARY, ""]}, {"stop": [CANARY] * 1000}, {"metadata": {"a": CANARY * 100}}, {"metadata": CANARY},
        {"user": f"{CANARY}\n"}, {"model": CANARY}, {"tools": [{"name": CANARY}]}, {"lane": CANARY},
        {"max_output_tokens": 10**9}, {"n": CANARY}, {"input": f"{CANARY}\ud800"},
    )  # fmt: skip
    for fields in bad:
        yield system.http.post(f"{url}/v1/responses", content=json.dumps(carried("say x", **fields)))
        messages = [{"role": "user", "content": CANARY}]
        chat = {"model": SCRIPTED, "messages": messages, **{k: v for k, v in fields.items() if k != "input"}}
        yield system.http.post(f"{url}/v1/chat/completions", content=json.dumps(chat | {"input": CANARY}))
    for content in (f'{{"input": "{CANARY}"', f'"{CANARY}"', f'{{"model": "{CANARY}", "input": NaN}}'):
        yield system.http.post(f"{url}/v1/responses", content=content)
    yield system.http.post(f"{url}/v1/responses", content=f"input={CANARY}", headers={"content-type": "text/plain"})
    yield system.http.get(f"{url}/v1/responses/{CANARY}?x={CANARY}")
    yield system.http.get(f"{url}/{CANARY}", headers={"authorization": f"Bearer {CANARY}"})


def test_f39_a_prompt_is_in_its_own_record_only(system: System, flower: Flower, celery: Celery) -> None:
    """Success, failure, cancel, poison, a Celery task in both ways of sending it, and all kinds of bad requests, with
    the prompt in every field: no log, page, reply, metric, key or dead letter holds it afterwards."""
    url = system.api_url(system.apis[0])
    said = [system.http.post(f"{url}/v1/responses", json=carried("say hi"), headers={"idempotency-key": CANARY})]
    assert said[0].status_code == 200, said[0].text
    ids = [said[0].json()["id"]]
    failing = system.http.post(f"{url}/v1/responses", json=carried("raise 1"))
    assert failing.status_code == 500
    ids.append(failing.json()["id"])
    running = system.submit("", **carried("repeat 3000 x", background=True))
    wait_until(lambda: system.tokens(running) > 1, description="a running job")
    held = [system.submit("", **carried("repeat 3000 x", background=True)) for _ in range(20)]
    while_it_runs = inspected(celery)
    for job in (running, *held):
        said.append(system.http.post(f"{url}/v1/responses/{job}/cancel"))
        assert said[-1].json()["status"] == "cancelled"
    ids.append(running)
    ids += _through_celery(celery)
    expected = ["SUCCESS", "FAILURE", "REVOKED", "SUCCESS", "SUCCESS", "FAILURE"]

    def shown() -> list[str]:
        states = flower.states()
        return [states.get(job, "") for job in ids]

    # What a worker has not sent when it is killed is lost: events are no truth.
    wait_until(lambda: shown() == expected[:-1], description="Flower to show what ended", timeout_s=FINISHED_WITHIN_S)
    with Supervising(system):
        poison = system.submit("", **carried("crash 0", background=True))
        assert system.ended(poison, timeout_s=60).error_code == "poison"
        for worker in system.workers:
            system.await_worker(worker)
    ids.append(poison)
    wait_until(lambda: shown() == expected, description="Flower to show every end", timeout_s=FINISHED_WITHIN_S)
    answers = list(refusals(system))
    assert all(400 <= answer.status_code < 500 for answer in answers), [each.status_code for each in answers]
    errors = [*answers, failing]
    _assert_nowhere(system, flower, celery, {"errors": "".join(each.text for each in errors), "inspect": while_it_runs})
    for job in (ids[1], poison):
        assert CANARY not in json.dumps(system.poll(job)["error"])


def _through_celery(celery: Celery) -> list[str]:
    """A task called and a task sent; their ids, once they have ended."""
    call = {"model": SCRIPTED, "prompt": f"{CANARY}|say hi\n", "stop": [CANARY]}
    results = [
        celery.tasks["genpool.generate"].delay(**call),
        celery.send_task("genpool.generate", kwargs=call, queue=SCRIPTED),
    ]
    for result in results:
        assert answer(result, timeout_s=30)["outputs"][0]["text"] == "hi"
    refused = celery.send_task("genpool.generate", kwargs={**call, "temperature": CANARY}, queue=SCRIPTED)
    with pytest.raises(Exception, match="temperature") as error:
        answer(refused, timeout_s=30)
    assert CANARY not in str(error.value)
    return [result.id for result in results]


def _assert_nowhere(system: System, flower: Flower, celery: Celery, seen: dict[str, str]) -> None:
    texts = seen | {f"flower{path}": page for path, page in flower.pages().items()}
    texts["inspect afterwards"] = inspected(celery)
    texts["metrics"] = system.http.get(f"{system.api_url(system.apis[0])}/metrics").text
    for command in (("dead-letters", "list"), ("check",), ("queues", "--json"), ("doctor",)):
        done = subprocess.run(
            [sys.executable, str(ROOT / "genpool.py"), *command],
            env={**os.environ, "GENPOOL_CONFIG": system.workers[0].env["GENPOOL_CONFIG"]},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        texts[" ".join(command)] = done.stdout + done.stderr
        assert done.stdout
    with system.client() as client:
        assert strangers_that_know(client) == []
        known = [key for key in client.scan_iter(count=1000) if CANARY.encode() in contents(client, key)]
        assert known, "the canary is not even in the records: the search finds nothing"
    for path in system.folder.rglob("*"):
        # The state server's own log is the records again.
        if path.is_file() and "appendonlydir" not in path.parts:
            texts[str(path.relative_to(system.folder))] = path.read_text(errors="replace")
    assert {"api-0.log", "worker-0.log", "worker-1.log", "flower.log", "state.log"} <= set(texts)
    assert all(text for name, text in texts.items() if not name.endswith(".lock"))
    leaks = {name: text[max(text.find(CANARY) - 200, 0) :][:500] for name, text in texts.items() if CANARY in text}
    assert leaks == {}


def test_f39_flower_lets_nobody_at_its_api_without_login(system: System, flower: Flower) -> None:
    """With a login neither pages nor API are open to others; as genpool runs it, without one, the API is closed."""
    for path in ("/api/tasks", "/api/workers", "/tasks", "/workers"):
        assert flower.status(path) == flower.status(path, (LOGIN[0], "wrong")) == 401
        assert flower.status(path, LOGIN) == 200
    shipped = Flower(system)
    shipped.part.name = "flower-shipped"
    shipped.part.start()
    wait_until(lambda: shipped.page("/healthcheck"), description="Flower", timeout_s=60)
    try:
        assert shipped.status("/api/tasks") == shipped.status("/api/workers") == 401
    finally:
        shipped.part.end()


def test_f39_flower_shows_ends_that_no_worker_wrote(system: System, flower: Flower) -> None:
    """A run timeout ends a job in its worker's hands; Flower shows it as failed."""
    job = system.submit("repeat 3000 x", run_timeout_seconds=0.3)
    assert system.ended(job).error_code == "run_timeout"
    wait_until(
        lambda: flower.states().get(job) == "FAILURE", description="Flower to show it", timeout_s=FINISHED_WITHIN_S
    )


def test_f39_flower_restarted_mid_job_still_hears_the_end(system: System, flower: Flower) -> None:
    """What ends after its restart is shown as finished within 10 s, and nothing stays started."""
    job = system.jobs.submit(
        GenerationRequest(
            model=SCRIPTED,
            prompt=TextPrompt(text="repeat 3000 x\n"),
            sampling=Sampling(temperature=0.0),
            max_tokens=4000,
        )
    )
    wait_until(lambda: flower.states().get(job) == "STARTED", description="Flower to see it begin")
    flower.part.kill()
    flower.start()
    assert system.tokens(job) < 3000
    system.jobs.cancel(job)
    wait_until(
        lambda: flower.states().get(job) == "REVOKED" and "STARTED" not in flower.states().values(),
        description="Flower to show the end",
        timeout_s=FINISHED_WITHIN_S,
    )
