"""What a system says about work in flight: gauges of its nodes, telemetry of its ranks."""

from __future__ import annotations

import json
import socket

from tests.system import SCRIPTED, Part, System


def samples(system: System, api: Part | None = None) -> dict[str, float]:
    """Every sample of a scrape of a node, by its name with its labels."""
    text = system.http.get(f"{system.api_url(api or system.apis[0])}/metrics").text
    pairs = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def gauge(system: System, name: str, api: Part | None = None) -> float:
    """A gauge of a node, summed over its labels."""
    found = [value for series, value in samples(system, api).items() if series.partition("{")[0] == name]
    assert found, f"{name} is not in /metrics"
    return sum(found)


def ask(system: System, **body: object) -> socket.socket:
    """Send a request for a response to a node and do not wait for its answer."""
    port = int(system.api_url(system.apis[0]).rsplit(":", 1)[1])
    payload = json.dumps({"model": SCRIPTED, **body}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(f"{head}\r\n\r\n".encode() + payload)
    return connection


def api_waits(system: System, api: Part | None = None) -> tuple[float, float]:
    """Requests that hold a waiting place on a node, and its waiters."""
    return gauge(system, "genpool_requests_waiting", api), gauge(system, "genpool_waiters", api)


def missing(system: System) -> list[str]:
    """What a node lacks to be ready, by its own account."""
    answer = system.http.get(f"{system.api_url(system.apis[0])}/readyz")
    assert answer.status_code in (200, 503)
    things: list[str] = answer.json().get("missing", [])
    assert bool(things) == (answer.status_code == 503)
    return things


def engine_work(system: System) -> dict[str, float]:
    """What the ranks hold, all together."""
    names = ("active_sessions", "queue_depth", "kv_total_bytes", "runtime_inflight")
    return {name: sum(rank.facts[name] for rank in system.ranks()) for name in names}


def engine_sessions(system: System) -> set[str]:
    """Sessions that the scripted engines began and have not been told to forget."""
    lines = [line.split() for line in system.scripted_log.read_text().splitlines()]
    begun = {" ".join(words[1:4]) for words in lines if words[0] == "start"}
    return begun - {" ".join(words[1:4]) for words in lines if words[0] == "free"}
