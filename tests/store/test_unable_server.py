"""A state server that hangs, or takes no writes: what it refuses is said to be refused, and stays so."""

from __future__ import annotations

import os
import signal
import time

import pytest
import redis

from pool.errors import StateUnavailable
from pool.store.connection import Client, connect, state_errors
from pool.store.jobs import JobStore
from pool.store.keys import PROBE, keys_of
from pool.store.nodes import node_of
from pool.store.server import StateServer
from tests import builders
from tests.builders import new_job
from tests.waiting import wait_until


@pytest.mark.parametrize("word", ["NOREPLICAS", "MISCONF", "CLUSTERDOWN", "MASTERDOWN", "LOADING", "READONLY", "OOM"])
def test_a_server_that_cannot_serve_now_is_unavailable(client: Client, word: str) -> None:
    """Error replies of this kind say nothing of the command: it may be sent again."""
    with pytest.raises(StateUnavailable), state_errors():
        client.eval(f"return redis.error_reply('{word} for a reason')", 0)


def test_other_error_replies_stay_what_they_are(client: Client) -> None:
    """A command that is wrong does not get better by repeating it; BUSYGROUP is no busy server."""
    for word in ("WRONGTYPE", "BUSYGROUP"):
        with pytest.raises(redis.exceptions.ResponseError), state_errors():
            client.eval(f"return redis.error_reply('{word} NOREPLICAS for a reason')", 0)


def test_a_server_that_lacks_replicas_is_unavailable_and_not_ready(store: JobStore, client: Client) -> None:
    """`min-replicas-to-write` is not met: every write is refused, the one that only looks as well."""
    job = new_job()
    store.submit(job)
    store.ping()
    client.config_set("min-replicas-to-write", 1)
    try:
        for write in (store.ping, lambda: store.submit(new_job()), lambda: store.cancel(job.ref)):
            with pytest.raises(StateUnavailable, match="takes no writes"):
                write()
    finally:
        client.config_set("min-replicas-to-write", 0)
    store.ping()
    assert not client.exists(PROBE)
    store.cancel(job.ref)


def test_a_submit_that_was_given_up_is_not_carried_out_later(
    client: Client, redis_url: str, state_server: StateServer
) -> None:
    """A server that hangs reads what was sent to it when it goes on: then it is too late."""
    hasty = connect(redis_url, max_connections=1, timeout_s=0.5)
    store = builders.job_store(hasty)
    accepted, late = new_job(), new_job()
    store.submit(accepted)
    server = node_of(client, keys_of(late.ref).queue)
    before = server.info("commandstats")["cmdstat_evalsha"]["calls"]
    pid = state_server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(StateUnavailable):
            store.submit(late)
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_until(
        lambda: server.info("commandstats")["cmdstat_evalsha"]["calls"] > before, description="the submit to be read"
    )
    keys = keys_of(late.ref)
    assert not client.exists(keys.job(late.ref.token))
    assert client.zcard(keys.index) == client.zcard(keys.lanes["backlog"]) == 1
    store.submit(late)
    for job in (accepted, late):
        store.cancel(job.ref)
    hasty.connection_pool.disconnect()


def test_a_server_whose_clock_was_set_takes_submits(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its clock is ahead of what it was by an hour, as if it had been set: its replies tell, and the submit passes."""
    jobs = [new_job(), new_job()]
    store.submit(jobs[0])
    hour_s = time.monotonic() - 3600
    monkeypatch.setattr(time, "monotonic", lambda: hour_s)
    store.submit(jobs[1])
    assert store.read(jobs[1].ref).state == "queued"
    for job in jobs:
        store.cancel(job.ref)
