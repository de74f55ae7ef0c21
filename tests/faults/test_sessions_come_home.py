"""Sessions of a model whose `request_policy` is `consistent_hash`, on three real workers: turns come home, a full home
is passed over, and a worker that is killed moves its own sessions and no others."""

from __future__ import annotations

import pytest

from pool.rules.affinity import home_of
from pool.store.flows import session_of
from pool.store.ranks import RankRegistry
from tests.faults.conftest import StartSystem
from tests.system import SCRIPTED, Part, System
from tests.waiting import wait_until
from webapp.auth import NOBODY

SLOTS = 4
NAMES = [f"chat-{number}" for number in range(9)]


@pytest.fixture
def system(start_system: StartSystem) -> System:
    """Three workers of four slots each that know of each other; 5 ms a token, leases of 3 s."""
    system = start_system(
        workers=3,
        sections={"worker": {"lease_seconds": 3, "renew_seconds": 0.4}},
        models={SCRIPTED: {"request_policy": "consistent_hash", "target_inflight": SLOTS}},
        delay_ms=5,
    )
    system.await_readers(3)
    return system


def homes(system: System) -> dict[str, str]:
    """Each session's home among the workers whose lease holds."""
    with system.client() as client:
        ranks = [rank.id for rank in RankRegistry(client, SCRIPTED).live()]
    return {name: str(home_of(session_of(NOBODY, name), ranks)) for name in NAMES}


def turns(system: System) -> dict[str, str]:
    """Where a turn of each session is served, one after the other."""
    return {name: system.ended(system.submit("say x", session=name)).rank for name in NAMES}


def worker_of(system: System, rank: str) -> Part:
    """Its process."""
    return next(part for part in system.workers if rank.startswith(f"{part.name}@"))


def test_turns_come_home_and_a_lost_worker_moves_its_own(system: System) -> None:
    """In a fleet with room every turn comes home. Where one other worker has room it serves at once. A killed worker's
    turns wait for nobody while its lease still holds; after it they have new homes."""
    at = homes(system)
    assert len(set(at.values())) == 3
    # A home that is not let run for some milliseconds may be passed over.
    wait_until(lambda: turns(system) == at, description="all turns to come home")

    running = [system.submit_running("repeat 9000 x", max_output_tokens=9000) for _ in range(3 * SLOTS)]
    free = system.record(running[0]).rank
    system.jobs.cancel(running[0])
    elsewhere = [name for name in NAMES if at[name] != free]
    for name in elsewhere[:3]:
        assert system.ended(system.submit("say x", session=name)).rank == free
        assert not any(system.record(job).terminal for job in running[1:])
    for job in running[1:]:
        system.jobs.cancel(job)
    system.await_readers(3)

    lost = at[NAMES[0]]
    worker_of(system, lost).kill()
    assert lost not in turns(system).values()
    others = {name: rank for name, rank in at.items() if rank != lost}
    wait_until(lambda: lost not in homes(system).values(), description="the lease of the lost worker to end")
    assert homes(system).items() >= others.items()
    wait_until(lambda: turns(system) == homes(system), description="all turns to come home")
    system.assert_recovered()
