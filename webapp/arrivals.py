"""When has a request arrived? Told from its bytes, without a thread that waits for them.

Only framing is looked at, as far as it takes to know the end. Whether head and body are right is gunicorn's to say, who
gets the bytes of one request and no others: what is odd here is handed over at once, and refused there. An answer
promises the connection only where the end is known, so this is the stricter reader of the two: what it takes for the
end of a chunked body, gunicorn takes too.

| bytes so far | verdict |
|---|---|
| part of a head, or of a body within the limit | MORE |
| a head and all of its body; or something whose end nobody can tell | WHOLE |
| a head that announces more than the limit, or a body that has passed it | OVERSIZE: answered without its body |
| a request line, or a head, that is too long already | LINE_TOO_LONG, HEAD_TOO_LARGE |
| a head that expects anything but 100-continue | EXPECTS_MORE, before its body |
| a head whose Transfer-Encoding is anything but chunked | CODED |
| a head of HTTP/1.1 without a Host | HOSTLESS |
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from gunicorn.http.message import RFC9110_5_3_SINGLETON_FIELDS, RFC9110_6_5_1_FORBIDDEN_TRAILER

#: Longest request line, and longest line of a head; gunicorn's own limits are set to the same.
LINE_BYTES = 8190
#: Longest head.
HEAD_BYTES = 65536
#: Most lines of a head, and of trailers.
FIELDS = 100
#: How much of a chunked body may be framing: whoever sends more chunks than that is no client of ours.
FRAMING_BYTES = 512 * 1024
#: Pieces in which a request is handed to gunicorn's parser.
PIECE_BYTES = 65536

_HEAD_END = b"\r\n\r\n"
_BARE_LF = re.compile(rb"(?<!\r)\n")
#: A request line of a version that has a Host, 100-continue and chunks.
_NEW = re.compile(rb" HTTP/1\.[1-9]\Z")
_CHUNK_SIZE = re.compile(rb"[0-9A-Fa-f]+")
_TOKEN = rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+"
#: Plain forms of what may follow a chunk's size, and of a trailer: rarer ones are left to gunicorn.
_EXTENSIONS = re.compile(rb"(?:[ \t]*;[ \t]*%b(?:=(?:%b|\"[ !#-\[\]-~]*\"))?)*" % (_TOKEN, _TOKEN))
_TRAILER = re.compile(rb"([A-Za-z0-9-]+):[\t -~]*")
_NO_TRAILERS = {name.encode() for name in RFC9110_6_5_1_FORBIDDEN_TRAILER | RFC9110_5_3_SINGLETON_FIELDS}


class Verdict(Enum):
    """What is to be done with a connection after its latest bytes."""

    MORE = auto()
    WHOLE = auto()
    OVERSIZE = auto()
    LINE_TOO_LONG = auto()
    HEAD_TOO_LARGE = auto()
    EXPECTS_MORE = auto()
    CODED = auto()
    HOSTLESS = auto()


class Arrival:
    """One request on its way in. `data` holds all bytes so far, perhaps those of a next request too; `end`, once the
    verdict is WHOLE, is where this one ends; if nobody can tell (`has_known_end`), the connection must end with it."""

    def __init__(self, body_limit_bytes: int) -> None:
        self.data = bytearray()
        self.end = 0
        self.has_known_end = True
        self.waits_for_continue = False
        #: What the head gives as `x-request-id`; "" without one, or before there is a whole head.
        self.given_id = ""
        self._limit_bytes = body_limit_bytes
        self._head_bytes = 0
        self._seen = 0
        self._chunks: _Chunks | None = None

    def feed(self, data: bytes) -> Verdict:
        """The verdict once these bytes have come as well."""
        self.data += data
        verdict = self._verdict()
        if verdict is Verdict.OVERSIZE:
            # It is answered without its body, so nothing of that is kept.
            del self.data[self._head_bytes :]
            self.end = self._head_bytes
        return verdict

    def _verdict(self) -> Verdict:
        if not self._head_bytes:
            verdict = self._look_for_head()
            if verdict is not None:
                return verdict
        if self._chunks is not None:
            verdict, self.end = self._chunks.look(self.data)
            self.has_known_end = verdict is Verdict.MORE or self._chunks.at_end
            return verdict
        return Verdict.WHOLE if len(self.data) >= self.end else Verdict.MORE

    def pieces(self) -> Iterator[bytes]:
        """This request's bytes, in pieces."""
        for start in range(0, self.end, PIECE_BYTES):
            yield bytes(self.data[start : min(start + PIECE_BYTES, self.end)])

    def rest(self) -> bytes:
        """What came behind this request."""
        return bytes(self.data[self.end :])

    def _look_for_head(self) -> Verdict | None:
        """None once the head is there and its body is to be waited for."""
        start = max(self._seen - len(_HEAD_END) + 1, 0)
        at = self.data.find(_HEAD_END, start)
        if at < 0:
            return self._look_at_part(start)
        self._head_bytes = at + len(_HEAD_END)
        # gunicorn, too, forgives one empty line before a request.
        request_line, *lines = bytes(self.data[:at]).removeprefix(b"\r\n").split(b"\r\n")
        given, *framing = _values(lines, (b"x-request-id", b"host", b"expect", b"transfer-encoding", b"content-length"))
        self.given_id = given[0].decode("latin-1") if len(given) == 1 else ""
        if self._head_bytes > HEAD_BYTES:
            return Verdict.HEAD_TOO_LARGE
        return self._look_at_framing(request_line, *framing)

    def _look_at_part(self, start: int) -> Verdict:
        self._seen = len(self.data)
        if _BARE_LF.search(self.data, start):
            return self._as_it_is(Verdict.WHOLE)
        if self._seen > LINE_BYTES + 2 and self.data.find(b"\r\n", 2, LINE_BYTES + 4) < 0:
            return Verdict.LINE_TOO_LONG
        return Verdict.HEAD_TOO_LARGE if self._seen > HEAD_BYTES else Verdict.MORE

    def _look_at_framing(
        self, request_line: bytes, hosts: list[bytes], expects: list[bytes], codings: list[bytes], lengths: list[bytes]
    ) -> Verdict | None:
        """What the head says of its body. A head that says two things is handed over: it will be refused."""
        is_new = _NEW.search(request_line) is not None
        if is_new and not hosts:
            return Verdict.HOSTLESS
        if [value.lower() for value in expects] not in ([], [b"100-continue"]):
            return Verdict.EXPECTS_MORE
        if [value.lower() for value in codings] not in ([], [b"chunked"]):
            return Verdict.CODED
        self.waits_for_continue = is_new and bool(expects)
        if not lengths and not codings:
            self.end = self._head_bytes
        elif is_new and not lengths:
            self._chunks = _Chunks(self._head_bytes, self._limit_bytes)
        elif not codings and len(lengths) == 1 and lengths[0].isdigit():
            length = int(lengths[0]) if len(lengths[0]) < 20 else self._limit_bytes + 1
            if length > self._limit_bytes:
                return self._as_it_is(Verdict.OVERSIZE)
            self.end = self._head_bytes + length
        else:
            return self._as_it_is(Verdict.WHOLE)
        return None

    def _as_it_is(self, verdict: Verdict) -> Verdict:
        self.end = len(self.data)
        self.has_known_end = False
        return verdict


def _values(lines: list[bytes], names: Sequence[bytes]) -> list[list[bytes]]:
    """The values that a head's lines give to each of these names."""
    fields = [line.partition(b":") for line in lines]
    return [[value.strip(b" \t") for field, _, value in fields if field.lower() == name] for name in names]


class _Chunks:
    """Finds the end of a chunked body. `at_end`: it was found, and all before it was as it should be."""

    def __init__(self, at: int, limit_bytes: int) -> None:
        self.at_end = False
        self._at = at
        self._limit_bytes = limit_bytes
        self._skip = 0
        self._after_data = False
        self._payload_bytes = 0
        self._framing_bytes = 0
        self._in_trailers = False
        self._trailers = 0

    def look(self, data: bytearray) -> tuple[Verdict, int]:
        """The verdict on all bytes so far, and where the body ends (or what there is of it)."""
        while self._pass_chunk(data):
            if self._after_data:
                closing = bytes(data[self._at : self._at + 2])
                if closing != b"\r\n":
                    return (Verdict.MORE if b"\r\n".startswith(closing) else Verdict.WHOLE), len(data)
                self._at += 2
                self._after_data = False
            end = data.find(b"\r\n", self._at)
            if end < 0:
                # gunicorn refuses a line without end by the same limit.
                broken = len(data) - self._at > LINE_BYTES + 2
                return (Verdict.WHOLE if broken else Verdict.MORE), len(data)
            line = bytes(data[self._at : end])
            self._framing_bytes += len(line) + 4
            self._at = end + 2
            if self._in_trailers and not line:
                self.at_end = True
                return Verdict.WHOLE, self._at
            if not self._take_line(line):
                return Verdict.WHOLE, len(data)
            if self._payload_bytes > self._limit_bytes or self._framing_bytes > FRAMING_BYTES:
                return Verdict.OVERSIZE, len(data)
        return Verdict.MORE, len(data)

    def _pass_chunk(self, data: bytearray) -> bool:
        """Go past the rest of the current chunk's data; False while some of it is missing."""
        step = min(self._skip, len(data) - self._at)
        self._at += step
        self._skip -= step
        return self._skip == 0

    def _take_line(self, line: bytes) -> bool:
        """Read a line between chunks; False when it is not what should be there."""
        if self._in_trailers:
            self._trailers += 1
            return self._trailers <= FIELDS and len(line) + 2 <= LINE_BYTES and _is_trailer(line)
        return len(line) <= LINE_BYTES and self._begin_chunk(line)

    def _begin_chunk(self, line: bytes) -> bool:
        """Read the line in front of a chunk; False when it is none."""
        size, extension, rest = line.partition(b";")
        if extension:
            size = size.rstrip(b" \t")
        if not _CHUNK_SIZE.fullmatch(size) or not _EXTENSIONS.fullmatch(extension + rest):
            return False
        length = int(size, 16)
        self._payload_bytes += length
        self._skip = length
        self._after_data = length > 0
        self._in_trailers = length == 0
        return True


def _is_trailer(line: bytes) -> bool:
    found = _TRAILER.fullmatch(line)
    return found is not None and found[1].upper() not in _NO_TRAILERS
