"""The catalogue of models that an admin had read last, for all processes to compare theirs with."""

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


def publish(client: Client, digest: str, tables: str, *, first: bool = False) -> tuple[int, str]:
    """These tables count from now on, under the next version, unless they did before; `first`: only where none ever
    did. The version now, and the tables before, "" for none. Raises StateUnavailable."""
    command = script("publish_catalogue")(catalogue=CATALOGUE, digest=digest, tables=tables, first=int(first))
    with state_errors():
        version, former = run(client, command)
    return int(version), former.decode()
