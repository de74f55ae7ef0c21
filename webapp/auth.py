"""Who calls, and what they may: API keys at the door, and whose job is whose.

| what | open to |
|---|---|
| /healthz, /health, /readyz | everybody |
| /docs, /openapi.json, and / and /docs/, which lead there | everybody: browsers send no key, and these tell no secret |
| /metrics | admin and metrics keys: the figures are about everybody's work |
| /v1/admin/..., /scheduling/diagnostics | admin keys |
| anything else, also what does not exist | user and admin keys |

What is open is decided by the rule that matched, so no way of writing a path opens another. Without configured keys
everybody may do everything: such a node listens on loopback alone (`tasks.api_keys.check_exposed`).
"""

from __future__ import annotations

from dataclasses import dataclass

from flask import Flask, Request, g, request

from pool.errors import JobExpired, JobUnknown
from pool.store.ids import UNKNOWN, parse_ref
from pool.store.jobs import View
from tasks.api_keys import ADMIN, ANY, METRICS, USER, ApiKey, KeyLimits, KeyRing
from webapp.errors import InvalidApiKey, KeyNotAllowed
from webapp.node import Node

OPEN = frozenset({"/healthz", "/health", "/readyz", "/", "/docs", "/docs/", "/openapi.json"})
ADMIN_PREFIX = "/v1/admin"
ADMIN_PLACES = frozenset({ADMIN_PREFIX, "/scheduling/diagnostics"})
#: Whose jobs are those that came without a key.
NOBODY = "default"


@dataclass(frozen=True, slots=True)
class Caller:
    """Whoever sent the request. `pending`: choices it may hold of a model (0: no limit of its own); `sees_all`: no keys
    are configured, and every job is everybody's; `limits`: of its key."""

    tenant: str
    pending: int = 0
    sees_all: bool = False
    limits: KeyLimits = ANY

    def share(self) -> dict[str, int]:
        """What its key's line says of how its jobs wait, by the names of NewJob."""
        named = {"weight": self.limits.weight, "inflight_cap": self.limits.inflight}
        return {name: value for name, value in named.items() if value is not None}


def register_auth(app: Flask, ring: KeyRing, *, pending_per_key: int) -> None:
    """Let nobody past without a key, if there are any."""

    def admit() -> None:
        g.caller = admitted(request, ring, pending_per_key) if ring.required else Caller(NOBODY, sees_all=True)

    app.before_request(admit)


def current_caller() -> Caller:
    """Who sent the current request."""
    caller: Caller = g.caller
    return caller


def admitted(request: Request, ring: KeyRing, pending_per_key: int) -> Caller:
    """The caller of a request. Raises InvalidApiKey and KeyNotAllowed."""
    rule = request.url_rule.rule if request.url_rule is not None else None
    if rule in OPEN:
        return Caller(NOBODY)
    key = _key_of(request, ring)
    if key.kind not in _kinds_for(rule or "/" + request.path.lstrip("/")):
        raise KeyNotAllowed("This API key may not be used for this.")
    pending = key.limits.pending
    return Caller(key.name, pending_per_key if pending is None else pending, limits=key.limits)


def _kinds_for(place: str) -> tuple[str, ...]:
    if place in ADMIN_PLACES or place.startswith(f"{ADMIN_PREFIX}/"):
        return (ADMIN,)
    return (ADMIN, METRICS) if place == "/metrics" else (ADMIN, USER)


def _key_of(request: Request, ring: KeyRing) -> ApiKey:
    scheme, _, sent = request.headers.get("Authorization", "").strip().partition(" ")
    if scheme.lower() != "bearer" or not sent.strip():
        raise InvalidApiKey(sent=False)
    key = ring.find(sent.strip())
    if key is None:
        raise InvalidApiKey(sent=True)
    return key


def own_view(node: Node, job: str) -> View:
    """A job of the caller's, by its id as it came. Raises JobUnknown, also for a job of somebody else's, in the same
    words, and JobExpired."""
    caller, ref = current_caller(), parse_ref(job)
    try:
        view = node.store.view(ref)
    except JobExpired as error:
        if caller.sees_all or error.tenant == caller.tenant:
            raise
    else:
        if caller.sees_all or view.record.tenant == caller.tenant:
            return view
    raise JobUnknown(UNKNOWN)
