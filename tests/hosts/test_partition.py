"""One of several hosts is cut off in the middle of generations, and comes back."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from tests.hosts.hosted import HostedSystem
from tests.system import SCRIPTED, TINY, Part
from tests.waiting import wait_until

#: `make test-hosts`: as long as the design says. In `make test`: long enough that the leases of the cut host end.
LONG = os.environ.get("HOSTS") == "long"
CUT_S = 20.0 if LONG else 4.0
LEASE_S = 3.0 if LONG else 1.5
STEP_MS = 25.0
#: A cut in the middle of it, and the worker that comes back finds it running elsewhere.
TOKENS = round((2 * CUT_S + 10) * 1000 / STEP_MS)
OPTIONS: dict[str, Any] = {
    "serves": f"{SCRIPTED},{TINY}",
    "delay_ms": STEP_MS,
    "context_tokens": TOKENS + 100,
    "sections": {
        "worker": {"lease_seconds": LEASE_S, "renew_seconds": LEASE_S / 4},
        "server": {"sync_wait_seconds": 120},
    },
    "models": {TINY: {"target_inflight": 2}},
}
#: A sampled generation of the real engine: its bytes tell whether anything of it was done twice, or otherwise.
SEEDED = {"model": TINY, "input": "The sea", "max_output_tokens": 60, "temperature": 1.0, "seed": 11, "stream": True}


@dataclass
class Stream:
    """A streamed response, read in a thread: the events' data, without what differs from one to the next by design."""

    http: httpx.Client
    body: dict[str, Any]
    events: list[tuple[str, Any]] = field(default_factory=list)
    job: str = ""
    _thread: threading.Thread = field(init=False)

    def start(self) -> Stream:
        """Begin to read."""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        return self

    def read(self) -> Stream:
        """Read it to its end."""
        self._read()
        return self

    def join(self, timeout_s: float) -> None:
        """Wait for its end."""
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"{self.job} has not ended: {self.events[-1:]}"

    def _read(self) -> None:
        with self.http.stream("POST", "http://api/v1/responses", json=self.body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    self.job = self.job or event["response"]["id"]
                    self.events.append((event["type"], event.get("delta")))

    @property
    def text(self) -> str:
        """What it showed."""
        return "".join(delta for kind, delta in self.events if kind == "response.output_text.delta")

    @property
    def sequence(self) -> list[tuple[str, Any]]:
        """Its events; deltas are one: how they are cut is a matter of time."""
        shown = [event for event in self.events if event[0] != "response.output_text.delta"]
        return [*shown, ("text", self.text)]


@pytest.mark.timeout(600 if LONG else 120)
@pytest.mark.parametrize("hosted", [OPTIONS], indirect=True)
def test_a_worker_that_is_cut_off_loses_nothing_and_repeats_nothing(hosted: HostedSystem) -> None:
    """A worker's host is cut off while it streams. Its jobs go on at the other one; those that come meanwhile run
    there. Nobody can tell from a stream. When the host is back, its worker lets go of what it had, and serves again."""
    system, http = hosted, hosted.http
    undisturbed = Stream(http, SEEDED).read()
    long = {"model": SCRIPTED, "input": f"repeat {TOKENS} x", "stream": True, "max_output_tokens": TOKENS + 1}
    streams = [Stream(http, long).start() for _ in range(4)]
    wait_until(lambda: all(stream.text for stream in streams), description="all to show tokens")
    held = {stream.job: system.record(stream.job).rank for stream in streams}
    victim = system.holder(held[streams[0].job])
    rank = held[streams[0].job]
    mine = [stream for stream in streams if held[stream.job] == rank]

    cut_s = time.monotonic()
    system.lab.unplug(system.host_of(victim))
    meanwhile = [system.submit(f"repeat {count} y") for count in range(1, 6)]
    seeded = list(_until(cut_s + CUT_S, lambda: Stream(http, SEEDED).read()))
    for stream in mine:
        wait_until(
            lambda s=stream: system.record(s.job).attempt == 2, description="the takeover", timeout_s=10 * LEASE_S
        )  # type: ignore[misc] # bound now
    assert all(system.record(job).terminal for job in meanwhile)
    assert not any(live.id == rank for live in system.ranks()), "nobody counts on a host that is away"

    system.lab.plug(system.host_of(victim))
    wait_until(
        lambda: _in_flight(system, rank) == 0, description="the worker to be back, and to hold nothing", timeout_s=30
    )
    assert not any(system.record(stream.job).terminal for stream in mine), "they must outlast it, or nothing was shown"
    dropped = _tokens_of(system, victim)
    for stream in streams:
        stream.join(3 * TOKENS * STEP_MS / 1000)
    assert [stream.text for stream in streams] == ["x" * TOKENS] * len(streams)
    assert all(stream.sequence == streams[0].sequence for stream in streams)
    assert [stream.sequence for stream in seeded] == [undisturbed.sequence] * len(seeded)
    assert undisturbed.text
    assert _tokens_of(system, victim) == dropped, "what it had dropped stayed dropped"
    for stream in streams:
        again = 2 if stream in mine else 1
        assert (system.record(stream.job).attempt, system.starts(stream.job)) == (again, again)
    for count, job in enumerate(meanwhile, 1):
        assert (system.record(job).outputs[0].text, system.starts(job)) == ("y" * count, 1)
    assert victim.alive
    system.assert_recovered()


def _until(end_s: float, make: Any) -> Iterator[Stream]:
    """Make streams one after the other, at least one, until this moment."""
    yield make()
    while time.monotonic() < end_s:
        yield make()


def _in_flight(system: HostedSystem, rank: str) -> int | None:
    """Generations that a rank says it holds; None while it is not registered."""
    facts = {live.id: live.facts for live in system.ranks()}
    return facts[rank]["runtime_inflight"] if rank in facts else None


def _tokens_of(system: HostedSystem, worker: Part) -> int:
    """Token lines of one process."""
    lines = system.scripted_log.read_text().splitlines()
    return sum(line.startswith("tok ") and line.split()[3] == str(worker.pid) for line in lines)
