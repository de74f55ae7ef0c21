"""Rebuild of a model's stream from its index, after the stream or its group was lost (deleted, evicted, wiped)."""

from __future__ import annotations

from pool.store.connection import Client
from pool.store.keys import ModelKeys
from pool.store.scripts import run_many, script

BATCH = 100


def rebuild(client: Client, keys: ModelKeys) -> int:
    """Give every unended job that has neither a live lease nor a stream entry its entry back; returns how many.

    Safe to run anywhere, at any time, by several at once: each job is looked at again inside its own script.
    """
    requeued = 0
    cursor = 0
    while True:
        cursor, members = client.zscan(keys.index, cursor, count=BATCH)
        tokens = [member.decode() for member, _ in members if b"#" not in member]
        commands = [
            script("reenqueue")(
                job=keys.job(token), queue=keys.queue, index=keys.index, leases=keys.leases, token=token
            )
            for token in tokens
        ]
        requeued += sum(reply[0] == b"requeued" for reply in run_many(client, commands)) if commands else 0
        if cursor == 0:
            return requeued
