"""The end of an append-only file after a power failure.

A verb's writes stand in the file as one transaction, MULTI to EXEC. A server that finds the last one unfinished drops
it and goes on, but Redis 7.0 leaves its whole commands in the file when the cut lies within a command: the *next* start
then takes them for the beginning of the transaction behind them, and half a verb takes effect. (Valkey 9 cuts the file
before the MULTI.) So whoever starts a server cuts there first.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

MULTI = b"*1\r\n$5\r\nMULTI\r\n"
EXEC = b"*1\r\n$4\r\nEXEC\r\n"


def cut_torn_transaction(folder: Path) -> int:
    """Cut a transaction without its end off the newest append-only file in a server's `folder`; returns how many bytes
    went. No server may run on it. Raises OSError."""
    files = sorted((folder / "appendonlydir").glob("*.incr.aof"), key=_number)
    if not files or not files[-1].stat().st_size:
        return 0
    with files[-1].open("r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            size = len(content)
            start = _unfinished(content)
        if start is None:
            return 0
        file.truncate(start)
        os.fsync(file.fileno())
    return size - start


def _number(path: Path) -> int:
    """Of `appendonly.aof.NUMBER.incr.aof`."""
    number = path.name.split(".")[-3]
    return int(number) if number.isdecimal() else 0


def _unfinished(content: mmap.mmap) -> int | None:
    """Where a last transaction without an end begins, None when there is none."""
    found = None
    start = content.rfind(MULTI)
    while start >= 0:
        try:
            if not _has_no_end(content, start):
                break
            found = start  # unless this is a value's text at the very end of the file, within one that begins before
        except ValueError:
            pass  # the word stood within some value
        start = content.rfind(MULTI, 0, start)
    return found


def _has_no_end(content: mmap.mmap, start: int) -> bool:
    """Whether commands, the last one perhaps incomplete, but no EXEC follow. ValueError: something else does."""
    at: int | None = start
    while at is not None and at < len(content):
        if content[at : at + len(EXEC)] == EXEC:
            return False
        at = _command_end(content, at)
    return True


def _command_end(content: mmap.mmap, at: int) -> int | None:
    """Where the command that begins at `at` ends; None: the file ends before it does. ValueError: there is none."""
    header = _line(content, at, b"*")
    if header is None:
        return None
    count, at = header
    for _ in range(count):
        header = _line(content, at, b"$")
        if header is None:
            return None
        length, at = header
        at += length + 2
        if at > len(content):
            return None
    return at


def _line(content: mmap.mmap, at: int, sign: bytes) -> tuple[int, int] | None:
    """The number of a line `SIGN NUMBER CR LF`, and where the next begins; None: the file ends before it does."""
    end = content.find(b"\r\n", at, at + 32)
    if end < 0 and at + 32 < len(content):
        raise ValueError("no line")
    line = content[at : len(content) if end < 0 else end]
    if line[:1] not in (sign, b"") or (line[1:] and not line[1:].rstrip(b"\r").isdigit()):
        raise ValueError("no header")
    return None if end < 0 else (int(line[1:]), end + 2)
