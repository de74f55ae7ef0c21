"""The token log's packed entries: about ten bytes a token, written by workers, read by whoever renders.

    byte 0      format version (1)
    byte 1      choice
    bytes 2-3   number of token ids (little endian)
    bytes 4-7   sequence number of the first token, counted over all choices of the job
    then        4 bytes a token id, then the text piece in UTF-8

The list index of an entry is a stable cursor: entries are only ever appended, and an entry is never rewritten.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HEAD = struct.Struct("<BBHI")
_VERSION = 1
MAX_ENTRY_TOKENS = 65535


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`token_ids` of one `choice`, the first having number `seq` in the job; `text` became safe to show with them."""

    seq: int
    choice: int
    token_ids: tuple[int, ...]
    text: str

    @property
    def next_seq(self) -> int:
        """Sequence number that follows this entry."""
        return self.seq + len(self.token_ids)


def pack(entry: LogEntry) -> bytes:
    """Encode one entry."""
    ids = entry.token_ids
    return (
        _HEAD.pack(_VERSION, entry.choice, len(ids), entry.seq)
        + struct.pack(f"<{len(ids)}I", *ids)
        + entry.text.encode("utf-8")
    )


def unpack(blob: bytes) -> LogEntry:
    """Decode one entry. Raises ValueError for an unknown version or a truncated entry."""
    try:
        version, choice, count, seq = _HEAD.unpack_from(blob)
        if version != _VERSION:
            raise ValueError(f"log entry of unknown version {version}")
        ids = struct.unpack_from(f"<{count}I", blob, _HEAD.size)
    except struct.error as error:
        raise ValueError(f"damaged log entry: {error}") from None
    return LogEntry(seq=seq, choice=choice, token_ids=ids, text=blob[_HEAD.size + 4 * count :].decode("utf-8"))


def replay_of(entries: Iterable[LogEntry], n: int) -> tuple[tuple[int, ...], ...]:
    """Token ids logged so far, by choice (n tuples)."""
    choices: list[list[int]] = [[] for _ in range(n)]
    for entry in entries:
        choices[entry.choice].extend(entry.token_ids)
    return tuple(tuple(choice) for choice in choices)


def texts_of(entries: Iterable[LogEntry], n: int) -> list[str]:
    """Text shown so far, by choice (n strings)."""
    pieces: list[list[str]] = [[] for _ in range(n)]
    for entry in entries:
        pieces[entry.choice].append(entry.text)
    return ["".join(choice) for choice in pieces]


def pack_ids(ids: Sequence[int]) -> bytes:
    """Prompt token ids as little-endian uint32, 4 bytes each."""
    return struct.pack(f"<{len(ids)}I", *ids)
