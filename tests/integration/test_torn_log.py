"""A power failure tears the append-only file: no start after it may let half a verb take effect."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool.store.connection import connect
from pool.store.server import StateServer
from pool.store.server_binary import BINARY_VARIABLE
from pool.store.torn_log import EXEC, MULTI, cut_torn_transaction
from tests.servers import SERVERS, program

#: Two writes in one script: together or not at all.
BOTH = "#!lua\nredis.call('RPUSH', KEYS[1], ARGV[1]) return redis.call('HINCRBY', KEYS[2], 'count', 1)"


def command(*words: bytes) -> bytes:
    """A command as the file holds it."""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def torn_file(folder: Path, content: bytes) -> Path:
    """A server's folder with this newest file, beside an older one."""
    data = folder / "appendonlydir"
    data.mkdir(parents=True, exist_ok=True)
    (data / "appendonly.aof.9.incr.aof").write_bytes(MULTI)
    newest = data / "appendonly.aof.10.incr.aof"
    newest.write_bytes(content)
    return newest


def test_only_a_transaction_without_end_is_cut(tmp_path: Path) -> None:
    """Wherever the file breaks off: a transaction stays whole or goes whole, and what lies before it stays, also when a
    value in it reads like the beginning or the end of one."""
    alone = command(b"SET", b"a", MULTI + b"x")
    body = command(b"RPUSH", b"l", b"1" * 40) + command(b"HSET", b"h", b"k", b"say " + MULTI + b"or " + EXEC)
    whole = alone + MULTI + body + EXEC
    content = whole + MULTI + body + EXEC
    for end in range(len(content) + 1):
        file = torn_file(tmp_path, content[:end])
        cut = cut_torn_transaction(tmp_path)
        kept = file.read_bytes()
        assert kept == content[: end - cut]
        unit = max(size for size in (0, len(alone), len(whole), len(content)) if size <= end)
        assert len(kept) >= unit, "something whole was cut"
        if end > len(alone) and end - unit >= len(MULTI):
            assert len(kept) == unit, "a part of a transaction stayed"
    assert (tmp_path / "appendonlydir" / "appendonly.aof.9.incr.aof").read_bytes() == MULTI


def test_a_folder_without_data_is_left_alone(tmp_path: Path) -> None:
    """Before a first start, and with an empty file."""
    assert cut_torn_transaction(tmp_path) == 0
    torn_file(tmp_path, b"")
    assert cut_torn_transaction(tmp_path) == 0


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("cut_bytes", [3, 30, 60])
def test_two_starts_after_a_tear_show_whole_verbs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: str, cut_bytes: int
) -> None:
    """The last script's writes are torn, in the EXEC, in the second write, in the first. Afterwards more is written,
    and the server starts once more: both keys still tell the same."""
    monkeypatch.setenv(BINARY_VARIABLE, str(program(server)))
    counts = []
    for start in range(3):
        with StateServer(tmp_path, appendfsync="always") as running:
            client = connect(running.url)
            counts.append((client.llen("list"), int(client.hget("hash", "count") or 0)))
            for number in range(4):
                client.eval(BOTH, 2, "list", "hash", number)
            client.connection_pool.disconnect()
        if start == 0:
            (file,) = (tmp_path / "appendonlydir").glob("*.incr.aof")
            content = file.read_bytes()
            file.write_bytes(content[:-cut_bytes])
    assert counts == [(0, 0), (3, 3), (7, 7)]
