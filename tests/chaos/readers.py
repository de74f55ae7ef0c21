"""Clients that read background streams to their ends, over whatever happens to the nodes, and keep account."""

from __future__ import annotations

import http.client
import itertools
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

#: A connection that says nothing for this long is broken; a stream without a new token for this long is lost.
LOST_S = 30.0
#: Between two attempts of a client to continue.
PAUSE_S = 0.03
TERMINAL = ("response.completed", "response.incomplete", "response.failed")


@dataclass(frozen=True, slots=True)
class Arrival:
    """News that a reader saw: when (monotonic), the characters it has by then, and over which of its connections."""

    at_s: float
    characters: int
    connection: int
    ended: bool


class Reader:
    """The client of one stream: submits it, and reads it to its end over as many connections as it takes, going on at
    the other node when one breaks. `lost` and `duplicated` count events by their sequence numbers."""

    def __init__(self, urls: Sequence[str], body: Mapping[str, Any], first: int) -> None:
        self._urls = urls
        self._body = dict(body)
        self._turn = first
        self._last = -1
        self._pieces: list[str] = []
        self._characters = 0
        self._key = secrets.token_hex(8)
        self.job = ""
        self.connection = 0
        self.arrivals: list[Arrival] = []
        self.final = ""
        self.lost = 0
        self.duplicated = 0

    @property
    def url(self) -> str:
        """The node that it reads from, or will try next."""
        return self._urls[self._turn % len(self._urls)]

    @property
    def ended(self) -> bool:
        """Whether it has seen the end."""
        return bool(self.arrivals) and self.arrivals[-1].ended

    @property
    def text(self) -> str:
        """What the events said."""
        return "".join(self._pieces)

    def run(self, give_up: threading.Event | None = None) -> None:
        """To the end, or until it shall give up."""
        while not self.ended and not (give_up and give_up.is_set()):
            with suppress(OSError, http.client.HTTPException):
                self._read() if self.job else self._submit()
            if not self.ended:
                self._turn += 1
                time.sleep(PAUSE_S)

    def first(self, accept: Callable[[Arrival], bool]) -> Arrival | None:
        """The first arrival that is accepted."""
        return next(filter(accept, list(self.arrivals)), None)

    def _submit(self) -> None:
        headers = {"Content-Type": "application/json", "Idempotency-Key": self._key}
        with self._connected() as connection:
            connection.request("POST", "/v1/responses", json.dumps(self._body | {"background": True}), headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
            if answer.status == 200:
                self.job = found["id"]
        self._turn -= 1  # the stream is read from where it was submitted

    def _read(self) -> None:
        self.connection += 1
        after = f"&starting_after={self._last}" if self._last >= 0 else ""
        with self._connected() as connection:
            connection.request("GET", f"/v1/responses/{self.job}?stream=true{after}")
            answer = connection.getresponse()
            if answer.status != 200:
                return
            for line in answer:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]))

    def _take(self, event: Mapping[str, Any]) -> None:
        if event["type"] == "error":
            raise http.client.HTTPException("an error in band")
        number = event["sequence_number"]
        if number <= self._last:
            self.duplicated += 1
            return
        self.lost += number - self._last - 1
        self._last = number
        if event["type"] == "response.output_text.delta":
            self._pieces.append(event["delta"])
            self._characters += len(event["delta"])
        ended = event["type"] in TERMINAL
        if ended:
            self.final = "".join(part["text"] for item in event["response"]["output"] for part in item["content"])
        if ended or event["type"] == "response.output_text.delta":
            self.arrivals.append(Arrival(time.monotonic(), self._characters, self.connection, ended))

    @contextmanager
    def _connected(self) -> Iterator[http.client.HTTPConnection]:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=LOST_S)
        try:
            yield connection
        finally:
            connection.close()


class Readers:
    """So many streams read at any time; when one ends, the next begins."""

    def __init__(self, urls: Sequence[str], bodies: Sequence[Mapping[str, Any]], texts: Sequence[str]) -> None:
        self._urls, self._bodies, self._texts = urls, bodies, texts
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._running: dict[int, Reader] = {}
        self._stopping = threading.Event()
        self._giving_up = threading.Event()
        self._threads: list[threading.Thread] = []
        self.problems: list[str] = []
        self.streams = self.lost = self.duplicated = self.different = 0

    def start(self, streams: int) -> None:
        """Begin to read."""
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(streams)]
        for thread in self._threads:
            thread.start()

    def running(self) -> list[Reader]:
        """The readers whose job exists and which have not seen its end."""
        with self._lock:
            return [reader for reader in self._running.values() if reader.job and not reader.ended]

    def stop(self) -> None:
        """Begin no more streams, and wait for the ends of those that run."""
        self._stopping.set()
        deadline_s = time.monotonic() + 2 * LOST_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        self._giving_up.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                number = next(self._numbers)
                which = number % len(self._bodies)
                reader = self._running[number] = Reader(self._urls, self._bodies[which], number)
            try:
                reader.run(self._giving_up)
            finally:
                with self._lock:
                    del self._running[number]
                    self._account(reader, self._texts[which])

    def _account(self, reader: Reader, text: str) -> None:
        self.streams += 1
        self.lost += reader.lost
        self.duplicated += reader.duplicated
        if not reader.ended:
            self.problems.append(f"{reader.job or 'a stream'} saw no end")
        elif not reader.text == reader.final == text:
            self.different += 1
            self.problems.append(f"{reader.job}: another text than undisturbed")
