"""Clients that say little, slowly or nothing: they are cut in time and hold no thread, so probes and generations are
served as if they were not there."""

from __future__ import annotations

import itertools
import json
import selectors
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
import pytest

from pool.rules import jobs
from tests.faults.conftest import StartSystem
from tests.faults.raw_http import head, port_of, send
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

THREADS = 8
CUT_S = 3
#: Long enough for everybody to have been cut meanwhile.
LONG = "repeat 300 x"
#: A probe's answer takes that long at most; 1 s on a machine of its own.
PROBE_S = 2.0
POST = {"Content-Type": "application/json"}
#: What a slow client has sent when it becomes slow.
BEGINNINGS = {
    "a head": b"GET /healthz HTTP/1.1\r\nX-Slow: ",
    "a request line": b"G",
    "a body": head("POST", "/v1/responses", {**POST, "Content-Length": "100000"}) + b"{",
    "a chunk": head("POST", "/v1/responses", {**POST, "Transfer-Encoding": "chunked"}) + b"ffff\r\n{",
    "a chunk's size": head("POST", "/v1/responses", {**POST, "Transfer-Encoding": "chunked"}),
    "a second request": b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\nGET /healthz HTTP/1.1\r\nX-Slow: ",
}


class Crowd:
    """Connections of which some send a byte a second and some nothing, until they are cut."""

    def __init__(self, port: int, slow: int, silent: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._open: dict[socket.socket, bool] = {}
        beginnings = itertools.cycle(BEGINNINGS.values())
        self.began_s = time.monotonic()
        self.last_cut_s = self.began_s
        for number in range(slow + silent):
            sock = socket.create_connection(("127.0.0.1", port), timeout=10)
            if number < slow:
                sock.sendall(next(beginnings))
            sock.setblocking(False)
            self._open[sock] = number < slow
            self._selector.register(sock, selectors.EVENT_READ)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def __len__(self) -> int:
        """Those that have not been cut."""
        return len(self._open)

    def _run(self) -> None:
        next_byte_s = time.monotonic() + 1
        while not self._stop.is_set():
            for key, _ in self._selector.select(0.1):
                self._read(key.fileobj)
            if time.monotonic() >= next_byte_s:
                next_byte_s += 1
                for sock in [sock for sock, slow in self._open.items() if slow]:
                    self._send(sock)

    def _read(self, sock: object) -> None:
        assert isinstance(sock, socket.socket)
        try:
            gone = sock.recv(65536) == b""
        except OSError:
            gone = True
        if gone:
            self._forget(sock)

    def _send(self, sock: socket.socket) -> None:
        try:
            sock.send(b"x")
        except OSError:
            self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        self.last_cut_s = time.monotonic()
        self._selector.unregister(sock)
        del self._open[sock]
        sock.close()

    def close(self) -> None:
        """Let the rest go."""
        self._stop.set()
        self._thread.join()
        for sock in list(self._open):
            self._forget(sock)
        self._selector.close()


@contextmanager
def crowd(system: System, *, slow: int, silent: int) -> Iterator[Crowd]:
    """A crowd for the time of a block."""
    made = Crowd(port_of(system), slow, silent)
    try:
        yield made
    finally:
        made.close()


def probe(system: System) -> None:
    """/healthz, on a connection of its own."""
    began_s = time.monotonic()
    assert httpx.get(f"{system.api_url(system.apis[0])}/healthz", timeout=20).status_code == 200
    assert time.monotonic() - began_s < PROBE_S


def serves_all_the_while(system: System, people: Crowd, *, within_s: float) -> None:
    """Probe and generate until the last of them was cut, which is no later than that."""
    url = f"{system.api_url(system.apis[0])}/v1/responses"
    served = 0
    while people and time.monotonic() < people.began_s + within_s + 5:
        probe(system)
        answer = httpx.post(url, json={"model": SCRIPTED, "input": "say x"}, timeout=20)
        assert answer.json()["output"][0]["content"][0]["text"] == "x"
        served += 1
    assert not people, f"{len(people)} connections were not cut"
    assert people.last_cut_s - people.began_s < within_s
    assert served > 5


SHORT: Mapping[str, Mapping[str, float]] = {
    "server": {"threads": THREADS, "receive_seconds": CUT_S, "idle_seconds": CUT_S}
}


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """A node with few threads that waits for nobody longer than a moment, and one worker."""
    return start_shared_system(workers=1, delay_ms=20, sections=SHORT)


def test_a_crowd_holds_up_nobody_and_is_cut(system: System) -> None:
    """Many times more of them than threads. A stream and a wait that outlast them all are not cut."""
    wait = system.http.build_request(
        "POST", f"{system.api_url(system.apis[0])}/v1/responses", json={"model": SCRIPTED, "input": LONG}
    )
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(system.http.send(wait)))
    waiting.start()
    with (
        system.http.stream("POST", str(wait.url), json={"model": SCRIPTED, "input": LONG, "stream": True}) as stream,
        crowd(system, slow=60, silent=60) as people,
    ):
        serves_all_the_while(system, people, within_s=CUT_S + 4)
        events = [json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: ")]
    waiting.join()
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "x" * 300
    assert answers[0].json()["output"][0]["content"][0]["text"] == "x" * 300
    for job in (events[-1]["response"]["id"], answers[0].json()["id"]):
        assert system.record(job).state == jobs.COMPLETED
    system.assert_recovered()


def test_clients_that_never_close_hold_up_nobody(system: System) -> None:
    """Their answers are given, ours is the first side to close, and nothing waits for theirs; the same for those who
    keep a connection and send nothing more."""
    last = head("GET", "/healthz", {})
    kept = b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"
    socks = [socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) for _ in range(40)]
    for number, sock in enumerate(socks):
        sock.sendall(last if number % 2 else kept)
    probe(system)
    for sock in socks:
        assert b"".join(iter(lambda sock=sock: sock.recv(65536), b"")).startswith(b"HTTP/1.1 200 ")
        sock.close()
    system.assert_recovered()


def test_a_client_is_told_before_it_is_cut(system: System) -> None:
    """408, with a word to clients that it is of no use to send the same again; none to those who never began."""
    with socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) as sock:
        sock.sendall(BEGINNINGS["a body"])
        said = b"".join(iter(lambda: sock.recv(65536), b"")).lower()
    assert said.startswith(b"http/1.1 408 ") and b"x-should-retry: false" in said and b'"request_timeout"' in said
    system.assert_recovered()


def test_a_request_that_a_stop_cuts_off_may_be_sent_again(start_system: StartSystem) -> None:
    """503 with Retry-After instead of 408: it did not come too slowly, and nothing of it was carried out."""
    system = start_system(workers=0)
    with socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) as sock:
        sock.sendall(BEGINNINGS["a body"])
        assert system.http.get(f"{system.api_url(system.apis[0])}/healthz").status_code == 200
        system.apis[0].signal(signal.SIGTERM)
        said = b"".join(iter(lambda: sock.recv(65536), b"")).lower()
    assert said.startswith(b"http/1.1 503 ") and b"retry-after: 1" in said and b'"node_stopping"' in said
    system.apis[0].wait()


def test_a_body_is_asked_for_when_its_client_waits_to_be_asked(system: System) -> None:
    """`Expect: 100-continue`: once, and not for a body that will be refused."""
    body = json.dumps({"model": SCRIPTED, "input": "say x"}).encode()
    for length, answers in ((len(body), (b"HTTP/1.1 100 ", b"HTTP/1.1 200 ")), (2**30, (b"HTTP/1.1 413 ",))):
        with socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) as sock:
            fields = {**POST, "Content-Length": str(length), "Expect": "100-continue"}
            sock.sendall(head("POST", "/v1/responses", fields))
            first = sock.recv(65536)
            assert first.startswith(answers[0])
            if len(answers) > 1:
                sock.sendall(body)
                rest = b"".join(iter(lambda sock=sock: sock.recv(65536), b""))
                assert rest.startswith(answers[1]) and b"HTTP/1.1 100" not in rest
    system.assert_recovered()


def test_requests_in_one_go_are_answered_in_order(system: System) -> None:
    """Pipelined, the last one arriving in pieces: each gets its own answer; what follows a body is a request, what is
    in it is none."""
    inner = b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n"
    sent = [
        b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /first HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(inner) + inner,
        b"POST /second HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x\r\n" % len(inner) + inner + b"\r\n0\r\nx: y\r\n\r\n",
        head("GET", "/v1/models", {}),
    ]
    whole = b"".join(sent)
    with socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) as sock:
        sock.sendall(whole[:-20])
        for at in range(20, 0, -1):
            sock.sendall(whole[-at:][:1])
        answers = b"".join(iter(lambda: sock.recv(65536), b""))
    statuses = [int(part[:3]) for part in answers.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 404, 404, 200]


def test_large_requests_share_a_bounded_memory(start_system: StartSystem) -> None:
    """More large bodies at once than there is memory for, none of them whole yet: who began first is told to come back,
    the others end well."""
    limit, last = 4 * 2**20, 100_000  # 17 beginnings are over 64 MiB, 16 are not
    system = start_system(workers=1, delay_ms=1, sections={"limits": {"body_bytes": limit}})
    body = json.dumps({"model": SCRIPTED, "input": "say x"}).encode().ljust(limit)
    whole = head("POST", "/v1/responses", {**POST, "Content-Length": str(limit)}) + body
    socks = [socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) for _ in range(17)]
    for sock in socks:
        sock.sendall(whole[:-last])
    first, *others = socks
    said = b"".join(iter(lambda: first.recv(65536), b"")).lower()
    assert said.startswith(b"http/1.1 503 ") and b"retry-after: 1\r\n" in said and b'"too_many_bodies"' in said
    for sock in others:
        sock.sendall(whole[-last:])
        assert b"".join(iter(lambda sock=sock: sock.recv(65536), b"")).startswith(b"HTTP/1.1 200 ")
    for sock in socks:
        sock.close()
    assert send(port_of(system), "POST", "/v1/responses", POST, body).status == 200, "all of it was given back"
    system.assert_recovered()


def test_a_node_without_room_cuts_who_is_idle(start_system: StartSystem) -> None:
    """Connections at their limit, all silent, none due yet: a new client is served all the same."""
    system = start_system(workers=1, sections={"server": {"threads": 4}}, gunicorn=["--worker-connections", "30"])
    with crowd(system, slow=20, silent=40) as people:
        for _ in range(5):
            probe(system)
            assert send(port_of(system), "GET", "/v1/models").status == 200
        wait_until(lambda: len(people) <= 30, description="the surplus to be cut")
    system.assert_recovered()


def test_three_hundred_of_each_are_cut_within_half_a_minute(start_system: StartSystem) -> None:
    """With the settings as they come."""
    system = start_system(workers=1, delay_ms=5, sections={"server": {"threads": 256}})
    with crowd(system, slow=300, silent=300) as people:
        serves_all_the_while(system, people, within_s=30)
    system.assert_recovered()
