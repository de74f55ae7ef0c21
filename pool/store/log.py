"""The token log's packed entries: about ten bytes a token, written by workers, read by whoever renders.

    byte 0      format version: 1, or 2 with log-probabilities
    byte 1      choice
    bytes 2-3   number of token ids (little endian)
    bytes 4-7   sequence number of the first token, counted over all choices of the job
    then        4 bytes a token id
    version 2   for each token: its log-probability (float32), the number of alternatives (1 byte), and of each of these
                its id (4 bytes) and log-probability (float32)
    then        the text piece in UTF-8

The list index of an entry is a stable cursor: entries are only ever appended, and an entry is never rewritten.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_HEAD = struct.Struct("<BBHI")
_PLAIN, _WITH_LOGPROBS = 1, 2
_LOGPROB = struct.Struct("<fB")
_ALTERNATIVE = struct.Struct("<If")
MAX_ENTRY_TOKENS = 65535


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The natural logarithm of a token's probability; `top`: the likeliest ids in its place with theirs, best first.
    All are finite, <= 0, and float32's own values, so that packing changes none."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LogEntry:
    """`token_ids` of one `choice`, the first having number `seq` in the job; `text` became safe to show with them.
    `logprobs`: one for each token id in a job that asked for them, else empty."""

    seq: int
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def next_seq(self) -> int:
        """Sequence number that follows this entry."""
        return self.seq + len(self.token_ids)


def pack(entry: LogEntry) -> bytes:
    """Encode one entry."""
    ids = entry.token_ids
    version = _WITH_LOGPROBS if entry.logprobs else _PLAIN
    return (
        _HEAD.pack(version, entry.choice, len(ids), entry.seq)
        + struct.pack(f"<{len(ids)}I", *ids)
        + (_packed_logprobs(entry) if entry.logprobs else b"")
        + entry.text.encode("utf-8")
    )


def unpack(blob: bytes) -> LogEntry:
    """Decode one entry. Raises ValueError for an unknown version or a truncated entry."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    try:
        version, choice, count, seq = _HEAD.unpack_from(blob)
        if version not in (_PLAIN, _WITH_LOGPROBS):
            raise ValueError(f"log entry of unknown version {version}")
        ids = struct.unpack_from(f"<{count}I", blob, _HEAD.size)
        at = _HEAD.size + 4 * count
        if version == _WITH_LOGPROBS:
            logprobs, at = _unpacked_logprobs(blob, at, count)
    except struct.error as error:
        raise ValueError(f"damaged log entry: {error}") from None
    return LogEntry(seq, choice, ids, blob[at:].decode("utf-8"), logprobs)


def _packed_logprobs(entry: LogEntry) -> bytes:
    if len(entry.logprobs) != len(entry.token_ids):
        raise ValueError(f"{len(entry.token_ids)} tokens have {len(entry.logprobs)} log-probabilities")
    parts: list[bytes] = []
    for each in entry.logprobs:
        parts.append(_LOGPROB.pack(each.logprob, len(each.top)))
        parts += [_ALTERNATIVE.pack(token, logprob) for token, logprob in each.top]
    return b"".join(parts)


def _unpacked_logprobs(blob: bytes, at: int, count: int) -> tuple[tuple[TokenLogprobs, ...], int]:
    """Those of `count` tokens from byte `at` on, and where they end. Raises struct.error."""
    found: list[TokenLogprobs] = []
    for _ in range(count):
        logprob, alternatives = _LOGPROB.unpack_from(blob, at)
        start, at = at + _LOGPROB.size, at + _LOGPROB.size + alternatives * _ALTERNATIVE.size
        if at > len(blob):
            raise struct.error("its log-probabilities are cut off")
        found.append(TokenLogprobs(logprob, tuple(_ALTERNATIVE.iter_unpack(blob[start:at]))))
    return tuple(found), at


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
