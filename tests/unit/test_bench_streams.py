"""What the streaming client of a benchmark makes of what came over the wire, and the picture of the figures."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.batch_plot import svg
from benchmarks.streaming_client import BEFORE_PIECES, Arrival, Run, contents, events, tally

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(content: str = "", usage: dict[str, Any] | None = None) -> bytes:
    chunk = {"choices": [{"index": 0, "delta": {"content": content}}] if usage is None else [], "usage": usage}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def chunked(*parts: bytes) -> list[bytes]:
    """The parts as chunks, each with its size, and the end."""
    return [*(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts), b"0\r\n\r\n"]


def usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 60, "completion_tokens": tokens}


def test_an_event_arrives_with_its_last_byte() -> None:
    """However the bytes were cut into chunks and the chunks into packets, each event has the time at which it was
    complete."""
    first, second = event("a"), event("b")
    wire = b"".join(chunked(b": keep-alive\n\n", first[:9], first[9:] + second[:5], second[5:]))
    cuts = [0, 3, len(wire) // 2, len(wire) - 9, len(wire)]
    pieces = [HEAD, *(wire[start:stop] for start, stop in pairwise(cuts))]
    found = events(list(range(len(pieces))), pieces)
    assert [chunk["choices"][0]["delta"]["content"] for _, chunk in found] == ["a", "b"]
    ends = [wire.index(first[9:]) + len(first[9:]) + 5, wire.index(second[5:]) + len(second[5:])]
    arrivals = [next(number for number, cut in enumerate(cuts) if cut >= end) for end in ends]
    assert [at for at, _ in found] == arrivals


def test_gaps_are_between_pieces_of_one_answer() -> None:
    """Events without content are no pieces: neither the one that opens the stream nor that of the usage."""
    pieces = [HEAD, *chunked(event(), event("a"), event("b"), event("c"), event(usage=usage(3)), b"data: [DONE]\n\n")]
    times_ns = [1_000_000 * number * number for number in range(len(pieces))]
    run = Run()
    tally(run, times_ns, pieces, asked_ns=0, tokens=3)
    assert (run.output_tokens, run.prompt_tokens) == (3, 60)
    assert run.first_ms == [4.0]
    assert run.gaps_ms == [5.0, 7.0]


def test_an_arrival_counts_what_overlaps_it() -> None:
    """Gaps that lie wholly before the prompt are the usual ones; those that reach into its prefill count, those behind
    its first token do not, and neither does a stream's beginning."""
    steady = [5 * number for number in range(BEFORE_PIECES)]
    early = [number * number for number in range(BEFORE_PIECES // 3)]
    begin = early[-1] + 1000
    times_ns = [1_000_000 * at for at in (*early, *(begin + at for at in (*steady, 150, 450, 2000)))]
    asked_ns = 1_000_000 * (begin + steady[-1] + 7)
    found = Arrival.of([times_ns], asked_ns=asked_ns, first_ns=asked_ns + 200_000_000, prompt_tokens=9)
    assert (found.longest_ms, found.first_ms, found.prompt_tokens) == (300.0, 200.0, 9)
    assert found.before_ms == [5.0] * (BEFORE_PIECES - 1)


def test_a_stream_that_was_left_has_whole_events_only() -> None:
    """What was on its way when the connection closed is no event."""
    pieces = [HEAD, *chunked(event("a"), event("b"), event("c"))]
    assert contents([0, 1, 2, 3], [*pieces[:3], pieces[3][:-9]]) == ([1, 2], {})


def test_an_answer_of_another_length_is_an_error() -> None:
    """A server that made fewer tokens did less work."""
    pieces = [HEAD, *chunked(event("a"), event(usage=usage(1)))]
    with pytest.raises(ValueError, match="not of 2 tokens"):
        tally(Run(), [0] * len(pieces), pieces, asked_ns=0, tokens=2)


def test_a_refusal_is_an_error() -> None:
    """No figure comes from anything but a stream."""
    refusal = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 2\r\n\r\n{}"
    with pytest.raises(ValueError, match="429"):
        events([0], [refusal])


def test_the_picture_holds_every_figure() -> None:
    """One line a contestant, one point a figure, named; also where a contestant lacks a level."""
    picture = svg("tokens/s", {"a & b": [(1, 10.0), (8, 40.0)], "c": [(8, 20.0)]})
    root = ElementTree.fromstring(picture)
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}polyline")) == 2
    assert [title.text for title in root.iter(f"{space}title")] == ["10", "40", "20"]
    assert {"a & b", "c", "1", "8"} <= {text.text for text in root.iter(f"{space}text")}
