"""Whom to blame when a worker is lost with its jobs: the rank's side. The counting is in `lua/take_back.lua`.

A job whose attempt was lost before it logged a token is on trial: it begins by itself, and nothing begins beside it
until it shows one. Until then its entry waits in the pending list of the rank that read it. Before its last try it
waits for an empty process, but not for ever (`workers/intake.py`): one long generation would hold up a whole process.
"""

from __future__ import annotations

from collections.abc import Iterable

from pool.store.connection import Client
from pool.store.handouts import Entry, Lease
from pool.store.keys import ModelKeys
from pool.store.running import run_many
from pool.store.scripts import script

#: How far a rank is from empty when it begins a job, for `begin.lua`. ALL_ALONE also stands for having waited for that
#: long enough among jobs that have shown tokens.
AMONG_OTHERS, AMONG_PROVEN, ALL_ALONE = 0, 1, 2


def keep(client: Client, keys: ModelKeys, rank: str, entries: Iterable[Entry]) -> list[Entry]:
    """Hold on to entries that cannot begin yet, for another lease; those that are still the rank's, in order."""
    kept = list(entries)
    commands = [script("keep")(queue=keys.queue, rank=rank, entry=entry.id) for entry in kept]
    return [entry for entry, reply in zip(kept, run_many(client, commands), strict=True) if reply[0] == b"ok"]


def survived(client: Client, keys: ModelKeys, fences: Iterable[Lease | Entry]) -> None:
    """The rank lost these attempts to the sweep and lives: what it lost then does not count as a crash. An attempt
    whose begin was never answered is known by its entry. Safe to repeat, and for attempts that nobody blames."""
    commands = [script("survived")(job=keys.job(fence.token), nonce=fence.nonce) for fence in fences]
    run_many(client, commands)
