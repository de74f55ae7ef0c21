"""One node as a process: errors of HTTP itself, probes, metrics, slow and oversize senders, start and stop."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai as sdk
import pytest
from flask import Flask
from flask.testing import FlaskClient

from tests.waiting import wait_until
from tests.webapp.api_process import ROOT, ApiProcess
from tests.webapp.playing_worker import MODEL, PlayingWorker
from webapp.sockets import client_gone

pytestmark = pytest.mark.usefixtures("worker")

BODY = {"model": MODEL, "input": "hi"}


# --- errors and ids


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "unknown_url"),
        ("GET", "//v1/models", 404, "unknown_url"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("BREW", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
        ("POST", "/v1/responses", 415, "unsupported_media_type"),
    ],
)
def test_every_error_has_the_one_shape(raw: httpx.Client, method: str, path: str, status: int, code: str) -> None:
    """Flask's own errors look like ours."""
    answer = raw.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    if status == 405:
        assert "GET" in answer.headers["allow"]


def test_a_bug_is_a_500_that_tells_nothing(app: Flask, caplog: pytest.LogCaptureFixture) -> None:
    """An unexpected exception shows neither its text nor a value to the client or the log, only its place."""
    text = "".join(["CAN", "ARY"])

    @app.get("/broken")
    def broken() -> str:
        raise RuntimeError(text)

    answer = app.test_client().get("/broken")
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (500, "internal_error")
    assert answer.headers["x-should-retry"] == "false"
    assert "CANARY" not in answer.text
    assert "CANARY" not in "".join(record.getMessage() for record in caplog.records if record.name == "genpool.webapp")
    assert "RuntimeError" in caplog.text and "broken" in caplog.text


def test_request_ids_come_back_when_they_are_safe(http: FlaskClient) -> None:
    """The caller's own id is repeated; anything that could break a log line or is too long is replaced."""
    assert http.get("/healthz", headers={"x-request-id": "trace-1:a/b"}).headers["x-request-id"] == "trace-1:a/b"
    for unsafe in ("x" * 129, "a b", "ä", "", "{}"):
        given = http.get("/nowhere", headers={"x-request-id": unsafe}).headers["x-request-id"]
        assert re.fullmatch(r"req_[0-9a-f]{32}", given)


# --- probes and catalogue


def test_models_are_those_that_are_enabled(http: FlaskClient) -> None:
    """OpenAI's list shape, and one model by name."""
    answer = http.get("/v1/models").get_json()
    assert (answer["object"], [model["id"] for model in answer["data"]]) == ("list", [MODEL])
    assert http.get(f"/v1/models/{MODEL}").get_json()["object"] == "model"
    assert http.get("/v1/models/disabled").status_code == 404


def test_ready_names_what_is_missing(http: FlaskClient, worker: PlayingWorker) -> None:
    """No worker, a wrong memory policy: each is named; alive it is all the same."""
    assert http.get("/readyz").get_json() == {
        "status": "ready",
        "models": {MODEL: "loaded"},
        "catalogue": {"version": 0, "error": None},
    }
    worker.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        worker.registry.retire(worker.rank, "life-1")
        answer = http.get("/readyz")
    finally:
        worker.client.config_set("maxmemory-policy", "noeviction")
    assert answer.status_code == 503
    missing = answer.get_json()["missing"]
    assert f"a worker for model {MODEL}" in missing
    assert any("noeviction" in item and "allkeys-lru" in item for item in missing)
    assert answer.get_json()["error"]["code"] == "not_ready"
    assert answer.headers["retry-after"].isdecimal()
    assert http.get("/healthz").get_json() == http.get("/health").get_json() == {"status": "ok"}


# --- metrics


def samples(text: str) -> dict[str, float]:
    """Every sample of a scrape."""
    lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_counters_are_the_same_on_every_process(node: ApiProcess) -> None:
    """Whichever process answers a scrape, the sum over all is shown; killing one takes nothing away."""
    name = 'genpool_http_request_total{method="GET",status="200"}'
    before = samples(httpx.get(f"{node.base_url}/metrics").text).get(name, 0)
    for _ in range(40):
        assert httpx.get(f"{node.base_url}/v1/models").status_code == 200
    seen = {samples(httpx.get(f"{node.base_url}/metrics").text)[name] for _ in range(12)}
    assert seen == {before + 40}
    pids = children(node)
    assert len(pids) == 2
    subprocess.run(["kill", "-9", pids[0]], check=True)
    wait_until(lambda: len(children(node)) == 2 and pids[0] not in children(node), description="a new process")
    assert samples(httpx.get(f"{node.base_url}/metrics").text)[name] == before + 40


def children(node: ApiProcess) -> list[str]:
    """Process ids of the node's workers."""
    assert node.process is not None
    return Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children").read_text().split()


def raw_answer(node: ApiProcess, sent: bytes) -> tuple[int, str]:
    """Status and id of the answer to these bytes."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=20) as sock:
        sock.sendall(sent)
        head = b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")[0].decode()
    ids = re.findall(r"^x-request-id: (.*)$", head, re.MULTILINE | re.IGNORECASE)
    assert len(ids) == 1
    return int(head.split()[1]), ids[0].strip()


POST = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\n"
#: What the server answers by itself: to whole heads, in the main loop and by a thread, and to what is none.
REFUSED = {
    b"GET / HTTP/1.1\r\nX-Request-ID: %b\r\n\r\n": 400,
    POST + b"X-Request-ID: %b\r\nContent-Length: a\r\n\r\n": 400,
    POST + b"x-request-id:%b\r\nExpect: miracles\r\nContent-Length: 5\r\n\r\n": 417,
    POST + b"X-Request-ID: %b\r\nTransfer-Encoding: gzip\r\n\r\n": 501,
    POST + b"X-Request-ID: %b\r\n" + b"a: b\r\n" * 101 + b"\r\n": 431,
    POST + b"X-Request-ID: %b\r\nContent-Length: 5\r\n\r\n{": 408,
}


def test_the_servers_own_answers_are_named_and_counted(start_node: Callable[..., ApiProcess]) -> None:
    """By the caller's id where the head was whole and the id is safe; in the figures of requests, by status."""
    node = start_node(SERVER__RECEIVE_SECONDS="1")

    def counted() -> dict[int, float]:
        found = samples(httpx.get(f"{node.base_url}/metrics").text)
        names = {status: f'genpool_http_request_total{{method="(none)",status="{status}"}}' for status in given}
        return {status: found.get(name, 0) for status, name in names.items()}

    given = dict.fromkeys([*REFUSED.values(), 414], 0)
    assert counted() == given
    for sent, status in REFUSED.items():
        assert raw_answer(node, sent % b"trace-1:a/b") == (status, "trace-1:a/b")
        given[status] += 1
    for unsafe in (b"a b", b"{}", b"x" * 129, b"a\r\nX-Request-ID: b", b"\xe4"):
        status, name = raw_answer(node, next(iter(REFUSED)) % unsafe)
        assert (status, bool(re.fullmatch(r"req_[0-9a-f]{32}", name))) == (400, True)
        given[400] += 1
    status, name = raw_answer(node, b"X-Request-ID: a" + b"x" * 9000)
    assert (status, name[:4]) == (414, "req_")
    given[414] += 1
    assert counted() == given


def test_strangers_cannot_add_series(http: FlaskClient) -> None:
    """Unknown paths, ids, models and methods share the series that exist."""
    for place in ("/v1/models", "/nowhere", f"/v1/responses/resp_{MODEL}.0_{'0' * 32}"):
        http.get(place)
        http.open(place, method="BREW0")
    http.post("/v1/responses", json={**BODY, "model": "nope"})
    before = set(samples(http.get("/metrics").text))
    for i in range(50):
        http.get(f"/nowhere/{i}")
        http.open(f"/nowhere/{i}", method=f"BREW{i}")
        http.get(f"/v1/responses/resp_{MODEL}.0_{i:032x}")
        http.post("/v1/responses", json={**BODY, "model": f"nope{i}"})
    assert set(samples(http.get("/metrics").text)) == before


def test_depth_gauges_follow_the_queue(http: FlaskClient, worker: PlayingWorker) -> None:
    """Queued and running jobs of each model, back to 0 when they end."""

    def depth() -> tuple[float, float]:
        found = samples(http.get("/metrics").text)
        return found[f'genpool_jobs_queued{{model="{MODEL}"}}'], found[f'genpool_jobs_running{{model="{MODEL}"}}']

    ids = [http.post("/v1/responses", json={**BODY, "background": True}).get_json()["id"] for _ in range(3)]
    assert depth() == (3, 0)
    worker.take()
    assert depth() == (2, 1)
    for job in ids:
        assert http.post(f"/v1/responses/{job}/cancel").status_code == 200
    assert depth() == (0, 0)


def test_metrics_work_without_a_state_server(make_app: Callable[..., Flask], tmp_path: Path) -> None:
    """A scrape says that the state server is away; it does not fail."""
    app = make_app(f"unix://{tmp_path}/nobody.sock")
    found = samples(app.test_client().get("/metrics").text)
    assert found["genpool_state_up"] == 0
    assert not any(name.startswith("genpool_jobs") for name in found)


# --- senders


def chunked(node: ApiProcess, body: bytes) -> bytes:
    """The answer to a body sent in chunks, without a Content-Length."""
    with socket.create_connection(("127.0.0.1", node.port), timeout=10) as sock:
        sock.sendall(
            b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        for start in range(0, len(body), 1000):
            piece = body[start : start + 1000]
            sock.sendall(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        sock.sendall(b"0\r\n\r\n")
        return b"".join(iter(lambda: sock.recv(65536), b""))


def test_chunked_bodies_have_the_same_limit(narrow_node: ApiProcess, worker: PlayingWorker) -> None:
    """At the limit a chunked body is read whole; one byte over, it is a 413, also when the surplus is only blanks."""
    node = narrow_node
    body = json.dumps({**BODY, "background": True}).encode()
    assert b" 200 " in chunked(node, body.ljust(4096)).splitlines()[0]
    too_large = chunked(node, body.ljust(4097))
    assert b" 413 " in too_large.splitlines()[0]
    assert b'"code":"request_too_large"' in too_large
    assert b" 413 " in chunked(node, body.ljust(9000)).splitlines()[0]
    oversize = httpx.post(
        f"{node.base_url}/v1/responses", content=b" " * 4097, headers={"Content-Type": "application/json"}
    )
    assert oversize.status_code == 413
    assert worker.held == 1


def test_half_a_request_does_not_hold_a_thread(start_node: Callable[..., ApiProcess]) -> None:
    """A node with one thread serves while a head, a body, and a connection without a byte are on their way; all three
    are cut when their time is over, what had begun with a 408."""
    node = start_node(SERVER__THREADS="1", SERVER__RECEIVE_SECONDS="1.5")
    post = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
    begun = {b"": b"", b"GET /healthz HTTP/1.1\r\nHost:": b"HTTP/1.1 408 ", post: b"HTTP/1.1 408 "}
    socks = [socket.create_connection(("127.0.0.1", node.port), timeout=40) for _ in begun]
    for sock, part in zip(socks, begun, strict=True):
        sock.sendall(part)
    assert httpx.get(f"{node.base_url}/healthz", timeout=10).status_code == 200
    for sock, answer in zip(socks, begun.values(), strict=True):
        with sock:
            said = b"".join(iter(lambda sock=sock: sock.recv(65536), b""))
        assert said.startswith(answer)
        assert (b'"code":"request_timeout"' in said) == bool(answer)


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname(), timeout=10)
        server, _ = listener.accept()
    return server, client


def test_a_closed_connection_is_noticed_and_a_pipelined_one_is_not() -> None:
    """Looking takes no byte away."""
    server, client = tcp_pair()
    with server:
        assert not client_gone(server)
        client.sendall(b"GET")
        assert not client_gone(server)
        assert server.recv(3) == b"GET"
        client.close()
        wait_until(lambda: client_gone(server), description="the end to arrive")
    assert client_gone(server)
    assert not client_gone(None)


@pytest.mark.parametrize("leave", [socket.socket.close, lambda sock: sock.shutdown(socket.SHUT_WR)])
def test_bytes_sent_ahead_hide_no_end(leave: Callable[[socket.socket], None]) -> None:
    """Closed, or half closed, behind bytes that nobody has read: gone."""
    server, client = tcp_pair()
    with server, client:
        client.sendall(b"GET")
        assert not client_gone(server)
        leave(client)
        wait_until(lambda: client_gone(server), description="the end to be seen behind the bytes")
        assert server.recv(3) == b"GET"


def test_where_the_system_does_not_tell_the_end_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Systems without POLLRDHUP."""
    monkeypatch.setattr("webapp.sockets.CLOSED", 0)
    server, client = tcp_pair()
    with server:
        assert not client_gone(server)
        client.close()
        wait_until(lambda: client_gone(server), description="the end to arrive")


def test_waiting_requests_leave_threads_for_probes(
    start_node: Callable[..., ApiProcess], worker: PlayingWorker
) -> None:
    """When all places for waiting are taken, one more is a 503 that left nothing behind; polls and probes work on."""
    node = start_node(SERVER__THREADS="2")
    with node.openai() as client:
        stream = client.responses.create(model=MODEL, input="Wait", stream=True)
        next(stream)
        with pytest.raises(sdk.InternalServerError) as busy:
            client.responses.create(model=MODEL, input="One more")
        assert busy.value.code == "too_many_waiting"
        assert busy.value.response.headers["retry-after"] == "1"
        assert worker.held == 1
        assert httpx.get(f"{node.base_url}/healthz").status_code == 200
        stream.close()
        wait_until(lambda: worker.held == 0, description="the stream's job to be cancelled")
        with worker.answering("x"):
            assert client.responses.create(model=MODEL, input="Now").output_text == "x"


# --- start and stop


def test_prompts_are_in_no_log(node: ApiProcess, raw: httpx.Client, worker: PlayingWorker) -> None:
    """Neither good nor refused requests leave their text in the node's output."""
    with worker.answering("ZQ-CANARY-answer"):
        raw.post("/v1/responses", json={**BODY, "input": "ZQ-CANARY-17"})
    raw.post("/v1/responses", json={**BODY, "input": "ZQ-CANARY-17", "bogus": 1})
    raw.post("/v1/responses?key=ZQ-CANARY-17", content=b'{"ZQ-CANARY-17')
    assert "CANARY" not in node.log()


def test_sigterm_cuts_streams_and_answers_waits_without_cancelling(
    start_node: Callable[..., ApiProcess], other_node: ApiProcess, worker: PlayingWorker
) -> None:
    """A stopping node breaks Responses streams, which go on elsewhere; chat streams say so; waits get a job's id."""
    node = start_node()
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    with node.openai() as client, httpx.Client(base_url=node.base_url, timeout=20) as raw, ThreadPoolExecutor() as pool:
        stream = client.responses.create(model=MODEL, input="Tell", stream=True)
        first = next(stream)
        assert first.type == "response.created"
        waiting = pool.submit(raw.post, "/v1/responses", json=BODY)
        chatting = pool.submit(raw.post, "/v1/chat/completions", json=chat)
        wait_until(lambda: worker.held == 3, description="all jobs to be queued")
        assert node.process is not None
        node.process.send_signal(signal.SIGTERM)
        with pytest.raises(sdk.APIConnectionError):
            list(stream)
        stopped = waiting.result()
        assert (stopped.status_code, stopped.headers["x-should-retry"]) == (504, "false"), "its job stays enqueued"
        assert stopped.headers["connection"] == "close"
        assert stopped.headers["location"] == f"/v1/responses/{stopped.json()['id']}"
        assert (stopped.json()["error"]["code"], stopped.json()["status"]) == ("node_stopping", "queued")
        assert stopped.json()["queue_position"] in range(3)
        assert '"code":"node_stopping"' in chatting.result().text
        assert chatting.result().text.endswith("data: [DONE]\n\n")
    assert node.stop() == 0
    assert worker.held == 3
    with worker.answering("x"), other_node.openai() as elsewhere:
        events = list(elsewhere.responses.retrieve(first.response.id, stream=True, starting_after=0))
        assert events[-1].type == "response.completed"
        wait_until(lambda: worker.held == 0, description="the other jobs")
        assert elsewhere.responses.retrieve(stopped.json()["id"]).output_text == "x"


def test_other_addresses_than_loopback_are_refused(redis_url: str, tmp_path: Path) -> None:
    """Without API keys nobody but this machine may connect, however the address was given, a socket's of somebody else
    included; with keys everybody may try."""
    environment = {
        "PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "GENPOOL_STATE__URL": redis_url, "TMPDIR": str(tmp_path),
    }  # fmt: skip

    def start(*arguments: str, pass_fds: tuple[int, ...] = (), **variables: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "gunicorn", "-c", "python:webapp.gunicorn_conf", *arguments]
        return subprocess.run(
            [*argv, "webapp.app:create_app()"], check=False, cwd=tmp_path, env=environment | variables,
            capture_output=True, text=True, timeout=30, pass_fds=pass_fds,
        )  # fmt: skip

    for refused in (
        start("-b", "0.0.0.0:0"),
        start("-b", "[::]:0"),
        start(GENPOOL_SERVER__HOST="192.0.2.1"),
        start(GENPOOL_SERVER__HOST="some.host.example"),
    ):
        assert refused.returncode != 0
        assert "Refusing to listen on" in refused.stderr and "no API keys are configured" in refused.stderr
    with socket.create_server(("0.0.0.0", 0)) as handed_over:
        os.set_inheritable(handed_over.fileno(), True)
        by_descriptor = start("-b", f"fd://{handed_over.fileno()}", pass_fds=(handed_over.fileno(),))
        assert by_descriptor.returncode != 0
        assert "Refusing to listen on 0.0.0.0" in by_descriptor.stderr
    keys = tmp_path / "keys"
    keys.write_text("# none yet\n")
    empty = start("-b", "0.0.0.0:0", GENPOOL_SERVER__KEYS_FILE=str(keys))
    assert empty.returncode != 0 and "holds no API key" in empty.stderr
    keys.write_text("alice user sha256:nonsense-ZQ-CANARY\n")
    broken = start("-b", "0.0.0.0:0", GENPOOL_SERVER__KEYS_FILE=str(keys))
    assert broken.returncode != 0 and f"{keys}, line 1" in broken.stderr and "CANARY" not in broken.stderr
