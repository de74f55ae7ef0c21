"""What has passed through each model, and what it holds now: the figures behind `/metrics` and `genpool queues`.

The script that ends or requeues a job appends one line to the model's tally, in the same step; so every job is counted
once, whichever process dies. Sweeps add the tally up into the totals (lua/add_up.lua), many lines at a time. A survey
reads both at one instant and adds up for itself what is still in the tally, so no figure waits for a sweep.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pool.rules import jobs
from pool.store.connection import Client, state_errors
from pool.store.keys import ModelKeys
from pool.store.running import run_many
from pool.store.scripts import Command, script

#: Upper bounds of the histograms, in ms; lua/lib/finish.lua has the same.
BOUNDS_MS = (10, 50, 100, 500, 1000, 5000, 10_000, 60_000, 300_000, 600_000, 3_600_000)
#: Why jobs went back to the queue: their worker was lost, it left, it had not begun them, their entry was missing.
REQUEUE_REASONS = ("lost", "handed_back", "unbegun", "rebuilt")
#: A tally this long is added up.
ADD_UP_FROM = 100
#: Lines added up at once; each costs the server a few microseconds.
ADD_UP_LINES = 1000


@dataclass(frozen=True, slots=True)
class Histogram:
    """`counts`: observations by bucket, not cumulative, one for each of BOUNDS_MS and one for what is above; `sum_ms`:
    of all."""

    counts: tuple[int, ...]
    sum_ms: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums since the state began.

    `ended` by state, `failed` by error code, `requeued` by reason; `vanished`: jobs whose record was gone before they
    ended; `prompt_tokens`, `output_tokens`, `wait` (from submit to the first begin) and `run` (from there to the end)
    are those of ended jobs that had begun.
    """

    submitted: int
    ended: Mapping[str, int]
    failed: Mapping[str, int]
    requeued: Mapping[str, int]
    vanished: int
    prompt_tokens: int
    output_tokens: int
    wait: Histogram
    run: Histogram


@dataclass(frozen=True, slots=True)
class Survey:
    """One model at one instant. `queued` and `running` count jobs; `oldest_ms`: how long ago the oldest job that waits
    for a worker was submitted, 0 without one; `at_ms`: that instant on the state server's clock."""

    at_ms: int
    queued: int
    running: int
    oldest_ms: int
    dead_letters: int
    totals: Totals


def surveys(client: Client, models: Sequence[str], shard: int = 0) -> dict[str, Survey]:
    """A survey of each model, in one round trip. Raises StateUnavailable."""
    commands = [survey_command(ModelKeys(f"{model}:{shard}")) for model in models]
    with state_errors():
        replies = run_many(client, commands)
    return {model: survey_of(reply) for model, reply in zip(models, replies, strict=True)}


def survey_command(keys: ModelKeys) -> Command:
    """What `survey_of` reads the reply of."""
    return script("survey")(index=keys.index, leases=keys.leases, dead=keys.dead, tally=keys.tally, totals=keys.totals)


def survey_of(reply: Sequence[Any]) -> Survey:
    """The survey in a reply."""
    return _survey(*reply)


def add_up(client: Client, keys: ModelKeys) -> None:
    """Add the tally to the totals. Others may do the same meanwhile."""
    while run_many(client, [script("add_up")(tally=keys.tally, totals=keys.totals, most=ADD_UP_LINES)])[0]:
        pass


def _survey(
    at_ms: int, held: int, running: int, oldest_ms: int, letters: int, stored: list[bytes], tally: list[bytes]
) -> Survey:
    sums: Counter[str] = Counter()
    for words in ([item.decode() for item in stored], *(line.decode().split(" ") for line in tally)):
        for name, value in zip(words[::2], words[1::2], strict=True):
            sums[name] += int(value)
    return Survey(
        at_ms=at_ms,
        queued=max(held - running, 0),
        running=running,
        oldest_ms=max(at_ms - oldest_ms, 0) if oldest_ms else 0,
        dead_letters=letters,
        totals=_totals(sums, held),
    )


def _totals(sums: Mapping[str, int], held: int) -> Totals:
    ended = {state: sums.get(f"ended:{state}", 0) for state in sorted(jobs.TERMINAL)}
    vanished = sums.get("vanished", 0)
    return Totals(
        # Whatever was submitted has ended, has vanished, or is still there: all three are of one instant.
        submitted=sum(ended.values()) + vanished + held,
        ended=ended,
        failed={name.removeprefix("failed:"): count for name, count in sums.items() if name.startswith("failed:")},
        requeued={reason: sums.get(f"requeued:{reason}", 0) for reason in REQUEUE_REASONS},
        vanished=vanished,
        prompt_tokens=sums.get("prompt_tokens", 0),
        output_tokens=sums.get("output_tokens", 0),
        wait=_histogram(sums, "wait"),
        run=_histogram(sums, "run"),
    )


def _histogram(sums: Mapping[str, Any], name: str) -> Histogram:
    counts = tuple(sums.get(f"{name}:{bound}", 0) for bound in (*BOUNDS_MS, "inf"))
    return Histogram(counts, sums.get(f"{name}_ms", 0))
