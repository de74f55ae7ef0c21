"""Faults of the state server, each done while jobs run, wait and stream, on the embedded Valkey and on Redis 7.0.

After each fault: every accepted job has ended exactly once with the right text, in its first attempt unless a test says
otherwise; the audit is clean; nothing is pending; no API process or worker was started anew.

FAULTS=long in the environment runs the full product of servers, settings and costly faults (`make faults-long`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pool.store.ids import parse_ref
from pool.store.server import StateServer
from tests.faults.mixed_work import LONG as LONG_TEXT
from tests.faults.mixed_work import SHORT as SHORT_TEXT
from tests.faults.mixed_work import MixedWork, complaints
from tests.processes import free_port
from tests.servers import SERVERS, VALKEY, program
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

LONG = os.environ.get("FAULTS") == "long"
#: How the server syncs its append-only file. NO is the embedded server's: whoever starts it syncs in its stead.
NO, EVERYSEC, ALWAYS = "no", "everysec", "always"


@pytest.fixture(scope="module", params=SERVERS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One API node and two workers with two slots each; one system a server, which goes through all faults."""
    folder = tmp_path_factory.mktemp("site")
    options = {"models": {SCRIPTED: {"target_inflight": 2}}, "sections": {"server": {"sync_wait_seconds": 40}}}
    with System(folder, binary=program(request.param), **options) as system:
        system.start()
        yield system


@pytest.fixture
def work(site: System) -> Iterator[MixedWork]:
    """Work for the site, to be started."""
    with MixedWork(site) as made:
        yield made


def last(seconds: float) -> None:
    """A fault takes its time."""
    time.sleep(seconds)


def restart(system: System, *, away_s: float = 0.0) -> None:
    """kill -9 of the state server, and a new one on its files.

    A server that syncs every second holds back what it confirms while it does; a kill in just that time would lose it,
    so it comes at another."""
    with system.client() as client:
        wait_until(lambda: client.info("persistence")["aof_pending_bio_fsync"] == 0, description="no fsync under way")
    system.state.kill()
    last(away_s)
    system.state.start()
    system.await_state()


def sync_by(system: System, appendfsync: str) -> None:
    """Change the running server's setting, and that of the next."""
    argv = system.state.argv
    argv[argv.index("--appendfsync") + 1] = appendfsync
    with system.client() as client:
        client.config_set("appendfsync", appendfsync)


@contextmanager
def knocking(work: MixedWork) -> Iterator[None]:
    """A client submits without a pause meanwhile; what it gets is accepted or refused in due form."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def knock() -> None:
        try:
            while not stop.wait(0.05):
                work.knock()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test's own thread reports it
            failures.append(error)

    thread = threading.Thread(target=knock, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(60)
    assert not failures, failures[0]


@pytest.mark.parametrize("appendfsync", [NO, EVERYSEC, ALWAYS])
def test_a_kill_loses_nothing_that_was_accepted(site: System, work: MixedWork, appendfsync: str) -> None:
    """kill -9 in the middle of work, with clients submitting before, while and after the server is away."""
    sync_by(site, appendfsync)
    work.start()
    with knocking(work):
        last(0.2)
        restart(site, away_s=0.5)
    work.finish()


def test_two_restarts_in_three_seconds(site: System, work: MixedWork) -> None:
    """Two kills, the second while everybody is reconnecting after the first; a stream resumed in between."""
    work.start()
    with knocking(work):
        restart(site)
        work.stream.leave()
        last(1.2)
        restart(site)
    work.finish()
    assert work.stream.resumes >= 1


def test_a_replica_takes_no_work_and_loses_none(site: System, work: MixedWork) -> None:
    """The server becomes a replica for longer than a lease: submits are refused, workers stay, results wait with them
    and are written when it is a master again."""
    work.start()
    before = [len(worker.output()) for worker in site.workers]
    with site.client() as client:
        client.replicaof("127.0.0.1", free_port())
        for _ in range(2):
            assert work.knock().status_code == 503
        assert httpx.get(f"{work.url}/readyz", timeout=5).status_code == 503
        last(1)
        client.replicaof("NO", "ONE")
    work.finish()
    for worker, since in zip(site.workers, before, strict=True):
        assert len(complaints(worker, since)) < 30, complaints(worker, since)


def test_forgotten_scripts_are_loaded_again(site: System, work: MixedWork) -> None:
    """SCRIPT FLUSH, again and again, while every verb is in use."""
    work.start()
    with site.client() as client, knocking(work):
        for _ in range(20):
            client.script_flush()
            last(0.05)
    work.finish()


def test_a_lost_group_is_made_again(site: System, work: MixedWork) -> None:
    """XGROUP DESTROY: what runs goes on, what waits is handed out by the new group, finished jobs are not run again."""
    work.start()
    before = [len(worker.output()) for worker in site.workers]
    with site.client() as client:
        assert client.xgroup_destroy(site.keys().queue, "workers") == 1
    work.finish()
    for worker, since in zip(site.workers, before, strict=True):
        assert len(complaints(worker, since)) < 10, complaints(worker, since)


def test_a_lost_stream_is_filled_from_the_index(site: System, work: MixedWork) -> None:
    """DEL of the stream: what waits gets a new entry, what runs goes on and ends."""
    work.start()
    with site.client() as client:
        assert client.delete(site.keys().queue) == 1
    work.finish()


def test_a_full_server_refuses_work_and_lets_the_rest_end(site: System, work: MixedWork) -> None:
    """maxmemory below what is used: submits are refused with nothing half written, with a key or without; what was
    accepted runs to its end meanwhile, even where scripts must be loaded anew. Afterwards all is as before."""
    work.start()
    headers, body = {"Idempotency-Key": "full"}, {"model": SCRIPTED, "input": "say ok", "background": True}
    with site.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        stored = set(client.scan_iter(match=site.keys().job("*")))
        assert work.knock().status_code == 503
        client.script_flush()
        assert httpx.post(f"{work.url}/v1/responses", json=body, headers=headers).status_code == 503
        assert set(client.scan_iter(match=site.keys().job("*"))) == stored
        assert not list(client.scan_iter(match="gp:idempotency:*"))
        work.await_ends()
        work.await_clients()
        client.config_set("maxmemory", 0)
    work.finish()
    assert httpx.post(f"{work.url}/v1/responses", json=body, headers=headers).status_code == 200


def test_cut_connections_are_made_again(site: System, work: MixedWork) -> None:
    """CLIENT KILL of all connections, commands and subscriptions alike, over and over."""
    work.start()
    with site.client() as client, knocking(work):
        for _ in range(12):
            for kind in ("normal", "pubsub"):
                client.client_kill_filter(_type=kind, skipme=True)
            last(0.15)
    work.finish()


#: How much of what was written since a moment is cut off: the last byte, or a part anywhere in it.
CUTS = [0.0, 0.2, 0.5, 0.8, 1.0] if LONG else [0.7, 1.0]


@pytest.mark.parametrize("share", CUTS)
def test_a_torn_log_loses_no_more_than_its_end(site: System, work: MixedWork, share: float) -> None:
    """The server is killed, and the end of its append-only file is lost, as after a power failure.

    Promised: the state is one that the system went through, since a verb's writes are in the file together or not at
    all. So a job whose acceptance lies before the cut ends once with the right text, though its end, its tokens or its
    begin may have been cut; of the jobs accepted within the cut a first part is there and ends likewise, the others are
    unknown (404), never half there. A second restart finds the same. Not promised: that a stream open across the cut
    goes on without a gap.
    """
    for _ in range(6):
        work.knock(LONG_TEXT)
    before = dict(work.accepted)
    wait_until(lambda: logged(site, before) > 40, description="logged tokens")
    file = last_log_file(site)
    size = file.stat().st_size
    shown = logged(site, before)
    for _ in range(4):
        work.knock(SHORT_TEXT)
    after = [job for job in work.accepted if job not in before]
    wait_until(lambda: logged(site, before) > shown + 40, description="more logged tokens")
    site.state.kill()
    os.truncate(file, file.stat().st_size - max(1, round((file.stat().st_size - size) * share)))
    # What every start of an embedded server does first; see pool/store/torn_log.py.
    starter = StateServer(site.folder / "state", port=site.port)
    starter.acquire()
    starter.release()
    site.state.start()
    site.await_state()
    found = [httpx.get(f"{work.url}/v1/responses/{job}", timeout=10).status_code for job in after]
    assert found == sorted(found)
    assert set(found) <= {200, 404}
    assert share < 1 or set(found) == {404}
    work.accepted = before | {
        job: work.accepted[job] for job, status in zip(after, found, strict=True) if status == 200
    }
    work.knock_until_accepted()
    restart(site)
    work.check_ends(attempts=None)


def last_log_file(system: System) -> Path:
    """The append-only file that the server writes now."""
    files = (system.folder / "state" / "appendonlydir").glob("*.incr.aof")
    return max(files, key=lambda path: int(path.name.split(".")[-3]))


def logged(system: System, accepted: Iterable[str]) -> int:
    """Tokens in the logs of these jobs."""
    with system.client() as client:
        records = [client.hget(system.keys().job(parse_ref(job).token), "tokens") for job in accepted]
    return sum(int(count or 0) for count in records)


@contextmanager
def stalled(system: System) -> Iterator[None]:
    """The server hangs: connections stay, nothing is answered."""
    system.state.pause()
    try:
        yield
    finally:
        system.state.resume()


@pytest.mark.parametrize("site", SERVERS if LONG else [VALKEY], indirect=True, scope="module")
def test_a_stall_of_15_seconds_costs_no_lease(site: System, work: MixedWork) -> None:
    """The server hangs five leases long. Meanwhile the process is alive (/healthz) and says that it is not ready, and
    submits are refused in time with Retry-After. Afterwards nothing is lost, nothing ran twice."""
    work.start()
    with stalled(site):
        until_s = time.monotonic() + 15
        while time.monotonic() < until_s:
            assert httpx.get(f"{work.url}/healthz", timeout=1).status_code == 200
            assert work.knock().status_code == 503
            assert httpx.get(f"{work.url}/readyz", timeout=10).status_code == 503
    work.finish()


LEASES = 64


@pytest.mark.parametrize(
    ("server", "lease_s"),
    [(server, lease_s) for server in SERVERS for lease_s in (3, 15) if LONG or (server == VALKEY) == (lease_s == 3)],
)
def test_an_outage_of_5_seconds_takes_no_live_lease(tmp_path: Path, server: str, lease_s: int) -> None:
    """64 running jobs, the server away for 5 s, longer or shorter than their leases: none is taken from its worker."""
    sections = {"worker": {"lease_seconds": lease_s, "renew_seconds": 0.8}}
    model = {"target_inflight": LEASES // 2, "max_batch_size": LEASES // 2}
    with System(tmp_path, binary=program(server), models={SCRIPTED: model}, sections=sections, delay_ms=200) as system:
        system.start()
        with MixedWork(system) as work:
            keep_leases_over_an_outage(system, work)


def keep_leases_over_an_outage(system: System, work: MixedWork) -> None:
    """Run LEASES jobs at once, take the server away, and see all of them end in their first attempt."""
    for _ in range(LEASES):
        work.knock(SHORT_TEXT)
    with system.client() as client:
        leases = system.keys().leases
        wait_until(lambda: client.zcard(leases) == LEASES, description="64 live leases")
    restart(system, away_s=5)
    work.check_ends(attempts=1)
