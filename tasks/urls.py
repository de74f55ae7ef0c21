"""The state server's URL in the dialects of its clients, and how URLs are shown.

redis-py: `redis://`, `rediss://`, `unix:///path?db=N`. Celery: `redis://`, `rediss://...?ssl_cert_reqs=...`,
`redis+socket:///path?virtual_host=N`.
"""

from __future__ import annotations

import re

_ALIASES = {"valkey": "redis", "valkeys": "rediss"}
_USERINFO = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*://)[^\s]*@", re.IGNORECASE)
_SECRET_QUERY = re.compile(r"(?P<name>[?&](?:password|username)=)[^&\s]*", re.IGNORECASE)


def redis_form(url: str) -> str:
    """`url` as redis-py reads it."""
    scheme, rest = _split(url)
    if scheme != "redis+socket":
        return f"{scheme}://{rest}"
    return "unix://" + re.sub(r"([?&])virtual_host=", r"\1db=", rest)


def celery_form(url: str) -> str:
    """`url` as Celery reads it; URLs of other brokers pass unchanged."""
    scheme, rest = _split(url)
    if scheme == "unix":
        return "redis+socket://" + re.sub(r"([?&])db=", r"\1virtual_host=", rest)
    if scheme == "rediss" and "ssl_cert_reqs=" not in rest:
        # Celery refuses a TLS URL that does not say whether the certificate is checked.
        rest += ("&" if "?" in rest else "?") + "ssl_cert_reqs=required"
    return f"{scheme}://{rest}"


def masked(text: str) -> str:
    """`text` with the user and password of every URL in it replaced by `***`."""
    return _SECRET_QUERY.sub(r"\g<name>***", _USERINFO.sub(r"\g<scheme>***@", text))


def _split(url: str) -> tuple[str, str]:
    scheme, _, rest = url.partition("://")
    return _ALIASES.get(scheme, scheme), rest
