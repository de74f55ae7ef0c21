"""Faults of the state server, each done while jobs run, wait and stream, on the embedded Valkey and on Redis 7.0.

After each fault: every accepted job has ended exactly once with the right text, in its first attempt unless a test says
otherwise; the audit is clean; nothing is pending; no API process or worker was started anew. F12, F13 and F15 are here
as far as work is under way; what F12 and F13 say of idle systems is in files of their own.

FAULTS=long in the environment runs the full product of servers, settings and costly faults (`make faults-long`). Else a
setting is tried on the server where it is used, and a fault that takes long on the embedded one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path

import httpx
import pytest

from pool.store.ids import parse_ref
from pool.store.server import StateServer
from tests.faults.gauges import missing
from tests.faults.mixed_work import LONG as LONG_TEXT
from tests.faults.mixed_work import SHORT as SHORT_TEXT
from tests.faults.mixed_work import MixedWork, complaints, warned
from tests.processes import free_port
from tests.servers import REDIS7, SERVERS, VALKEY, program
from tests.system import SCRIPTED, System
from tests.waiting import wait_until

LONG = os.environ.get("FAULTS") == "long"
#: How the server syncs its append-only file. NO is the embedded server's: whoever starts it syncs in its stead.
NO, EVERYSEC, ALWAYS = "no", "everysec", "always"
#: Longer than a lease.
READ_ONLY_S = 4.0
#: Submits at the same time while the server hangs.
AT_ONCE = 8


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], System]]:
    """One system a server, which goes through all faults; started when it is first asked for."""
    started: dict[str, System] = {}
    options = {"models": {SCRIPTED: {"target_inflight": 2}}, "sections": {"server": {"sync_wait_seconds": 40}}}
    with ExitStack() as stack:

        def site(server: str) -> System:
            if server not in started:
                system = System(tmp_path_factory.mktemp("site"), binary=program(server), **options)
                started[server] = stack.enter_context(system)
                system.start()
            return started[server]

        yield site


@pytest.fixture(params=SERVERS)
def site(request: pytest.FixtureRequest, sites: Callable[[str], System]) -> System:
    """One API node and two workers with two slots each."""
    return sites(request.param)


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


#: `no` is what genpool sets on its own server for `everysec`; others sync as they are told.
KILLS = [(VALKEY, NO), (VALKEY, ALWAYS), (REDIS7, EVERYSEC), (REDIS7, ALWAYS)]


@pytest.mark.parametrize(
    ("site", "appendfsync"),
    list(product(SERVERS, [NO, EVERYSEC, ALWAYS])) if LONG else KILLS,
    indirect=["site"],
)
def test_a_kill_loses_nothing_that_was_accepted(site: System, work: MixedWork, appendfsync: str) -> None:
    """kill -9 in the middle of work, with clients submitting before, while and after the server is away."""
    sync_by(site, appendfsync)
    work.start()
    with knocking(work):
        last(0.2)
        restart(site, away_s=0.5)
    work.finish()


def test_f12_two_restarts_in_three_seconds(site: System, work: MixedWork) -> None:
    """Two kills, the second while everybody is reconnecting after the first; a stream resumed in between. Complaints
    come no faster than one a second."""
    said = {worker: len(worker.output()) for worker in site.workers}
    began_s = time.monotonic()
    work.start()
    with knocking(work):
        restart(site)
        work.stream.leave()
        last(1.2)
        restart(site)
    work.finish()
    assert work.stream.resumes >= 1
    # Celery's own consumer prints a traceback a lost connection, one line of which has a level.
    for worker, since in said.items():
        assert len(warned(worker, since)) <= 10 + (time.monotonic() - began_s), warned(worker, since)


def test_f15_a_replica_takes_no_work_and_loses_none(site: System, work: MixedWork) -> None:
    """The server becomes a replica for longer than a lease, as after a failover that is taken back: submits are refused
    and leave nothing, jobs can still be read, workers stay, results wait with them and are written when it is a master
    again. No process floods its log."""
    lacked = missing(site)
    work.start()
    said = {part: len(part.output()) for part in (*site.workers, *site.apis)}
    with site.client() as client:
        client.replicaof("127.0.0.1", free_port())
        began_s = time.monotonic()
        before = client.dbsize()
        for _ in range(2):
            refused = work.knock()
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "state_unavailable")
            assert "id" not in refused.json()
        assert httpx.get(f"{work.url}/healthz", timeout=5).status_code == 200
        assert any("state server" in thing for thing in missing(site))
        assert site.poll(work.stream.job)["status"] == "in_progress"
        last(began_s + READ_ONLY_S - time.monotonic())
        assert client.dbsize() <= before
        client.replicaof("NO", "ONE")
    work.finish()
    for part, since in said.items():
        assert len(complaints(part, since)) < 30, complaints(part, since)
        assert len(part.output()[since:].splitlines()) < 20 * READ_ONLY_S, part.output()[since:]
    wait_until(lambda: missing(site) == lacked, description="the node to be as ready as before")


def test_forgotten_scripts_are_loaded_again(site: System, work: MixedWork) -> None:
    """SCRIPT FLUSH, again and again, while every verb is in use."""
    work.start()
    with site.client() as client, knocking(work):
        for _ in range(20):
            client.script_flush()
            last(0.05)
    work.finish()


@pytest.mark.parametrize("loss", ["group", "stream"])
def test_f12_a_lost_group_or_stream_is_made_again(site: System, work: MixedWork, loss: str) -> None:
    """XGROUP DESTROY, or DEL of the whole stream: what runs goes on, what waits is handed out by the new group (and
    gets a new entry from the index), finished jobs are not run again, and nothing runs hot over it."""
    ended = site.submit("say z")
    site.ended(ended)
    said = {worker: len(worker.output()) for worker in site.workers}
    began_s = time.monotonic()
    work.start()
    with site.client() as client:
        queue = site.keys().queue
        assert (client.xgroup_destroy(queue, "workers") if loss == "group" else client.delete(queue)) == 1
    work.finish()
    assert (site.starts(ended), site.record(ended).attempt) == (1, 1)
    for worker, since in said.items():
        assert len(warned(worker, since)) <= 1 + (time.monotonic() - began_s), warned(worker, since)


def test_a_full_server_refuses_work_and_lets_the_rest_end(site: System, work: MixedWork) -> None:
    """maxmemory below what is used: submits are refused with nothing half written, with a key or without; what was
    accepted runs to its end meanwhile, even where scripts must be loaded anew. Afterwards all is as before."""
    work.start()
    headers, body = {"Idempotency-Key": "full"}, {"model": SCRIPTED, "input": "say ok", "background": True}
    with site.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)
        before = stored(site)
        assert work.knock().status_code == 503
        client.script_flush()
        assert httpx.post(f"{work.url}/v1/responses", json=body, headers=headers).status_code == 503
        assert stored(site) == before
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


@pytest.mark.parametrize(
    ("site", "share"),
    list(product(SERVERS, CUTS) if LONG else zip(SERVERS, CUTS, strict=True)),
    indirect=["site"],
)
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


@pytest.mark.parametrize("site", SERVERS if LONG else [VALKEY], indirect=True)
def test_f13_a_stall_of_15_seconds_costs_no_lease(site: System, work: MixedWork) -> None:
    """The server hangs five leases long. Meanwhile the process is alive at once (/healthz) and says that it is not
    ready, and submits, many together, are refused within 5 s with Retry-After. Afterwards nothing is lost, nothing ran
    twice, and what was refused goes nowhere."""

    def timed_knock() -> tuple[httpx.Response, float]:
        began_s = time.monotonic()
        return work.knock(), time.monotonic() - began_s

    lacked, before = missing(site), stored(site)
    work.start()
    with stalled(site), ThreadPoolExecutor(AT_ONCE) as pool:
        until_s = time.monotonic() + 15
        while time.monotonic() < until_s:
            submits = [pool.submit(timed_knock) for _ in range(AT_ONCE)]
            assert httpx.get(f"{work.url}/healthz", timeout=1).status_code == 200
            assert any("state server" in thing for thing in missing(site))
            for answer, taken_s in (submit.result() for submit in submits):
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "state_unavailable")
                assert taken_s < 5
    work.finish()
    wait_until(lambda: missing(site) == lacked, description="the node to be as ready as before")
    accepted = {site.keys().job(parse_ref(job).token).encode() for job in work.accepted}
    with site.client() as client:
        refused = [client.hget(key, "state") for key in stored(site) - before - accepted]
    assert set(refused) <= {b"cancelled"}, "a job whose submit was refused goes nowhere"


def stored(system: System) -> set[bytes]:
    """The keys of all job records."""
    with system.client() as client:
        return set(client.scan_iter(match=system.keys().job("*"), count=1000))


LEASES = 64


@pytest.mark.parametrize(("server", "lease_s"), list(product(SERVERS, (3, 15))) if LONG else [(VALKEY, 3)])
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
