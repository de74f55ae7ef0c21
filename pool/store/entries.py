"""Which job a stream entry names. Anybody who reaches the state server can add one that names none: it is dropped by
whoever meets it, a reader or the sweep."""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence

from pool.store.connection import Client
from pool.store.handouts import Entry
from pool.store.keys import GROUP, ModelKeys

log = logging.getLogger("genpool.entries")

_TOKEN = re.compile(rb"[0-9a-f]{32}")
_SESSION = re.compile(rb"[0-9a-f]{16}")


def token_of(fields: Mapping[bytes, bytes]) -> str | None:
    """The job's token; None when the entry names no job."""
    token = fields.get(b"job", b"")
    return token.decode() if _TOKEN.fullmatch(token) else None


def guess_of(fields: Mapping[bytes, bytes]) -> int:
    """What a choice of the job was taken to need when it was moved there, ms; 0 where the entry does not say."""
    guess = fields.get(b"guess", b"")
    return int(guess) if guess.isdigit() and len(guess) < 16 else 0


def hops_of(fields: Mapping[bytes, bytes]) -> int:
    """How often ranks have passed the job on, unbegun (pool/store/sharing.py)."""
    hops = fields.get(b"hops", b"0")
    return int(hops) if len(hops) < 4 and hops.isdigit() else 0


def session_of(fields: Mapping[bytes, bytes]) -> str:
    """The digits that stand for its session; "" where it has none."""
    session = fields.get(b"session", b"")
    return session.decode() if _SESSION.fullmatch(session) else ""


def sorted_out(items: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> tuple[list[Entry], list[bytes]]:
    """What was read, each entry with a fence of its own; and the ids of those that name no job."""
    named = [(entry, token_of(fields), fields) for entry, fields in items]
    entries = [
        Entry(
            entry.decode(),
            token,
            secrets.token_hex(8),
            hops=hops_of(fields),
            guess_ms=guess_of(fields),
            session=session_of(fields),
        )
        for entry, token, fields in named
        if token is not None
    ]
    return entries, [entry for entry, token, *_ in named if token is None]


def drop(client: Client, keys: ModelKeys, entries: Sequence[bytes]) -> None:
    """Remove entries that name no job, here and from the pending list. Says how many, and nothing of what they hold."""
    if entries:
        log.warning("%s: %d stream entries that name no job, dropped", keys.tag, len(entries))
        # Deleted first: what is only acknowledged would stay in the stream for ever.
        client.xdel(keys.queue, *entries)
        client.xack(keys.queue, GROUP, *entries)
