"""What was published last of the catalogue of models, for all processes to compare theirs with (tasks/catalogue.py)."""

from __future__ import annotations

from pool.store.connection import Client, state_errors
from pool.store.keys import CATALOGUE
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
