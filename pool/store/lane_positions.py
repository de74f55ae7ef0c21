"""How many jobs are before one that waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pool.store.connection import Client, state_errors
from pool.store.ids import JobRef
from pool.store.keys import GROUP, keys_of
from pool.store.program_positions import MOST_ENTRIES, ahead_of_program_job

#: As lua/lib/lanes.lua has it: the width of a lane's band of virtual times.
BAND = 2**47


def ahead(client: Client, ref: JobRef) -> int:
    """About how many jobs go before a queued one. Of one in its lane: what higher lanes hold, what is before it in its
    own flow, and as many of each other flow of the lane, as far as they hold any. Of one that has had its turn: those
    in the model's stream that nobody has read. Of a Program's job: those of its rank. Raises StateUnavailable."""
    keys = keys_of(ref)
    with state_errors():
        turn, program = client.hmget(keys.job(ref.token), "turn", "program")
        if program is not None:
            return ahead_of_program_job(client, ref, program.decode())
        if turn is None:
            return 0
        backlog, flow = keys.lanes["backlog"], b":".join(turn.split(b":")[:2])
        lane = int(flow[:1])
        pipe = client.pipeline(transaction=False)
        pipe.zscore(backlog, turn)
        pipe.zlexcount(backlog, "-", f"({lane}:")
        pipe.zlexcount(backlog, f"[{lane}:", f"({lane};")
        pipe.zlexcount(backlog, b"[" + flow + b":", b"(" + turn)
        pipe.zlexcount(backlog, b"[" + flow + b":", b"(" + flow + b";")
        pipe.zcount(keys.lanes["flows"], lane * BAND, f"({(lane + 1) * BAND}")
        waits, higher, of_lane, before, of_flow, flows = pipe.execute()
        unread = _unread_before(client, keys.queue, None if waits is not None else ref.token)
    if waits is None:
        return unread
    others = min(of_lane - of_flow, before * max(flows - 1, 0))
    return int(higher) + int(others) + int(before) + unread


def _unread_before(client: Client, stream: str, token: str | None) -> int:
    """Entries of a stream that nobody has read. `token`: only those before this job's, as far as they are looked at."""
    pipe = client.pipeline(transaction=False)
    if token is None:
        pipe.xlen(stream)
    else:
        pipe.xrange(stream, "-", "+", count=MOST_ENTRIES)
    pipe.xpending(stream, GROUP)
    found, pending = pipe.execute(raise_on_error=False)
    if isinstance(found, Exception):
        raise found
    # Without a group nobody has read anything.
    read = pending["pending"] if isinstance(pending, dict) else 0
    return max((found if token is None else _index(found, token.encode())) - int(read), 0)


def _index(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]], token: bytes) -> int:
    """How many entries are before this job's; all of them where it has none."""
    return next((at for at, (_, fields) in enumerate(entries) if fields.get(b"job") == token), len(entries))
