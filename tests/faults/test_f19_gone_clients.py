"""F19: clients that go away stop paying for what they asked for, except where it was to go on without them."""

from __future__ import annotations

import socket
import time

import pytest

from pool.rules import jobs
from tests.faults.conftest import StartSystem
from tests.faults.gauges import api_waits, ask, engine_sessions
from tests.system import SCRIPTED
from tests.waiting import wait_until

PLACES = 5
STOPS_WITHIN_S = 2.0
LONG = "repeat 400 x"
#: Enough tokens for seconds of prefill, at 16 a step.
PREFILL = "." * 4000 + "|" + LONG


def test_f19_only_those_who_wait_keep_their_job(start_system: StartSystem) -> None:
    """Synchronous and streamed, while tokens come and during prefill: dropped, the job stops within two seconds and its
    place goes to whoever waits. A background job goes on without its submitter."""
    system = start_system(
        workers=1,
        delay_ms=20,
        models={SCRIPTED: {"target_inflight": PLACES, "max_prefill_tokens_per_tick": 16}},
    )
    keys = system.keys()
    with system.client() as client:

        def begun(connection: socket.socket, count: int) -> tuple[socket.socket, str]:
            """The connection with its job's id, once that runs."""
            wait_until(lambda: client.zcard(keys.leases) == count, description=f"{count} jobs to run")
            (token,) = [found.decode() for found in client.zrange(keys.leases, 0, -1) if found.decode() not in known]
            known.add(token)
            return connection, f"resp_scripted.0_{token}"

        known: set[str] = set()
        bodies = [{"input": script, "stream": stream} for script in (LONG, PREFILL) for stream in (False, True)]
        dropped = [begun(ask(system, **body), count) for count, body in enumerate(bodies, start=1)]
        submitter, kept = begun(ask(system, input="repeat 150 x", background=True), PLACES)
        submitter.close()
        wait_until(lambda: all(system.tokens(job) for _, job in dropped[:2]), description="tokens of those in decode")
        assert [system.tokens(job) for _, job in dropped[2:]] == [0, 0], "still in prefill"
        waiting = system.submit("repeat 2 w")
        assert system.poll(waiting)["status"] == "queued"
        for connection, _ in dropped:
            connection.close()
        gone_s = time.monotonic()
        wait_until(
            lambda: time.monotonic() > gone_s + STOPS_WITHIN_S, description="as long as stopping may take", timeout_s=10
        )
        seen = [system.tokens(job) for _, job in dropped]
        assert system.ended(waiting, timeout_s=5).outputs[0].text == "ww"
        assert [system.tokens(job) for _, job in dropped] == seen, "tokens of dropped jobs went on"
        assert seen[2:] == [0, 0]
    for _, job in dropped:
        assert system.poll(job)["status"] == "cancelled"
        assert system.record(job).state == jobs.CANCELLED
    record = system.ended(kept)
    assert (record.state, record.outputs[0].text) == (jobs.COMPLETED, "x" * 150)
    wait_until(lambda: api_waits(system) == (0, 0), description="no request to wait")
    system.accepted += [kept, *(job for _, job in dropped)]
    system.assert_recovered()
    assert engine_sessions(system) == set()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["closed", "half closed"])
def test_f19_bytes_sent_ahead_do_not_hide_who_has_gone(start_system: StartSystem, leave: str, stream: bool) -> None:
    """A next request, or a stray line end, behind the one that is waited for: its client leaves, and so do job, thread
    and place."""
    system = start_system(workers=1, delay_ms=20)
    with system.client() as client:
        for ahead in (b"\r\n", b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n"):
            connection = ask(system, input="repeat 2000 x", stream=stream)
            wait_until(lambda: client.zcard(system.keys().leases) == 1, description="the job to run")
            (token,) = client.zrange(system.keys().leases, 0, -1)
            connection.sendall(ahead)
            if leave == "closed":
                connection.close()
            else:
                connection.shutdown(socket.SHUT_WR)
            job = f"resp_scripted.0_{token.decode()}"
            wait_until(lambda job=job: system.poll(job)["status"] == "cancelled", description="the job to be cancelled")
            wait_until(lambda: api_waits(system) == (0, 0), description="no request to wait")
            connection.close()
            system.accepted.append(job)
    system.assert_recovered()
