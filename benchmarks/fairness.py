"""Who gets the slots when all want more than there are: shares of slot time, and how far service strays from them.

    make bench-fairness
    python benchmarks/fairness.py --seconds 20

A state server, the store and one rank with a few slots; a job holds its slot for as long as its tenant's jobs take, and
computes nothing. Three tenants of the weights 3, 2 and 1 always have jobs waiting; those of the last are ten times as
long, so by number of jobs it would have most of everything. A fourth sends one short job at a time.

`fair` charges each tenant; `FIFO` is the same system with one fairness key for all, so jobs go in the order in which
they came. Figures: the largest error of a share of slot time; the largest gap, at any time, between what two backlogged
tenants had for weight 1, in units of all slots busy with the longest job; waits of the light tenant, in the same unit.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, its folder would come first on the path, where `queue.py` hides the standard library's module.
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

from benchmarks import report
from benchmarks.processes import state_server
from pool.store.connection import connect
from pool.store.delivery import Delivery
from pool.store.handouts import Ending, Handout, Write
from pool.store.ids import new_ref
from pool.store.jobs import JobStore
from pool.store.log import pack_ids
from pool.store.records import NewJob, Output
from tasks.payloads import GenerationOptions, TextPrompt

MODEL = "fairness"
SLOTS = 4
#: Jobs that a backlogged tenant has waiting.
DEPTH = 2 * SLOTS
SHORT_S = 0.02
LEASE_MS = 60_000
OPTIONS, PROMPT = GenerationOptions().stored(), TextPrompt(text="x").model_dump_json()
ENDING = Ending("completed", (Output("", "stop", 1),), prompt_tokens=1)


@dataclass(frozen=True, slots=True)
class Tenant:
    """`length_s`: how long its jobs hold a slot."""

    name: str
    weight: int
    length_s: float


BACKLOGGED = (Tenant("three", 3, SHORT_S), Tenant("two", 2, SHORT_S), Tenant("heavy", 1, 10 * SHORT_S))
LIGHT = Tenant("light", 1, SHORT_S)
LONGEST_S = max(tenant.length_s for tenant in BACKLOGGED)
#: The time in which all slots do the longest job: what can be under way when service is compared.
UNIT_S = SLOTS * LONGEST_S


@dataclass(slots=True)
class Running:
    """A job in a slot, since when and until when."""

    handout: Handout
    tenant: Tenant
    since_s: float
    until_s: float


@dataclass(slots=True)
class Site:
    """One run. `served_s`: slot time by tenant."""

    store: JobStore
    rank: Delivery
    is_fair: bool
    waiting: Counter[str] = field(default_factory=Counter)
    tenants: dict[str, tuple[Tenant, float]] = field(default_factory=dict)
    slots: list[Running] = field(default_factory=list)
    served_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits_s: deque[float] = field(default_factory=deque)
    gap_s: float = 0.0

    def run(self, seconds: float) -> None:
        """Keep everybody busy for so long."""
        until_s = time.perf_counter() + seconds
        while (now_s := time.perf_counter()) < until_s:
            self.end_due(now_s)
            self.top_up()
            if len(self.slots) < SLOTS:
                self.begin()
            pause_s = min((each.until_s for each in self.slots), default=0) - time.perf_counter()
            if len(self.slots) == SLOTS and pause_s > 0:
                time.sleep(pause_s)

    def end_due(self, now_s: float) -> None:
        """Complete what has held its slot for long enough, and look at the gap."""
        for each in [each for each in self.slots if each.until_s <= now_s]:
            (answer,) = self.rank.write([Write(each.handout.lease, 0, (), ENDING)])
            assert answer.code == "ok"
            self.slots.remove(each)
            self.served_s[each.tenant.name] += time.perf_counter() - each.since_s
            had = [self.served_s[tenant.name] / tenant.weight for tenant in BACKLOGGED]
            self.gap_s = max(self.gap_s, max(had) - min(had))

    def top_up(self) -> None:
        """Backlogged tenants always have enough waiting, the light one a job somewhere."""
        for tenant in BACKLOGGED:
            while self.waiting[tenant.name] < DEPTH:
                self.submit(tenant)
        if not self.waiting[LIGHT.name] and all(each.tenant is not LIGHT for each in self.slots):
            self.submit(LIGHT)

    def submit(self, tenant: Tenant) -> None:
        """One more job of a tenant's."""
        ref = new_ref("responses", MODEL)
        job = NewJob(
            ref,
            "responses",
            OPTIONS,
            PROMPT,
            seed=0,
            prompt=pack_ids([1]),
            prompt_tokens=1,
            tenant=tenant.name if self.is_fair else "everybody",
            weight=tenant.weight if self.is_fair else 1,
        )
        self.store.submit(job)
        self.waiting[tenant.name] += 1
        self.tenants[ref.token] = (tenant, time.perf_counter())

    def begin(self) -> None:
        """Fill the free slots."""
        for handout in self.rank.take(SLOTS - len(self.slots), 1).handouts:
            tenant, submitted_s = self.tenants.pop(handout.lease.token)
            now_s = time.perf_counter()
            self.waiting[tenant.name] -= 1
            self.slots.append(Running(handout, tenant, now_s, now_s + tenant.length_s))
            if tenant is LIGHT:
                self.waits_s.append(now_s - submitted_s)


def measure(seconds: float, *, is_fair: bool) -> report.Sample:
    """One round, on a server of its own."""
    with tempfile.TemporaryDirectory(prefix="genpool-bench-") as name, state_server(Path(name)) as server:
        store = JobStore(connect(server.url), result_ttl_ms=60_000, pending_per_model=1000)
        reader, writer = (connect(server.url, max_connections=1) for _ in range(2))
        rank = Delivery(reader, writer, MODEL, "one", lease_ms=LEASE_MS, result_ttl_ms=60_000)
        rank.heal()
        site = Site(store, rank, is_fair)
        site.run(seconds)
        rank.close()
    return figures(site)


def figures(site: Site) -> report.Sample:
    """The run's figures. The light tenant's slot time counts to nobody's share."""
    whole_s = sum(site.served_s[tenant.name] for tenant in BACKLOGGED)
    weights = sum(tenant.weight for tenant in BACKLOGGED)
    shares = {tenant: site.served_s[tenant.name] / whole_s for tenant in BACKLOGGED}
    return {
        **{f"share of {tenant.name}": share for tenant, share in shares.items()},
        "share error": max(abs(share * weights / tenant.weight - 1) for tenant, share in shares.items()),
        "gap": site.gap_s / UNIT_S,
        "light wait p99": report.percentile(list(site.waits_s), 99) / UNIT_S,
    }


def targets(medians: Mapping[str, Mapping[str, float]]) -> list[report.Target]:
    """Shares, the gap, and the wait of whoever wants little."""
    fair, fifo = medians.get("fair", {}), medians.get("FIFO", {})
    return [
        report.Target("share error", fair.get("share error"), at_most=0.1),
        report.Target("gap", fair.get("gap"), at_most=2),
        report.Target("light wait p99", fair.get("light wait p99"), at_most=1),
        report.Target(
            "share error / FIFO's", report.ratio(fair.get("share error"), fifo.get("share error")), at_most=0.2
        ),
    ]


def main() -> None:
    """Measure and report."""
    parser = report.options(__doc__ or "")
    parser.add_argument("--seconds", type=float, default=15, help="how long a round takes (15)")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.rounds = min(options.seconds, 3), 1
    contestants = {
        "fair": partial(measure, options.seconds, is_fair=True),
        "FIFO": partial(measure, options.seconds, is_fair=False),
    }
    samples = report.interleaved(contestants, options.rounds)
    result = report.Report(
        name="fairness",
        parameters={"seconds": options.seconds, "rounds": options.rounds, "slots": SLOTS},
        samples=samples,
        targets=targets({name: report.medians(rounds) for name, rounds in samples.items()}),
        machine=report.machine(),
    )
    report.publish(result, json_file=options.json, record=not options.quick and options.rounds >= report.MIN_ROUNDS)


if __name__ == "__main__":
    main()
