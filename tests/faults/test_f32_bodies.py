"""F32: bodies too large, too deep, in pieces, compressed, of another shape: a clear answer that can be read, no 500, no
memory beyond the limit."""

from __future__ import annotations

import gzip
import http.client
import json
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.conftest import StartSystem
from tests.faults.raw_http import Answer, chunks, exchange, head, port_of, post, send
from tests.processes import descendants
from tests.system import SCRIPTED, System

MIB = 2**20
LIMIT = 8 * MIB
HUGE = 50 * MIB
RESPONSES = "/v1/responses"
GOOD = json.dumps({"model": SCRIPTED, "input": "say x"}).encode()
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One node with the default limit, one worker."""
    return start_shared_system(workers=1, delay_ms=1)


def memory(system: System, field: str) -> int:
    """A figure of the node's process that serves, in bytes: VmRSS now, VmHWM the most there ever was."""
    (pid,) = descendants(system.apis[0].pid)
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) * 1024


@pytest.fixture
def little_memory(system: System) -> Iterator[None]:
    """Twice the limit is the most that the node's process grows by in the block."""
    # What a first request costs once, threads and connections, is not the body's.
    assert post(port_of(system), RESPONSES, GOOD).status == 200
    (pid,) = descendants(system.apis[0].pid)
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the most there ever was starts anew
    before = memory(system, "VmRSS")
    yield
    assert memory(system, "VmHWM") - before < 2 * LIMIT


SHAPES = {
    b"[" * 20_000: "deep",
    b'{"a":' * 20_000: "deep",
    b'{"input":' + b"[" * 64 + b"]" * 64 + b"}": "deep",
    b"3": "object",
    b"null": "object",
    b"[]": "object",
    b'"x"': "object",
    b"": "empty",
    b"{": "valid JSON",
    b'{"model": "scripted", "input": "x", "input": "y"}': "more than once",
    b'{"model": "scripted", "input": "x", "inputs": "y"}': "Unknown parameter",
    b'{"model": "scripted", "input": {}}': "input",
    b'{"model": "scripted", "input": 1}': "input",
    b'{"model": "scripted", "input": "x", "prompt": {}}': "prompt",
}


def test_f32_other_shapes_are_refused_by_name(system: System) -> None:
    """Depth, scalars, repeated and unknown fields, wrong types: 400, and the answer says which."""
    for body, word in SHAPES.items():
        assert word in post(port_of(system), RESPONSES, body).error(400)["message"], body[:40]
    many = b'{"model": "scripted", ' + b", ".join(b'"k%d": 1' % i for i in range(300_000))
    twice = post(port_of(system), RESPONSES, many + b', "k299999": 1}').error(400)
    assert twice["param"] == "k299999", "named, and found without comparing each with each"
    send(port_of(system), "POST", RESPONSES, {"Content-Type": "text/plain"}, GOOD).error(415)
    system.assert_recovered()


def too_large(answer: Answer) -> None:
    """A 413 after which the connection ends."""
    assert answer.error(413)["code"] == "request_too_large"
    assert str(LIMIT) in answer.json()["error"]["message"]


@pytest.mark.usefixtures("little_memory")
def test_f32_a_huge_body_ends_in_an_answer_that_can_be_read(system: System) -> None:
    """50 MB with a length and in chunks, by a client that sends all of it before it reads: 413, no broken pipe."""
    piece = b" " * MIB
    with_length = head("POST", RESPONSES, {**JSON, "Content-Length": str(HUGE)})
    too_large(exchange(port_of(system), with_length, *[piece] * (HUGE // MIB)))
    in_chunks = head("POST", RESPONSES, {**JSON, "Transfer-Encoding": "chunked"})
    chunk = b"100000\r\n" + piece + b"\r\n"
    too_large(exchange(port_of(system), in_chunks, *[chunk] * (HUGE // MIB), b"0\r\n\r\n"))
    one_chunk = f"{HUGE:x}\r\n".encode()
    too_large(exchange(port_of(system), in_chunks, one_chunk, *[piece] * (HUGE // MIB), b"\r\n0\r\n\r\n"))
    with httpx.Client(timeout=20) as client:
        url = system.api_url(system.apis[0]) + RESPONSES
        assert client.post(url, content=piece * 50, headers=JSON).status_code == 413
    nowhere = exchange(port_of(system), head("POST", "/no", {"Content-Length": str(HUGE)}), *[piece] * (HUGE // MIB))
    assert nowhere.error(404)


@pytest.mark.usefixtures("little_memory")
def test_f32_a_bomb_is_never_expanded(system: System) -> None:
    """Many times the limit in a fraction of it: 413, in each coding, with a length and in chunks."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    bomb = b"".join(packer.compress(b" " * MIB) for _ in range(256)) + packer.flush()
    assert len(bomb) < 2 * MIB
    too_large(post(port_of(system), RESPONSES, bomb, Content_Encoding="gzip"))
    too_large(post(port_of(system), RESPONSES, zlib.compress(b" " * 100 * MIB), Content_Encoding="deflate"))
    fields = {**JSON, "Content-Encoding": "gzip", "Transfer-Encoding": "chunked"}
    too_large(exchange(port_of(system), head("POST", RESPONSES, fields), *chunks(bomb, 65536)))


def test_f32_the_limit_itself_is_allowed(system: System) -> None:
    """To the byte: plain, in chunks, and expanded; one more is too large."""
    full, over = GOOD.ljust(LIMIT), GOOD.ljust(LIMIT + 1)
    chunked = head("POST", RESPONSES, {**JSON, "Transfer-Encoding": "chunked"})
    assert post(port_of(system), RESPONSES, full).status == 200
    assert exchange(port_of(system), chunked, *chunks(full, 65536)).status == 200
    assert post(port_of(system), RESPONSES, gzip.compress(full), Content_Encoding="gzip").status == 200
    too_large(post(port_of(system), RESPONSES, over))
    too_large(exchange(port_of(system), chunked, *chunks(over, 65536)))
    too_large(post(port_of(system), RESPONSES, gzip.compress(over), Content_Encoding="gzip"))
    system.assert_recovered()


def test_f32_compressed_bodies_are_read(system: System) -> None:
    """gzip and both things that are called deflate; cut, extended or other streams are refused."""
    raw = zlib.compressobj(9, zlib.DEFLATED, -15)
    packed = {"gzip": gzip.compress(GOOD), "X-Gzip": gzip.compress(GOOD), "deflate": zlib.compress(GOOD)}
    for coding, body in packed.items():
        assert post(port_of(system), RESPONSES, body, Content_Encoding=coding).status == 200
    bare = raw.compress(GOOD) + raw.flush()
    assert post(port_of(system), RESPONSES, bare, Content_Encoding="deflate").status == 200
    for broken in (packed["gzip"][:-4], packed["gzip"] + b"x", packed["gzip"] * 2, GOOD, b"", packed["deflate"]):
        assert post(port_of(system), RESPONSES, broken, Content_Encoding="gzip").error(400)
    for coding in ("br", "zstd", "compress", "gzip, gzip", "identity, gzip"):
        answer = post(port_of(system), RESPONSES, packed["gzip"], Content_Encoding=coding)
        assert answer.error(415)["code"] == "unsupported_media_type"
    system.assert_recovered()


BAD_FRAMES = {
    "no size": b"zz\r\nab\r\n0\r\n\r\n",
    "a sign": b"-1\r\nab\r\n0\r\n\r\n",
    "no end of chunk": b"2\r\nabXX0\r\n\r\n",
    "a bare return in an extension": b"2;a=\rb\r\nab\r\n0\r\n\r\n",
    "a line feed in an extension": b"2;a=\nb\r\nab\r\n0\r\n\r\n",
    "a trailer without a colon": b"2\r\n{}\r\n0\r\nnocolon\r\n\r\n",
    "a trailer that frames": b"2\r\n{}\r\n0\r\nContent-Length: 5\r\n\r\n",
    "a folded trailer": b"2\r\n{}\r\n0\r\nX: a\r\n b\r\n\r\n",
    "too many trailers": b"2\r\n{}\r\n0\r\n" + b"X: a\r\n" * 101 + b"\r\n",
    "an endless size line": b"2;" + b"x" * 9000,
    "bare line feeds": b"2\nab\n0\n\n" + b"x" * 9000,
    "endless trailers": b"0\r\n" + b"a: b\r\n" * 200_000,
    "a chunk a byte": b"1\r\n \r\n" * 200_000,
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_f32_broken_chunks_are_the_client_s_error(system: System, name: str) -> None:
    """400 or 413 at once, never a 500, and nobody waits for the rest."""
    chunked = head("POST", RESPONSES, {**JSON, "Transfer-Encoding": "chunked", "Connection": "keep-alive"})
    answer = exchange(port_of(system), chunked, BAD_FRAMES[name])
    assert answer.error(400, 413, 431)
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("size", [1, 64 * 1024, 65 * 1024, LIMIT])
def test_f32_a_body_that_nobody_reads_keeps_its_connection(system: System, size: int) -> None:
    """An answer that promises the connection is followed by another over the same one, whatever its body's size."""
    connection = http.client.HTTPConnection("127.0.0.1", port_of(system), timeout=20)
    connection.connect()
    connection.auto_open = 0
    for path, content_type, status in [(RESPONSES, "text/plain", 415), ("/nowhere", "application/json", 404)] * 2:
        connection.request("POST", path, b"x" * size, {"Content-Type": content_type})
        answer = connection.getresponse()
        assert answer.status == status
        assert answer.getheader("connection") == "keep-alive"
        answer.read()
    connection.close()


@pytest.mark.parametrize("name", BAD_FRAMES)
@pytest.mark.parametrize("path", ["/nowhere", "/v1/responses"])
def test_f32_broken_chunks_end_their_connection_as_announced(system: System, name: str, path: str) -> None:
    """Also where nobody reads the body; what follows is no request."""
    chunked = head("POST", path, {**JSON, "Transfer-Encoding": "chunked", "Connection": "keep-alive"})
    with socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) as sock:
        sock.sendall(chunked + BAD_FRAMES[name] + head("GET", "/healthz", {}))
        said = b"".join(iter(lambda: sock.recv(65536), b""))
    assert said.count(b"HTTP/1.1 ") == 1 and b"\r\nConnection: close\r\n" in said


#: Heads of bodies that never come.
UNASKED = {
    "a miracle": ({"Content-Length": "9", "Expect": "miracles"}, 417),
    "a miracle too": ({"Content-Length": "9", "Expect": "100-continue, miracles"}, 417),
    "a miracle in chunks": ({"Transfer-Encoding": "chunked", "Expect": "miracles"}, 417),
    "twice chunked": ({"Transfer-Encoding": "chunked, chunked"}, 501),
    "packed and chunked": ({"Transfer-Encoding": "gzip, chunked"}, 501),
    "a bent name": ({"Transfer-Encoding": "\x0bchunked"}, 501),
}


@pytest.mark.parametrize("name", UNASKED)
def test_f32_a_head_that_asks_too_much_is_refused_before_its_body(system: System, name: str) -> None:
    """At once: whoever waits for a 100 would wait forever."""
    fields, status = UNASKED[name]
    answer = exchange(port_of(system), head("POST", RESPONSES, {**JSON, **fields, "Connection": "keep-alive"}))
    assert answer.error(status) and answer.headers["connection"] == "close"


@pytest.mark.parametrize("said", ["close", "keep-alive, close", "Close ,x", "x,close"])
def test_f32_a_client_that_says_close_is_heard(system: System, said: str) -> None:
    """Among other words, too; the answer says so, and the connection ends with it."""
    with socket.create_connection(("127.0.0.1", port_of(system)), timeout=20) as sock:
        sock.sendall(head("GET", "/healthz", {"Connection": said}))
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"\r\nConnection: close\r\n" in answer


HEADS = {
    b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nHost: x\r\n\r\n": 414,
    b"G" * 9000: 414,
    b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9000 + b"\r\n\r\n": 431,
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 101 + b"\r\n": 431,
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 20_000: 431,
    b"nonsense\r\n\r\n": 400,
    b"\r\n\r\n": 400,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n": 400,
    b"GET / HTTP/1.1\nHost: x\n\n": 400,
    b"GET / HTTP/9.9\r\nHost: x\r\n\r\n": 400,
    b"get / HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\nHost: y\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nX: Host: x\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHo st: x\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\nA: b\x00c\r\n\r\n": 400,
    b"GET / HTTP/1.1\r\nHost: x\r\nExpect: miracles\r\n\r\n": 417,
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: wishful\r\n\r\n": 501,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab": 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1e3\r\n\r\n": 400,
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
}


@pytest.mark.parametrize("number", range(len(HEADS)))
def test_f32_what_is_no_request_is_answered_in_the_one_shape(system: System, number: int) -> None:
    """By the server itself, before there is a request: JSON, an id, no word of the input, and the end."""
    raw, status = list(HEADS.items())[number]
    answer = exchange(port_of(system), raw, method="GET")
    error = answer.error(status)
    assert answer.headers["connection"] == "close"
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert not {"nonsense", "wishful", "miracles"} & set(error["message"].split())


def test_f32_no_log_tells_what_was_sent(system: System) -> None:
    """Neither heads nor bodies that were refused."""
    exchange(port_of(system), b"GET / HTTP/1.1\r\nAuthorization ZQ-CANARY-17\r\n\r\n", method="GET").error(400)
    exchange(port_of(system), b"ZQ-CANARY-17\r\n\r\n", method="GET").error(400)
    post(port_of(system), RESPONSES, b'{"ZQ-CANARY-17').error(400)
    post(port_of(system), RESPONSES, b"ZQ-CANARY-17", Content_Encoding="gzip").error(400)
    assert "CANARY" not in system.apis[0].output()
    system.assert_recovered()
