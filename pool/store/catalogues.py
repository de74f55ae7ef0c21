"""What was published last of the catalogue of models, for all processes to compare theirs with (tasks/catalogue.py)."""

from __future__ import annotations

from collections.abc import Sequence

from pool.store.connection import Client, state_errors
from pool.store.keys import CATALOGUE, MODELS, ModelKeys
from pool.store.program_keys import ProgramKeys
from pool.store.running import run
from pool.store.scripts import script


def published(client: Client) -> tuple[int, str] | None:
    """Its version, and the hash of its tables; None before there was any. Raises StateUnavailable."""
    with state_errors():
        version, digest = client.hmget(CATALOGUE, "version", "digest")
    return None if version is None else (int(version), digest.decode())


def publish(client: Client, tables: str, digest: str, *, first: bool) -> tuple[int, str]:
    """Publish these tables (JSON), unless `digest` is the published one already, or `first` is asked for and something
    was published before. Returns the version that is published now, and the tables before, "" where there were none.

    Raises StateUnavailable.
    """
    command = script("publish_catalogue")(catalogue=CATALOGUE, digest=digest, tables=tables, first=int(first))
    with state_errors():
        version, former = run(client, command)
    return int(version), former.decode()


def remember(client: Client, models: Sequence[str]) -> list[str]:
    """Note these models; of all others that were ever noted, those that hold something: jobs, results that Celery is
    still to be given, Programs. Raises StateUnavailable."""
    with state_errors():
        if models:
            client.sadd(MODELS, *models)
        others = sorted({name.decode() for name in client.smembers(MODELS)} - set(models))
        pipe = client.pipeline(transaction=False)
        for name in others:
            keys = ModelKeys(f"{name}:0")
            pipe.exists(keys.index, keys.timers, keys.outbox, ProgramKeys(keys.tag).program_timers)
        return [name for name, found in zip(others, pipe.execute(), strict=True) if found]
