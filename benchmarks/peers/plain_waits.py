"""Waiting the plain way: a Flask application in which every waiter blocks on a connection of its own.

`gunicorn plain_waits:app` serves it. As a program it is the worker: `python plain_waits.py URL MODEL RATE`.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Iterator
from typing import Any

import redis
from flask import Flask, Response, jsonify, request

from benchmarks.peers.dialogue import answer_text, serve_endings

QUEUE = "queue"
TTL_S = 600
BATCH = 100

app = Flask("plain")
#: No limit on connections, and no timeout on blocking reads: the library's defaults would end them after 5 s. (Any: the
#: library's types allow replies that these commands never give.)
client: Any = redis.Redis.from_url(
    os.environ.get("BENCH_STATE", "redis://"), socket_timeout=None, max_connections=10_000
)


@app.post("/v1/responses")
def create() -> Response:
    """Enqueue a job, and wait for its end in this thread."""
    kind = "stream" if request.get_json().get("stream") else "sync"
    job = uuid.uuid4().hex
    client.lpush(QUEUE, f"{kind}:{job}")
    if kind == "stream":
        return Response(_events(job), mimetype="text/event-stream")
    _, text = client.blpop([f"result:{job}"], timeout=0)
    return jsonify(_shown(job, text.decode()))


def _events(job: str) -> Iterator[str]:
    yield f"event: response.created\ndata: {json.dumps({'response': {'id': job}})}\n\n"
    last = b"0"
    while True:
        for _, entries in client.xread({f"events:{job}": last}, block=0):
            for at, fields in entries:
                last = at
                if fields[b"type"] == b"completed":
                    final = {"response": _shown(job, fields[b"text"].decode())}
                    yield f"event: response.completed\ndata: {json.dumps(final)}\n\n"
                    return


def _shown(job: str, text: str) -> dict[str, object]:
    return {"id": job, "output": [{"type": "message", "content": [{"type": "output_text", "text": text}]}]}


class Worker:
    """Takes jobs off the list, and writes their results where their waiters block."""

    def __init__(self, url: str) -> None:
        self._client: Any = redis.Redis.from_url(url, single_connection_client=True)
        self._client.client_setname("bench-worker")

    def take(self) -> list[str]:
        """Jobs that wait."""
        return [job.decode() for job in self._client.rpop(QUEUE, BATCH) or ()]

    def end(self, jobs: list[str]) -> None:
        """Write the results of these jobs."""
        pipe = self._client.pipeline(transaction=False)
        for job in jobs:
            kind, token = job.split(":")
            name = f"{'events' if kind == 'stream' else 'result'}:{token}"
            if kind == "stream":
                pipe.xadd(name, {"type": "completed", "text": answer_text(token)})
            else:
                pipe.rpush(name, answer_text(token))
            pipe.expire(name, TTL_S)
        pipe.execute()


if __name__ == "__main__":
    worker = Worker(sys.argv[1])
    serve_endings(worker.take, worker.end, lambda job: job.split(":")[1], rate=float(sys.argv[3]))
