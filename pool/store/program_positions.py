"""How many requests are before one of a Program."""

from __future__ import annotations

from pool.store.connection import Client
from pool.store.ids import JobRef
from pool.store.keys import GROUP
from pool.store.program_keys import ProgramKeys

#: Entries of a rank's stream that are counted at most.
MOST_ENTRIES = 1000


def ahead_of_program_job(client: Client, ref: JobRef, program: str) -> int:
    """Of a job that waits in its Program's pool: the Programs that are before its own in the order of the rank, and
    the jobs before it in the pool. Of one that was sent to its rank: those in the rank's stream that are not read."""
    keys = ProgramKeys(ref.tag)
    pipe = client.pipeline(transaction=False)
    pipe.hmget(keys.job(ref.token), "entry", "ticket")
    pipe.hmget(keys.record(program), "rank", "standing")
    (entry, ticket), (rank, standing) = pipe.execute()
    if rank is None or entry is None:
        return 0
    place = keys.place(rank.decode())
    if entry != b"0-0":
        pipe.xrange(place["stream"], "-", b"(" + entry, count=MOST_ENTRIES)
        pipe.xpending(place["stream"], GROUP)
        before, read = pipe.execute()
        return max(len(before) - int(read["pending"]), 0)
    pipe.zrank(place["order"], (standing or b"") + program.encode())
    pipe.lpos(keys.pool(program), ticket)
    programs, jobs = pipe.execute()
    return int(programs or 0) + int(jobs or 0)
