"""Under which name a fairness key waits: names from outside never become part of a member that sorts."""

from __future__ import annotations

import hashlib

from pool.rules.fairness import LANES

KEY_DIGITS = 16


def key_of(tenant: str, fairness: str) -> str:
    """What is stored of a fairness key: digits of a hash over tenant and key. Without a key it is the tenant's own."""
    text = f"{len(tenant)}:{tenant}:{fairness}" if fairness and fairness != tenant else tenant
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=KEY_DIGITS // 2).hexdigest()


def flow_of(lane: str, tenant: str, fairness: str) -> str:
    """The flow of a job, as lua/lib/lanes.lua knows it: the lane's place and the key."""
    return f"{LANES.index(lane)}:{key_of(tenant, fairness)}"
