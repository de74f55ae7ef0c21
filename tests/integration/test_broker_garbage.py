"""A broker is open to more than well-behaved clients: whatever they push, a worker goes on and shows none of it."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pool.store.connection import Client, connect
from pool.store.server import StateServer
from tasks.client import Client as Jobs
from tests.builders import request
from tests.integration.celery_process import Site, Worker
from tests.waiting import wait_until

CANARY = "ZQ-CANARY-44"
CALL = {"prompt": CANARY, "max_tokens": 2, "temperature": 0.0}


@pytest.fixture
def broker(site: Site) -> Iterator[Client]:
    """The broker as anybody reaches it."""
    client = connect(site.url, max_connections=1)
    yield client
    client.connection_pool.disconnect()


def envelope(body: Any = None, **changed: Any) -> dict[str, Any]:
    """A message of a generation as Celery sends it, with parts replaced, or left out where None."""
    task_id = str(uuid.uuid4())
    coded = base64.b64encode(json.dumps([[], CALL, {}]).encode() if body is None else body).decode()
    whole: dict[str, Any] = {
        "body": coded,
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": {"lang": "py", "task": "genpool.generate", "id": task_id, "argsrepr": CANARY},
        "properties": {
            "correlation_id": task_id,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "tiny"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }
    return {name: value for name, value in (whole | changed).items() if value is not None}


def properties(**changed: Any) -> dict[str, Any]:
    """The properties of such a message, with parts replaced, or left out where None."""
    whole = envelope()["properties"] | changed
    return {name: value for name, value in whole.items() if value is not None}


def headers(**changed: Any) -> dict[str, Any]:
    """The headers of such a message, with parts replaced, or left out where None."""
    return {name: value for name, value in (envelope()["headers"] | changed).items() if value is not None}


#: Nothing of this can become a job.
GARBAGE: dict[str, bytes | dict[str, Any]] = {
    "no JSON": f"garbage {CANARY}".encode(),
    "nothing": b" ",
    "no text": b"\xff\xfe" + CANARY.encode(),
    "a list": b"[1, 2]",
    "null": b"null",
    "a string": json.dumps(CANARY).encode(),
    "an empty object": b"{}",
    "depth": b"[" * 100_000,
    "depth inside": b'{"a":' * 500 + b"1" + b"}" * 500,
    "almost too deep": b'{"properties": {"delivery_tag": "x", "a": ' + b"[" * 960 + b"]" * 960 + b"}}",
    "a number of 10,000 digits": b'{"properties": ' + b"9" * 10_000 + b"}",
    "a revived type": b'{"__type__": "datetime", "__value__": 5}',
    "no properties": envelope(properties=None),
    "properties that are a list": envelope(properties=[CANARY]),
    "no delivery tag": envelope(properties=properties(delivery_tag=None)),
    "a delivery tag that is a list": envelope(properties=properties(delivery_tag=[CANARY])),
    "no delivery info": envelope(properties=properties(delivery_info=None)),
    "delivery info that is text": envelope(properties=properties(delivery_info=CANARY)),
    "no base64": envelope(body=None) | {"body": "!" + CANARY},
    "a body that is a number": envelope() | {"body": 10**40},
    "a body in an unknown encoding": envelope(properties=properties(body_encoding="rot13")),
    "headers that are a list": envelope(headers=[CANARY]),
    "no headers": envelope(headers=None),
    "no headers, no task in the body": envelope(f'{{"x": "{CANARY}"}}'.encode(), headers=None),
    "no headers, no JSON in the body": envelope(CANARY.encode(), headers=None),
    "no id": envelope(headers=headers(id=None)),
    "an id that is a list": envelope(headers=headers(id=[CANARY])),
    "an id of 100,000 letters": envelope(headers=headers(id="x" * 100_000)),
    "a task that is a list": envelope(headers=headers(task=[CANARY])),
    "an unknown task": envelope(headers=headers(task="genpool.generat")),
    "an unknown task with an odd name": envelope(headers=headers(task=f"{CANARY} !", id=CANARY + "\n")),
    "a broken compression": envelope(headers=headers(compression="application/x-gzip")),
    "an unknown compression": envelope(headers=headers(compression=CANARY)),
    "arguments that are no JSON": envelope(CANARY.encode()),
    "arguments of another shape": envelope(json.dumps({"prompt": CANARY}).encode()),
    "arguments with huge numbers": envelope(b'[[], {"prompt": "x", "max_tokens": 1e999}, {}]'),
    "arguments with huge integers": envelope(b'[[], {"prompt": "x", "seed": ' + b"9" * 5000 + b"}, {}]"),
}

CHANNEL_GARBAGE: tuple[bytes, ...] = (
    CANARY.encode(),
    b"\xff",
    b"[1]",
    b"null",
    b"{}",
    b"[" * 100_000,
    json.dumps(envelope()).encode(),
    json.dumps(envelope(b"[]")).encode(),
    json.dumps(envelope(b'{"method": "ping", "destination": 5}')).encode(),
    json.dumps(envelope(headers=[CANARY])).encode(),
)


def raw(message: bytes | dict[str, Any]) -> bytes:
    """As it lies in the list."""
    return message if isinstance(message, bytes) else json.dumps(message).encode()


def assert_consuming(site: Site, worker: Worker, broker: Client) -> None:
    """A job sent through the broker and one submitted directly both run; the worker has never lost its connection, and
    shows nothing of what it got."""
    good = envelope()
    broker.lpush("tiny", raw(good))
    jobs = Jobs(site.settings)
    try:
        sent = f"gen_tiny.0_{good['headers']['id'].replace('-', '')}"
        wait_until(lambda: broker.llen("tiny") == 0, description="the list to be read", timeout_s=30)
        wait_until(
            lambda: broker.exists(f"gp:{{tiny:0}}:job:{sent.rpartition('_')[2]}") or worker.process.poll() is not None,
            description="the job that was sent",
        )
        direct = jobs.submit(request())
        for job in (sent, direct):
            wait_until(lambda job=job: jobs.get(job).terminal, description="the job to end", timeout_s=20)
            assert jobs.get(job).state == "incomplete"
    finally:
        jobs.close()
    assert worker.process.poll() is None
    output = worker.output()
    for sign in (CANARY, "Traceback", "Connection to broker lost", "Frequent restarts", "Unrecoverable"):
        assert sign not in output


@pytest.mark.parametrize("kind", GARBAGE)
def test_a_message_that_is_none_is_dropped(kind: str, site: Site, worker: Worker, broker: Client) -> None:
    """It does not come back, and the worker goes on."""
    broker.lpush("tiny", raw(GARBAGE[kind]))
    assert_consuming(site, worker, broker)
    assert broker.hlen("unacked") == 0


def test_a_flood_of_garbage_is_a_few_lines(site: Site, worker: Worker, broker: Client) -> None:
    """Two thousand messages are read away; the log says so by size and hash."""
    for _ in range(50):
        broker.lpush("tiny", *(raw(message) for message in GARBAGE.values()))
    assert_consuming(site, worker, broker)
    assert 0 < worker.output().count("dropped a message from") < 100
    assert ", sha256 " in worker.output()


def test_no_pickle_is_ever_loaded(site: Site, worker: Worker, broker: Client) -> None:
    """With and without the name of a task, by type and by its alias, in a message and in a command."""
    canary = site.folder / "canary"
    payload = b"cposix\nsystem\n(S'touch " + str(canary).encode() + b"'\ntR."
    for content_type in ("application/x-python-serialize", "pickle", "application/x-yaml"):
        for kept in (headers(), None):
            message = envelope(payload, **{"content-type": content_type, "content-encoding": "binary", "headers": kept})
            broker.lpush("tiny", raw(message))
            broker.publish("/0.celery.pidbox", raw(message))
    assert_consuming(site, worker, broker)
    assert not canary.exists()


def test_garbage_on_the_control_channel_changes_nothing(tmp_path: Path) -> None:
    """Commands still work. (A worker of its own: Celery shows a traceback, without content, of an odd command.)"""
    (tmp_path / "state").mkdir()
    with StateServer(tmp_path / "state") as server, closing(connect(server.url, max_connections=1)) as broker:
        site = Site(server.url, tmp_path)
        try:
            worker = site.worker()
            for message in CHANNEL_GARBAGE:
                # After an odd command Celery opens its mailbox anew, and nobody listens for a moment.
                wait_until(
                    lambda message=message: broker.publish("/0.celery.pidbox", message) > 0,
                    description="the worker to listen",
                )
            (answers,) = site.inspect("ping").values()
            assert answers == {"ok": "pong"}
            assert worker.process.poll() is None
            assert CANARY not in worker.output()
            assert "Connection to broker lost" not in worker.output()
        finally:
            site.close()


def test_who_sends_an_unknown_task_learns_so(site: Site, worker: Worker, broker: Client) -> None:
    """As a failed result, named."""
    message = envelope(headers=headers(task="genpool.generat", id=(task_id := str(uuid.uuid4()))))
    broker.lpush("tiny", raw(message))
    result = wait_until(lambda: broker.get(f"celery-task-meta-{task_id}"), description="the result")
    assert json.loads(result)["status"] == "FAILURE"
    assert "genpool.generat" in result.decode()
    assert CANARY not in result.decode()
    assert worker.process.poll() is None
    assert site.ranks()
