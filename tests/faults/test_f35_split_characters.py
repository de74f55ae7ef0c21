"""F35: tokens that cut characters apart. Every event is valid text, and nothing that is whole is held back."""

from __future__ import annotations

import pytest

from tests.faults.conftest import StartSystem
from tests.faults.reading_text import Told, are_joins, read_in_all_ways, script
from tests.system import System
from tests.waiting import wait_until

CAT, EURO, D, E = b"\xf0\x9f\x98\xb8", b"\xe2\x82\xac", b"\xf0\x9f\x87\xa9", b"\xf0\x9f\x87\xaa"
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """One worker that emits what it is told."""
    return start_shared_system(workers=1, delay_ms=5)


@pytest.mark.parametrize(
    ("pieces", "deltas"),
    [
        pytest.param([b" \xf0\x9f", b"\x98\xb8A"], [" ", CAT.decode() + "A"], id="the space is not held back"),
        pytest.param([b"\xe2\x82", b"\xac"], [EURO.decode()], id="three bytes"),
        pytest.param([b"\xf0", b"\x9f", b"\x98", b"\xb8"], [CAT.decode()], id="byte by byte"),
        pytest.param([D, E], [D.decode(), E.decode()], id="a flag is two characters"),
        pytest.param([b"a", b"\xff", b"b"], ["a", REPLACEMENT, "b"], id="a byte that is never valid"),
        pytest.param([b"\xf0\x9f", b"A"], [REPLACEMENT + "A"], id="a character that breaks off"),
        pytest.param([b"a", b"\xf0\x9f"], ["a", REPLACEMENT], id="unfinished when the model ends"),
    ],
)
def test_f35_split_characters(system: System, pieces: list[bytes], deltas: list[str]) -> None:
    """The same whole text by every way; streams show each character as soon as it is whole."""
    told = read_in_all_ways(system, script(*pieces))
    text = b"".join(pieces).decode(errors="replace")
    assert "".join(deltas) == text
    assert {way: (found.text, found.ended) for way, found in told.items()} == dict.fromkeys(told, (text, "stop"))
    for way in ("response stream", "chat stream", "replay"):
        assert are_joins(told[way].deltas, deltas), way


def test_f35_unfinished_at_the_token_limit(system: System) -> None:
    """Bytes that never became a character are one replacement character, at the end."""
    told = read_in_all_ways(system, script(b"A", b"\xf0\x9f", b"\x98\xb8A"), max_output_tokens=2)
    expected = {way: Told(f"A{REPLACEMENT}", "length", found.deltas) for way, found in told.items()}
    assert told == expected


def test_f35_a_poll_in_the_middle_shows_whole_characters(system: System) -> None:
    """While half a character is there, the text so far ends before it."""
    job = system.submit(f"repeat 100 {EURO.decode()}")
    seen: set[str] = set()

    def read() -> bool:
        answer = system.poll(job)
        seen.add("".join(part["text"] for item in answer["output"] for part in item["content"]))
        return bool(answer["status"] == "completed")

    wait_until(read, description=f"{job} to end", timeout_s=30)
    assert len(seen) > 2
    assert all(set(text) <= {EURO.decode()} for text in seen)
    assert system.record(job).outputs[0].text == EURO.decode() * 100
    assert system.record(job).output_tokens == 301
