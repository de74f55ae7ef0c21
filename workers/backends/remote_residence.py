"""What a server over HTTP tells of Programs: how busy it is, and how much of its KV is in use, by its own metrics.

It keeps and evicts KV as it likes; nobody can tell it whose to drop. So a Program that was paused holds nothing there
that counts, and the rest is `pool.rules.programs.capacity.remote_tokens`. A series that is missing is no observation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from pool.rules.programs.capacity import acting_tokens, remote_tokens
from pool.store.program_views import Snapshot
from workers.backends.endpoint import Endpoint
from workers.backends.remote_runner import RemoteRunner
from workers.program_residence import Resident

#: The names of each kind's series, today's first.
RUNNING = {"vllm": ("vllm:num_requests_running",), "llama_cpp": ("llamacpp:requests_processing",)}
WAITING = {"vllm": ("vllm:num_requests_waiting",), "llama_cpp": ("llamacpp:requests_deferred",)}
KV_USAGE = {
    "vllm": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "llama_cpp": ("llamacpp:kv_cache_usage_ratio",),
}
#: vLLM labels the series of each rank behind a URL by this.
RANK_LABEL = "engine"
#: A page longer than this is none of theirs.
MAX_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Scraped:
    """What a server's metrics say; None where they say nothing. `kv_usage`: 0 to 1."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None


def scraped(page: str, kind: str, rank: int | None) -> Scraped:
    """Read a page of metrics, of one rank where there are several."""
    found: dict[str, float] = {}
    for sample in _samples(page):
        if rank is None or sample.labels.get(RANK_LABEL) in (None, str(rank)):
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    running, waiting = _first(found, RUNNING[kind]), _first(found, WAITING[kind])
    return Scraped(
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        _first(found, KV_USAGE[kind]),
    )


def _samples(page: str) -> Iterable[Sample]:
    for family in text_string_to_metric_families(page):
        yield from family.samples


def _first(found: Mapping[str, float], names: Iterable[str]) -> float | None:
    return next((found[name] for name in names if name in found), None)


class RemoteResidence:
    """`kind`: of the server; `decode_buffer_tokens`: as Programs are scheduled by."""

    def __init__(self, runner: RemoteRunner, endpoint: Endpoint, kind: str, decode_buffer_tokens: int) -> None:
        self._runner = runner
        self._endpoint = endpoint
        self._kind = kind
        self._decode_buffer_tokens = decode_buffer_tokens
        self._client: httpx2.Client | None = None

    def look(self, sent: int, seen: Snapshot | None) -> Resident:  # noqa: ARG002 - what is not begun waits in Redis
        """As `Residence.look`. The server is asked only where something of Programs is there."""
        found = Scraped() if seen is None else self._scrape()
        running = self._runner.running() if found.running is None else found.running
        waiting = self._runner.waiting() + (found.waiting or 0)
        return Resident(
            tokens={}, offloaded=frozenset(), waiting=waiting, running=running, held=self._held(found, seen)
        )

    def return_seconds_per_token(self) -> float:
        """Nothing is moved."""
        return math.inf

    def pause(self, program: str) -> None:
        """Its KV is the server's to keep or to evict."""

    def drop(self, program: str) -> None:
        """Its KV is the server's to keep or to evict."""

    def _scrape(self) -> Scraped:
        if self._kind not in RUNNING:
            return Scraped()
        if self._client is None:
            self._client = self._endpoint.probe()
        try:
            answer = self._client.get(self._endpoint.url("/metrics"), headers=self._endpoint.headers)
            if answer.status_code != 200 or len(answer.content) > MAX_BYTES:
                return Scraped()
            return scraped(answer.text, self._kind, self._endpoint.rank)
        except (httpx2.HTTPError, ValueError):
            return Scraped()

    def _held(self, found: Scraped, seen: Snapshot | None) -> int | None:
        if seen is None:
            return None
        rank = seen.rank
        return remote_tokens(
            kv_usage=found.kv_usage,
            capacity_tokens=rank.capacity_tokens,
            running=found.running,
            reasoning=rank.reasoning,
            acting_tokens=acting_tokens(rank.programs, self._decode_buffer_tokens),
        )
