"""Where a request ends: the same however its bytes are cut, and where gunicorn's own parser says."""

from __future__ import annotations

import itertools

import pytest
from gunicorn.config import Config
from gunicorn.http import get_parser
from gunicorn.http.errors import NoMoreData, ParseException
from hypothesis import given
from hypothesis import strategies as st

from webapp.arrivals import FIELDS, FRAMING_BYTES, HEAD_BYTES, LINE_BYTES, Arrival, Verdict

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
    request(b"Transfer-Encoding: Chunked", body=b'1;a=b;c="d; e"\r\nx\r\n0\r\n\r\n'),
    b"\r\n" + chunked(b"hello"),
    chunked(b"a", trailers=b"a: b\r\n" * FIELDS),
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
    assert arrival.has_known_end
    assert NEXT.startswith(arrival.rest()) if more else arrival.rest() == b""


@pytest.mark.parametrize("number", range(len(WHOLE)))
def test_nothing_shorter_is_whole(number: int) -> None:
    """Every beginning wants more."""
    data = WHOLE[number]
    for end in range(1, len(data)):
        assert fed(data[:end], [])[0] is Verdict.MORE


#: What stands for the size of a chunk of five bytes, well or badly.
_SIZES = (
    *(b"5", b"005", b"5;b", b"5; b", b"5;b=c", b"5; b = c", b'5;b="c; d"', b'5;b="c;\t\\" d"', b"5 ;b", b"5\t;b=c;d"),
    *(
        b"zz",
        b"",
        b"-5",
        b"+5",
        b"5 ",
        b"0x5",
        b"5\r",
        b"5;b\rc",
        b"5;b\nc",
        b'5;b="',
        b"5;\xc3\xa4",
        b"5;",
        b"5;;b",
        b"5;b==",
    ),
    *(b"4", b"6", b"0", b"5;" + b"b" * (LINE_BYTES - 2)),
)
_TRAILERS = (
    *(b"x: y", b"x:y", b"X-Y:", b"x: \ty ", b"x_y: z", b"x: \xff", b"x" * 300 + b": y"),
    *(b"hello", b"x : y", b" x", b"x: y\r\n z: w", b": y", b"x: \0", b"x: \x7f", b"x: y\rz", b"x: y\nz", b"x\xe4: y"),
    *(b"Host: x", b"content-length: 5", b"Transfer-Encoding: chunked", b"TE: x", b"Trailer: x", b"authorization: x"),
    *(b"x: " + b"y" * n for n in range(LINE_BYTES - 6, LINE_BYTES)),
    *(b"content-type: x\r\ncontent-type: y", b"expect: x"),
)
_ENDS = (b"\r\n", b"XX", b"X\r\n", b"\n", b"\r", b"\r\r\n", b"\r\n\r\n", b"", b" \r\n")


def body_of(
    size: bytes = b"5", end: bytes = b"\r\n", data_end: bytes = b"\r\n", last: bytes = b"0", trailers: bytes = b""
) -> bytes:
    """A chunked body of `hello`."""
    return size + end + b"hello" + data_end + last + b"\r\n" + trailers + b"\r\n"


#: Good but for one thing, perhaps.
_BODIES = [
    *(body_of(size=size) for size in _SIZES),
    *(body_of(last=b"0" + size[1:]) for size in _SIZES),
    *(body_of(end=end) for end in _ENDS),
    *(body_of(data_end=end) for end in _ENDS),
    *(body_of(trailers=trailer + end) for trailer in _TRAILERS for end in _ENDS),
    *(body_of(trailers=b"a: b\r\n" * count) for count in (FIELDS, FIELDS + 1)),
]
_LINES = st.sampled_from([*_SIZES, *_TRAILERS, b"hello", b"0", b"5"])


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


def check_against_gunicorn(data: bytes) -> None:
    """What gunicorn takes whole is WHOLE. Where the end is known, gunicorn takes all of it and nothing else: so an
    answer that promises the connection can be kept."""
    end = end_by_gunicorn(data)
    verdict, arrival = fed(data, [])
    if end is not None:
        assert verdict is Verdict.WHOLE
    if verdict is Verdict.WHOLE and arrival.has_known_end:
        assert arrival.end == end


@pytest.mark.parametrize("number", range(len(_BODIES)))
def test_a_body_with_one_fault_has_no_known_end(number: int) -> None:
    """Each way in which a chunked body can be wrong, alone."""
    check_against_gunicorn(request(b"Transfer-Encoding: chunked", body=_BODIES[number]) + NEXT)


@given(st.lists(_LINES, max_size=8), st.lists(st.sampled_from(_ENDS), min_size=8), st.booleans())
def test_gunicorn_finds_the_same_end(lines: list[bytes], ends: list[bytes], ended: bool) -> None:
    """For any lines as a chunked body."""
    framed = b"".join(line + end for line, end in zip(lines, ends, strict=False)) + b"0\r\n\r\n" * ended
    check_against_gunicorn(request(b"Transfer-Encoding: chunked", body=framed) + NEXT)


@pytest.mark.parametrize(
    "data",
    [
        body_of(),
        body_of(b'005; b=c;d="e f"', last=b"00;z"),
        body_of(trailers=b"x: y\r\nX-Z:\r\n"),
        body_of(trailers=b"a: b\r\n" * FIELDS),
    ],
)
def test_plain_bodies_have_a_known_end(data: bytes) -> None:
    """Extensions and trailers included: strictness costs no ordinary client its connection."""
    verdict, arrival = fed(request(b"Transfer-Encoding: chunked", body=data) + NEXT, [])
    assert verdict is Verdict.WHOLE and arrival.has_known_end and arrival.rest().startswith(NEXT)


ODD = {
    b"GET / HTTP/1.1\nHost: x\n\n": Verdict.WHOLE,
    request(b"Content-Length: 1", b"Content-Length: 2"): Verdict.WHOLE,
    request(b"Content-Length: 1", b"Transfer-Encoding: chunked"): Verdict.WHOLE,
    request(b"Content-Length: x"): Verdict.WHOLE,
    request(b"Content-Length: -1"): Verdict.WHOLE,
    request(b"Transfer-Encoding: gzip"): Verdict.CODED,
    request(b"Transfer-Encoding: gzip, chunked"): Verdict.CODED,
    request(b"Transfer-Encoding: \x0bchunked"): Verdict.CODED,
    request(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"): Verdict.CODED,
    request(b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0"): Verdict.WHOLE,
    request(b"Expect: miracles", b"Content-Length: 5"): Verdict.EXPECTS_MORE,
    request(b"Expect: 100-continue, miracles", b"Content-Length: 5"): Verdict.EXPECTS_MORE,
    request(b"Expect: 100-continue", b"Expect: 100-continue", b"Content-Length: 5"): Verdict.EXPECTS_MORE,
    b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n": Verdict.HOSTLESS,
    b"\r\nPOST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n": Verdict.HOSTLESS,
    b"GET / HTTP/1.9\r\n\r\n": Verdict.HOSTLESS,
    b"GET / HTTP/1.0\r\n\r\n": Verdict.WHOLE,
    request(b"Transfer-Encoding: chunked", body=b"1\r\nxX"): Verdict.WHOLE,
    request(b"Transfer-Encoding: chunked", body=b"0\r\nHost: x\r\n"): Verdict.WHOLE,
    request(b"Transfer-Encoding: chunked", body=b"oops\r\n"): Verdict.WHOLE,
    request(b"Transfer-Encoding: chunked", body=b"1;" + b"x" * (LINE_BYTES + 2)): Verdict.WHOLE,
    request(b"Content-Length: %d" % (LIMIT + 1)): Verdict.OVERSIZE,
    request(b"Content-Length: " + b"9" * 5000): Verdict.OVERSIZE,
    request(b"Transfer-Encoding: chunked", body=b"fffffffffffffffffffff\r\n"): Verdict.OVERSIZE,
    request(b"Transfer-Encoding: chunked", body=b"1\r\nx\r\n" * (LIMIT + 1)): Verdict.OVERSIZE,
    request(b"Transfer-Encoding: chunked", body=b"0\r\n" + b"a: b\r\n" * (FRAMING_BYTES // 6)): Verdict.WHOLE,
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
    for line, waits in ((b"POST / HTTP/1.1", True), (b"\r\nPOST / HTTP/1.1", True), (b"POST / HTTP/1.0", False)):
        _, arrival = fed(request(b"Expect: 100-Continue", b"Content-Length: 5", line=line), [])
        assert arrival.waits_for_continue is waits
