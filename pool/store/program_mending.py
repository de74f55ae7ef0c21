"""What keeps the lists and the book of a rank right though keys of Programs were deleted from outside.

Every verb keeps them exact, so they are only ever wrong by that. Then Programs would wait unseen, one that is gone
would keep its place, and a book that began anew would fall below zero, for ever. A planner sees it on the snapshot that
it has anyway.
"""

from __future__ import annotations

from collections.abc import Iterable

from pool.store.connection import state_errors
from pool.store.program_views import Snapshot
from pool.store.programs import ProgramStore
from pool.store.running import run
from pool.store.scripts import script

#: Programs that are looked at in one call.
BATCH = 100


def is_torn(seen: Snapshot) -> bool:
    """Whether a rank's book or lists are not what its Programs make; also where they changed while they were read: then
    the version has, and nothing is mended."""
    rank = seen.rank
    return bool(seen.strays) or seen.made not in (None, (rank.ledger_tokens, rank.active, rank.reasoning))


def mend(store: ProgramStore, seen: Snapshot, gone: Iterable[str] = ()) -> bool:
    """Put right what a snapshot shows; whether that was done. `gone`: Programs that wait there by its lists, and have
    no record. Raises StateUnavailable."""
    rank, keys, strays = seen.rank, store.keys, [*seen.strays, *gone][:BATCH]
    made = seen.made or (rank.ledger_tokens, rank.active, rank.reasoning)
    command = script("mend")(
        at=keys.place(rank.id),
        records=[keys.record(each) for each in strays],
        rank=rank.id,
        version=seen.version,
        tokens=made[0],
        reasoning=made[2],
        ids=strays,
    )
    with state_errors():
        done = bool(run(store.client, command)[0] == b"ok")
    for each in strays if done else ():
        # One that does wait is listed anew, everywhere.
        store.rebind(each, rank.id, rank.id, "mended")
    return done
