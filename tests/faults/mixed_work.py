"""Work under way on one API node while a fault is done to the system, and what its clients got in the end.

One streamed job that is resumed, one synchronous, and background ones: more than the workers' slots, so that some wait.
Whoever submits during the fault uses `knock`. `finish` waits for every accepted job and holds it to what was promised.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from pool.rules import jobs
from pool.store.ids import parse_ref
from pool.store.jobs import JobStore
from pool.store.records import JobRecord
from tests import builders
from tests.processes import descendants
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until

#: The scripted engine gives a byte a step.
LONG, SHORT = 90, 30
TIMEOUT_S = 60.0


@dataclass
class Streaming:
    """One background stream, read by a thread over as many connections as it takes."""

    url: str
    script: str
    job: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)
    resumes: int = 0
    _leave: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """To the terminal event."""
        body = {"model": SCRIPTED, "input": self.script, "background": True, "stream": True}
        while not self.ended:
            try:
                self._read("GET" if self.job else "POST", body)
            except httpx.HTTPError:
                continue  # resumed from the last event seen

    def leave(self) -> None:
        """Drop the connection with the next event and come back."""
        self._leave.set()

    @property
    def ended(self) -> bool:
        """Whether the terminal event was seen."""
        return bool(self.events) and self.events[-1]["type"] in ("response.completed", "error")

    @property
    def deltas(self) -> list[str]:
        """Pieces of text seen."""
        return [event["delta"] for event in self.events if event["type"] == "response.output_text.delta"]

    def _read(self, method: str, body: Mapping[str, Any]) -> None:
        path, query = "/v1/responses", {}
        if self.job:
            self.resumes += 1
            path, query = f"{path}/{self.job}", {"stream": "true", "starting_after": str(len(self.events) - 1)}
        request = httpx.stream(method, self.url + path, params=query, timeout=TIMEOUT_S, json=None if query else body)
        with request as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                self.events.append(json.loads(line[6:]))
                self.job = self.job or self.events[0]["response"]["id"]
                if self._leave.is_set():
                    self._leave.clear()
                    return

    def check(self, text: str) -> None:
        """Gapless, unique, ended once, with the right text."""
        assert [event["sequence_number"] for event in self.events] == list(range(len(self.events)))
        kinds = [event["type"] for event in self.events]
        assert kinds[-1] == "response.completed", self.events[-1]
        assert kinds.count("response.completed") == 1
        assert "".join(self.deltas) == text == _text(self.events[-1]["response"])


class MixedWork:
    """Mixed work on the first API node. `accepted` holds each job's id with the text it must end with."""

    def __init__(self, system: System, *, waiting: int = 6) -> None:
        self.system = system
        self.url = system.api_url(system.apis[0])
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)
        self.accepted: dict[str, str] = {}
        self.refused = 0
        self._pids = _pids(system)
        self._waiting = waiting
        self._count = 0
        self._stream_text = self._new_text(LONG)
        self.stream = Streaming(self.url, f"say {self._stream_text}")
        self._sync_text = self._new_text(LONG)
        self._sync: list[httpx.Response] = []
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self.stream.run, self._call)]

    def __enter__(self) -> MixedWork:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def start(self) -> None:
        """Begin; returns while jobs run, wait and stream."""
        for thread in self._threads:
            thread.start()
        # Only then the others: a node's first request takes its time.
        wait_until(lambda: len(self.stream.deltas) > 3, description="a stream in progress")
        for _ in range(self._waiting):
            assert self.knock(SHORT).status_code == 200
        with self.system.client() as client:
            leased, unended = client.zcard(self.system.keys().leases), client.zcard(self.system.keys().index)
        assert 2 <= leased < unended, "jobs run and jobs wait"
        assert not self.stream.ended

    def knock(self, size: int = 3) -> httpx.Response:
        """Submit a background job, which may be refused in due form."""
        text = self._new_text(size)
        body = {"model": SCRIPTED, "input": f"say {text}", "background": True}
        answer = self.http.post("/v1/responses", json=body)
        if answer.status_code == 200:
            self.accepted[answer.json()["id"]] = text
        else:
            self.refused += 1
            assert answer.status_code == 503, answer.text
            assert int(answer.headers["Retry-After"]) >= 1
            assert answer.json()["error"]["code"]
        return answer

    def knock_until_accepted(self) -> None:
        """The system takes work again."""
        wait_until(lambda: self.knock().status_code == 200, description="a submit to be accepted", timeout_s=30)

    def finish(self, *, attempts: int | None = 1) -> None:
        """Every accepted job ends exactly once with the right text, nothing else was run, nothing is left, and no
        process was started anew. `attempts`: how often each was begun, None: that is not promised here."""
        self.knock_until_accepted()
        self.await_clients()
        self.stream.check(self._stream_text)
        (answer,) = self._sync
        assert answer.status_code == 200, answer.text
        assert answer.json()["status"] == "completed", answer.text
        assert _text(answer.json()) == self._sync_text
        self.accepted |= {self.stream.job: self._stream_text, answer.json()["id"]: self._sync_text}
        self.check_ends(attempts=attempts)

    def check_ends(self, *, attempts: int | None) -> None:
        """What `finish` promises, of the accepted jobs alone."""
        ended = self.await_ends()
        for job, record in ended.items():
            self._check(record, self.accepted[job], attempts)
        self._check_rest(ended)

    def await_ends(self) -> dict[str, JobRecord]:
        """The records of all accepted jobs, once each is terminal."""
        with self._store() as store:

            def ended() -> dict[str, JobRecord]:
                records = {job: store.read(parse_ref(job)) for job in self.accepted}
                return records if all(record.terminal for record in records.values()) else {}

            return wait_until(ended, description="every accepted job to end", timeout_s=TIMEOUT_S, every_s=0.1)

    def await_clients(self) -> None:
        """Until the synchronous answer and the stream's end are there."""
        for thread in self._threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a client still waits"

    def _check_rest(self, ended: Mapping[str, JobRecord]) -> None:
        """Nothing is left under way, what had ended stayed as it was, and all processes are those of the beginning."""
        self.system.assert_at_rest()
        with self._store() as store, self.system.client() as client:
            assert {job: store.read(parse_ref(job)) for job in ended} == ended
            tokens = {job.rpartition("_")[2] for job in ended}
            others = {
                key.decode(): client.hget(key, "state").decode()
                for key in client.scan_iter(match=self.system.keys().job("*"), count=1000)
                if key.decode().rpartition(":")[2] not in tokens
            }
        # Refused submits leave nothing, or a job that was ended on their behalf; jobs of other tests ended there.
        assert not {key for key, state in others.items() if not jobs.is_terminal(state)}
        assert _pids(self.system) == self._pids

    def _check(self, record: JobRecord, text: str, attempts: int | None) -> None:
        assert record.state == jobs.COMPLETED, (record.id, record.state, record.error_code)
        assert [output.text for output in record.outputs] == [text]
        if attempts is None:
            return
        assert (record.attempt, self.system.starts(record.id)) == (attempts, attempts), record.id
        with self.system.client() as client:
            assert int(client.hget(self.system.keys().job(record.ref.token), "losses") or 0) == attempts - 1

    def _call(self) -> None:
        body = {"model": SCRIPTED, "input": f"say {self._sync_text}"}
        self._sync.append(self.http.post("/v1/responses", json=body))

    def _new_text(self, size: int) -> str:
        self._count += 1
        return f"{self._count:02d}" + "abcdefghijklmnopqrstuvwxyz"[self._count % 26] * (size - 2)

    @contextmanager
    def _store(self) -> Iterator[JobStore]:
        with self.system.client() as client:
            yield builders.job_store(client)


def _pids(system: System) -> set[int]:
    """Of API nodes and workers, with gunicorn's own children."""
    found: set[int] = set()
    for part in [*system.apis, *system.workers]:
        assert part.alive, part.output()[-3000:]
        found |= {part.pid, *descendants(part.pid)}
    return found


def _text(shown: Mapping[str, Any]) -> str:
    return "".join(part["text"] for item in shown["output"] for part in item["content"])


def complaints(part: Part, since: int) -> list[str]:
    """What genpool's own threads in a process complained of after the first `since` characters of its output."""
    ours = re.compile(
        r"(WARNING|ERROR|CRITICAL)/MainProcess\] (state server:|maintenance:|\S+: heartbeat:|looking after)"
    )
    return [line for line in part.output()[since:].splitlines() if ours.search(line)]


def warned(part: Part, since: int) -> list[str]:
    """Lines of level WARNING or worse, whoever wrote them, or that name a lost group; as `complaints`."""
    words = ("WARNING/", "ERROR/", "CRITICAL/", "NOGROUP")
    return [line for line in part.output()[since:].splitlines() if any(word in line for word in words)]
