"""Where a request ends: the same however its bytes are cut, and where gunicorn's own parser says."""

from __future__ import annotations

import itertools

import pytest
from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.errors import NoMoreData, ParseException
from hypothesis import given
from hypothesis import strategies as st

from webapp.arrivals import FRAMING_BYTES, HEAD_BYTES, LINE_BYTES, Arrival, Verdict

LIMIT = 1000
NEXT = b"GET /next HTTP/1.1\r\nHost: x\r\n\r\n"


def request(*fields: bytes, body: bytes = b"", line: bytes = b"POST / HTTP/1.1") -> bytes:
    """A request as it is sent."""
    return b"\r\n".join([line, b"Host: x", *fields, b"", b""]) + body


def chunked(*chunks: bytes, trailers: bytes = b"") -> bytes:
    """A request with a chunked body."""
    framed = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks)
    return request(b"Transfer-Encoding: chunked", body=framed + b"0\r\n" + trailers + b"\r\n")


WHOLE = [
    request(),
    request(line=b"GET / HTTP/1.0"),
    b"\r\n" + request(),
    request(b"Content-Length: 0"),
    request(b"content-length:\t5 ", body=b"hello"),
    request(b"Content-Length: %d" % LIMIT, body=b"x" * LIMIT),
    request(b"Content-Length: 4", body=b"\r\n\r\n"),
    chunked(),
    chunked(b"hello", b"x" * 300),
    chunked(b"0\r\n\r\n", b"\r\n"),
    chunked(b"a", trailers=b"a: b\r\nc: d\r\n"),
    request(b"Transfer-Encoding: chunked", body=b"000A;x=y\r\n0123456789\r\n00;z\r\n\r\n"),
    request(b"Transfer-Encoding: gzip, Chunked", body=b"1\r\nx\r\n0\r\n\r\n"),
]


def fed(data: bytes, cuts: list[int]) -> tuple[Verdict, Arrival]:
    """The verdict, once it is not MORE, on data that comes in pieces."""
    arrival = Arrival(LIMIT)
    verdict = Verdict.MORE
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    for start, end in itertools.pairwise(edges):
        if start < end and verdict is Verdict.MORE:
            verdict = arrival.feed(data[start:end])
    return verdict, arrival


@given(st.sampled_from(WHOLE), st.lists(st.integers(0, 2000)), st.booleans())
def test_the_end_is_found_however_the_bytes_are_cut(data: bytes, cuts: list[int], more: bool) -> None:
    """Not a byte too early or too late; what follows is kept apart."""
    verdict, arrival = fed(data + NEXT * more, cuts)
    assert verdict is Verdict.WHOLE
    assert b"".join(arrival.pieces()) == data
    assert NEXT.startswith(arrival.rest()) if more else arrival.rest() == b""


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_nothing_shorter_is_whole(number: int) -> None:
    """Every beginning wants more."""
    data = WHOLE[number]
    for end in range(1, len(data)):
        assert fed(data[:end], [])[0] is Verdict.MORE


_LINES = st.sampled_from(
    [
        b"5",
        b"0",
        b"a;b=c",
        b"zz",
        b"",
        b"-1",
        b"+5",
        b"5 ",
        b"5 ;x",
        b"0x5",
        b"00",
        b"hello",
        b"x: y",
        b"hello\nx",
        b"\r",
    ]
)


def end_by_gunicorn(data: bytes) -> int | None:
    """Where gunicorn's parser finds the end of the first request; None when it refuses it or wants more."""
    parser = get_parser(Config(), iter([data]), ("127.0.0.1", 1))
    try:
        req = next(parser)
        while req.body.read(8192):
            pass
    except (ParseException, NoMoreData, StopIteration):
        return None
    return len(data) - len(parser.unreader.read() or b"")


@given(st.lists(_LINES, max_size=8), st.sampled_from([b"chunked", b"identity", b"gzip, chunked", b"chunked, x"]))
def test_gunicorn_finds_the_same_end(lines: list[bytes], coding: bytes) -> None:
    """For any chunked body, also a broken one: what gunicorn takes whole is WHOLE and ends there."""
    data = request(b"Transfer-Encoding: " + coding, body=b"\r\n".join([*lines, b"0", b"", b""])) + NEXT
    end = end_by_gunicorn(data)
    verdict, arrival = fed(data, [])
    if end is not None:
        assert (verdict, arrival.end) == (Verdict.WHOLE, end)


ODD = {
    b"GET / HTTP/1.1\nHost: x\n\n": Verdict.WHOLE,
    request(b"Content-Length: 1", b"Content-Length: 2"): Verdict.WHOLE,
    request(b"Content-Length: 1", b"Transfer-Encoding: chunked"): Verdict.WHOLE,
    request(b"Content-Length: x"): Verdict.WHOLE,
    request(b"Content-Length: -1"): Verdict.WHOLE,
    request(b"Transfer-Encoding: gzip"): Verdict.WHOLE,
    request(b"Transfer-Encoding: chunked", body=b"oops\r\n"): Verdict.WHOLE,
    request(b"Transfer-Encoding: chunked", body=b"1;" + b"x" * (LINE_BYTES + 2)): Verdict.WHOLE,
    request(b"Content-Length: %d" % (LIMIT + 1)): Verdict.OVERSIZE,
    request(b"Content-Length: " + b"9" * 5000): Verdict.OVERSIZE,
    request(b"Transfer-Encoding: chunked", body=b"fffffffffffffffffffff\r\n"): Verdict.OVERSIZE,
    request(b"Transfer-Encoding: chunked", body=b"1\r\nx\r\n" * (LIMIT + 1)): Verdict.OVERSIZE,
    request(b"Transfer-Encoding: chunked", body=b"0\r\n" + b"a: b\r\n" * (FRAMING_BYTES // 6)): Verdict.OVERSIZE,
    b"x" * (LINE_BYTES + 3): Verdict.LINE_TOO_LONG,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEAD_BYTES // 6): Verdict.HEAD_TOO_LARGE,
    b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * (HEAD_BYTES // 6) + b"\r\n": Verdict.HEAD_TOO_LARGE,
}


@pytest.mark.parametrize("number", range(len(ODD)))
def test_what_can_never_become_right_is_not_waited_for(number: int) -> None:
    """Handed over, or refused, with the bytes that there are."""
    data, verdict = list(ODD.items())[number]
    for cuts in ([], list(range(1, 60)), [len(data) - 1]):
        assert fed(data, cuts)[0] is verdict


def test_who_waits_to_be_asked_for_a_body() -> None:
    """Only by HTTP/1.1, and once the head is whole."""
    for line, waits in ((b"POST / HTTP/1.1", True), (b"POST / HTTP/1.0", False)):
        _, arrival = fed(request(b"Expect: 100-Continue", b"Content-Length: 5", line=line), [])
        assert arrival.waits_for_continue is waits
