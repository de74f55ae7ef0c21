"""Rebuild of a model's stream from its index, after it, its group or an entry was lost (deleted, evicted, wiped)."""

from __future__ import annotations

from collections.abc import Callable

import redis

from pool.store.connection import Client
from pool.store.keys import GROUP, ModelKeys
from pool.store.program_keys import RankKeys
from pool.store.running import run_many
from pool.store.scripts import script

BATCH = 100


def heal(client: Client, keys: ModelKeys, again: Callable[[], int] | None = None) -> None:
    """Make a lost stream or group again; nothing while both are there. `again`: gives jobs their entries back, by
    default from the index.

    The group comes last: that it is there says that the entries are, whoever dies in between.
    """
    if not _has_group(client, keys):
        if again is None:
            rebuild(client, keys)
        else:
            again()
        try:
            client.xgroup_create(keys.queue, GROUP, id="0", mkstream=True)
        except redis.exceptions.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise


def _has_group(client: Client, keys: ModelKeys) -> bool:
    try:
        return any(group["name"] == GROUP.encode() for group in client.xinfo_groups(keys.queue))
    except redis.exceptions.ResponseError as error:
        if not str(error).startswith("no such key"):
            raise
        return False


def rebuild(client: Client, keys: ModelKeys) -> int:
    """Give every unended job that has neither a lease nor a stream entry its entry back; returns how many.

    Safe to run anywhere, at any time, by several at once: each job is looked at again inside its own script.
    """
    requeued = 0
    cursor = 0
    while True:
        cursor, members = client.zscan(keys.index, cursor, count=BATCH)
        # Those of Programs, at times below zero, are in no stream of the model's.
        tokens = [member.decode() for member, at_ms in members if b"#" not in member and at_ms >= 0]
        commands = [
            script("reenqueue")(
                job=keys.job(token),
                queue=keys.queue,
                index=keys.index,
                leases=keys.leases,
                timers=keys.timers,
                tally=keys.tally,
                lanes=keys.lanes,
                token=token,
            )
            for token in tokens
        ]
        requeued += sum(reply[0] == b"requeued" for reply in run_many(client, commands)) if commands else 0
        if cursor == 0:
            return requeued


def rebuild_rank(client: Client, keys: RankKeys) -> int:
    """As `rebuild`, for jobs of Programs that were sent to a rank. Those wait in the index at times below zero."""
    requeued, start = 0, 0
    while tokens := [t.decode() for t in client.zrangebyscore(keys.index, "-inf", "(0", start=start, num=BATCH)]:
        start += BATCH
        pipe = client.pipeline(transaction=False)
        for token in tokens:
            pipe.hget(keys.job(token), "program")
        programs = [program.decode() if program else None for program in pipe.execute()]
        commands = [
            script("program_reenqueue")(
                job=keys.job(token),
                queue=keys.queue,
                leases=keys.leases,
                timers=keys.timers,
                tally=keys.tally,
                program=keys.record(program),
                token=token,
                id=program,
                rank=keys.rank_id,
            )
            for token, program in zip(tokens, programs, strict=True)
            if program is not None
        ]
        requeued += sum(reply[0] == b"requeued" for reply in run_many(client, commands))
    return requeued
