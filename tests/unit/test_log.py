"""The token log's packed entries."""

from __future__ import annotations

import struct

import pytest

from pool.store.log import LogEntry, TokenLogprobs, pack, unpack

PLAIN = LogEntry(7, 2, (5, 70_000), "é")
LOGPROBS = (TokenLogprobs(-0.5, ((5, -0.5), (9, -1.25))), TokenLogprobs(-9999.0))
WITH = LogEntry(7, 2, (5, 70_000), "é", LOGPROBS)


def test_an_entry_without_logprobs_is_what_it_was() -> None:
    """Byte for byte: they cost nothing where nobody asks, and readers of the first version go on."""
    expected = bytes((1, 2)) + struct.pack("<HIII", 2, 7, 5, 70_000) + "é".encode()
    assert pack(PLAIN) == expected
    assert unpack(expected) == PLAIN


def test_logprobs_come_back_as_they_were() -> None:
    """Of each token its own, and of a different number of alternatives."""
    assert unpack(pack(WITH)) == WITH
    assert pack(WITH)[0] == 2
    assert len(pack(WITH)) == len(pack(PLAIN)) + 2 * 5 + 2 * 8


def test_a_damaged_entry_is_an_error() -> None:
    """Cut anywhere before its text, of an unknown version, or with logprobs of other tokens."""
    whole = pack(WITH)
    for length in range(len(whole) - len("é".encode())):
        with pytest.raises(ValueError, match="damaged"):
            unpack(whole[:length])
    with pytest.raises(ValueError, match="version 3"):
        unpack(b"\x03" + whole[1:])
    with pytest.raises(ValueError, match="2 tokens have 1"):
        pack(LogEntry(7, 2, (5, 70_000), "", LOGPROBS[:1]))
