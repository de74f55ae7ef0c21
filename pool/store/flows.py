"""Under which names fairness keys and sessions wait: names from outside never become part of a member that sorts."""

from __future__ import annotations

import hashlib

from pool.rules.fairness import LANES

KEY_DIGITS = 16


def key_of(tenant: str, fairness: str) -> str:
    """What is stored of a fairness key: digits of a hash over tenant and key. Without a key it is the tenant's own."""
    return _digits(f"{len(tenant)}:{tenant}:{fairness}" if fairness and fairness != tenant else tenant)


def session_of(tenant: str, session: str) -> str:
    """What is stored of a session, by which its home is found (pool/rules/affinity.py)."""
    return _digits(f"session:{len(tenant)}:{tenant}:{session}")


def flow_of(lane: str, tenant: str, fairness: str) -> str:
    """The flow of a job, as lua/lib/lanes.lua knows it: the lane's place and the key."""
    return f"{LANES.index(lane)}:{key_of(tenant, fairness)}"


def _digits(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_DIGITS // 2).hexdigest()
