"""Programs on real workers: their KV is found again and leaves, others have their share, no fault loses a request."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator

import pytest

from pool.store.ids import parse_ref
from pool.store.keys import ModelKeys
from pool.store.records import JobRecord
from tasks.payloads import Sampling
from tests.agents import TENANT, Agents
from tests.faults.conftest import StartSystem
from tests.faults.supervising import Supervising
from tests.system import SCRIPTED, TINY, System
from tests.waiting import wait_until

SLOTS = 2
CAP = 2
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
SEEDED = Sampling(temperature=0.9, top_p=0.9, seed=5, ignore_eos=True)
PROMPT_TOKENS = 200


@pytest.fixture(scope="module")
def system(start_shared_system: StartSystem) -> System:
    """Two workers that serve both models; who ends one of them starts it again."""
    return start_shared_system(
        apis=0,
        serves=f"{SCRIPTED},{TINY}",
        sections={
            "worker": {
                "lease_seconds": 1.5, "renew_seconds": 0.4, "drain_grace_seconds": 20, "max_deliveries": CAP,
            },
            "programs": {"enabled": True, "metrics_interval_seconds": 0.2, "stats_window_size": 5},
        },
        models={SCRIPTED: {"target_inflight": SLOTS}},
        delay_ms=10,
    )  # fmt: skip


@pytest.fixture
def agents(system: System) -> Iterator[Agents]:
    """Their Programs are over when the test is, and nothing of them is left."""
    with Agents(system) as agents:
        yield agents
        for model in (SCRIPTED, TINY):
            for record in system_records(agents, model):
                agents.upkeep(model).finish(*record)
        for job in system.accepted:
            system.ended(job, timeout_s=30)
        system.assert_at_rest()
        # Names come from outside: what is told goes by stored ids.
        assert not any(TENANT in part.output() for part in system.workers)


def prompt(number: int) -> list[int]:
    """A prompt of the tiny model, long beside the engine's grid. Each test has its own: none finds another's."""
    return [number, *(5 + 7 * at % 200 for at in range(1, PROMPT_TOKENS))]


def system_records(agents: Agents, model: str) -> list[tuple[str, str]]:
    """Tenant and name of each Program that there is."""
    store = agents.store(model)
    found = [store.client.hmget(key, "tenant", "name") for key in store.client.scan_iter(store.keys.record("*"))]
    return [(tenant.decode(), name.decode()) for tenant, name in found]


def ranks(system: System, model: str = SCRIPTED) -> list[str]:
    """The ids of both ranks, once both serve."""
    wait_until(lambda: len(system.ranks(model)) == 2, description="two ranks", timeout_s=60)
    return [rank.id for rank in system.ranks(model)]


def pinned_bytes(system: System, rank: str) -> int:
    """What the rank of the tiny model last said."""
    return next(int(each.facts["kv_pinned_bytes"]) for each in system.ranks(TINY) if each.id == rank)


def test_a_program_finds_its_kv_again(system: System, agents: Agents) -> None:
    """Its second request goes on where the first ended, on the same rank; both give the bytes of a plain job. Meanwhile
    the rank's engine tells what it holds of it."""
    rank = ranks(system, TINY)[0]
    options = {"model": TINY, "sampling": SEEDED, "max_tokens": 24}
    first = agents.ask("lead", prompt(1), rank=rank, retention_ms=60_000, **options)
    assert system.ended(first).cached_tokens == 0
    wait_until(lambda: int(agents.book(rank, TINY).get("obs_tokens") or 0) >= 192, description="an observation")
    longer = [*prompt(1), *agents.output(first), *range(40, 70)]
    second = agents.ask("lead", longer, **options)
    record = system.ended(second)
    assert (record.rank, system.record(first).rank) == (rank, rank)
    assert record.cached_tokens is not None and record.cached_tokens >= 0.9 * PROMPT_TOKENS
    for job, given in ((first, prompt(1)), (second, longer)):
        alone = system.ended(agents.plain(given, **options))
        assert (alone.cached_tokens, alone.outputs) == (0, system.record(job).outputs)


def test_kv_leaves_when_its_hold_ends(system: System, agents: Agents) -> None:
    """The Program is paused, its engine drops what it kept, and nothing counts for it any more."""
    rank = ranks(system, TINY)[0]
    options = {"model": TINY, "sampling": GREEDY, "max_tokens": 8}
    held = agents.ask("held", prompt(2), rank=rank, retention_ms=60_000, **options)
    brief = agents.ask("brief", prompt(3), rank=rank, retention_ms=100, **options)
    for job in (held, brief):
        system.ended(job)
    wait_until(lambda: agents.state("brief", TINY) == "paused", description="the end of the hold")
    wait_until(lambda: agents.upkeep(TINY).leaving(rank) == {}, description="its KV to be gone")
    wait_until(lambda: 192 <= int(agents.book(rank, TINY)["obs_tokens"]) <= 208, description="one Program's tokens")
    assert agents.state("held", TINY) == "active"
    wait_until(lambda: pinned_bytes(system, rank) > 0, description="a heartbeat")
    agents.upkeep(TINY).finish(TENANT, "held")
    wait_until(lambda: agents.upkeep(TINY).leaving(rank) == {}, description="all KV to be gone")
    wait_until(lambda: pinned_bytes(system, rank) == 0, description="the engine to keep nothing")
    book = agents.book(rank, TINY)
    assert (book["tokens"], book["leaving"], book["active"]) == ("0", "0", "0")


def test_programs_and_other_jobs_share_a_rank(system: System, agents: Agents) -> None:
    """A rank with work of both kinds begins of each in turn, whichever has more."""
    rank = ranks(system)[0]
    plain = [agents.plain("repeat 4 x") for _ in range(30)]
    of_program = [agents.ask("lead", "repeat 4 x", rank=rank) for _ in range(8)]
    records = [system.ended(job) for job in (*plain, *of_program)]
    assert {record.state for record in records} == {"completed"}
    own = {str(record.ref) for record in records if str(record.ref) in of_program}
    begun = sorted((record for record in records if record.rank == rank), key=started_ms)
    kinds = [str(record.ref) in own for record in begun]
    # While there is work of both.
    last = len(kinds) - max(kinds[::-1].index(True), kinds[::-1].index(False))
    runs = [len(list(run)) for _, run in itertools.groupby(kinds[kinds.index(True) : last])]
    assert kinds.count(True) == len(of_program)
    assert max(runs) <= 2 * SLOTS, kinds


def started_ms(record: JobRecord) -> int:
    """When it began."""
    assert record.started_ms is not None
    return record.started_ms


def test_a_killed_worker_costs_a_program_nothing(system: System, agents: Agents) -> None:
    """Another rank resumes it in the middle of its request: the same text, and everything it has done."""
    rank, other = ranks(system, TINY)
    # Long enough to be under way when the kill comes, on a fast machine too.
    options = {"model": TINY, "sampling": SEEDED, "max_tokens": 1600}
    expected = system.ended(agents.plain(prompt(4), **options), timeout_s=60).outputs
    job = agents.ask("lead", prompt(4), rank=rank, **options)
    wait_until(lambda: system.record(job).logged_tokens > 50, description="a generation under way", timeout_s=30)
    victim = system.holder(rank, TINY)
    victim.kill()
    record = system.ended(job, timeout_s=60)
    assert (record.rank, record.attempt, record.outputs) == (other, 2, expected)
    stored = agents.record("lead", TINY)
    assert stored is not None and (stored.text("rank"), stored.number("completed")) == (other, 1)
    victim.start()
    system.await_worker(victim)


def test_a_worker_that_leaves_takes_no_program_with_it(system: System, agents: Agents) -> None:
    """What runs ends there, and counts; what had not begun runs elsewhere meanwhile."""
    rank, other = ranks(system)
    running = [agents.ask(f"runs-{number}", "repeat 100 x", rank=rank) for number in range(SLOTS)]
    for job in running:
        wait_until(lambda job=job: system.tokens(job) > 3, description="it to run")
    behind = agents.ask("lead", "say x", rank=rank)
    leaving = system.holder(rank)
    leaving.signal(signal.SIGTERM)
    record = system.ended(behind)
    assert (record.rank, record.attempt) == (other, 1)
    assert not any(system.record(job).terminal for job in running)
    for job in running:
        record = system.ended(job, timeout_s=30)
        assert (record.state, record.rank, record.attempt) == ("completed", rank, 1)
    assert leaving.wait() == 0
    assert [agents.record(f"runs-{number}").number("completed") for number in range(SLOTS)] == [1] * SLOTS  # type: ignore[union-attr]
    leaving.start()
    system.await_worker(leaving)


def test_a_programs_job_that_kills_its_workers_ends(system: System, agents: Agents) -> None:
    """After as many tries as the settings allow, by name, with one dead letter; the Program's next request runs."""
    rank = ranks(system)[0]
    with Supervising(system) as supervising:
        poison = agents.ask("lead", "crash 0", rank=rank)
        beside = agents.ask("other", "repeat 20 x", rank=rank)
        record = system.ended(poison, timeout_s=60)
        assert system.ended(beside, timeout_s=60).outputs[0].text == "x" * 20
        assert (record.state, record.error_code, record.attempt) == ("failed", "poison", CAP)
        assert system.ended(agents.ask("lead", "say x", rank=rank), timeout_s=60).outputs[0].text == "x"
        assert supervising.restarts == CAP
        for worker in system.workers:
            system.await_worker(worker)
    with system.client() as client:
        letters = client.xrange(ModelKeys(parse_ref(poison).tag).dead)
        assert [letter[b"code"] for _, letter in letters] == [b"poison"]
