"""Commands and verbs find the node that has their key, wherever it is just now."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from pool.errors import ConfigurationError, StateUnavailable
from pool.store.audit import Audit
from pool.store.connection import Client, connect, state_errors
from pool.store.handouts import Write
from pool.store.hints import Subscription
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys, node_channel
from pool.store.nodes import name_of, node_of
from pool.store.running import run_many, run_stream
from pool.store.scripts import script
from pool.store.slot_map import cluster_address, slot_of
from pool.store.totals import surveys
from tasks.config import load_configuration
from tasks.doctor import FAILED, OK, examine
from tests import builders
from tests.builders import completed, entry, new_job
from tests.cluster.conftest import model_on
from tests.clusters import ClusterNode, StateCluster
from tests.waiting import wait_until

TINY = ModelKeys("tiny:0")


def test_models_of_all_nodes_are_asked_together(cluster: StateCluster, client: Client, store: JobStore) -> None:
    """What concerns several models goes to the node of each, and comes back in the order it was asked for."""
    models = [model_on(cluster, at) for at in (2, 0, 1)]
    jobs = [new_job(model=model) for model in models for _ in range(models.index(model) + 1)]
    for job in jobs:
        store.submit(job)
    assert [survey.queued for survey in surveys(client, models).values()] == [1, 2, 3]
    assert [len(node.client.keys("gp:*")) > 0 for node in cluster.primaries] == [True] * 3
    views = store.views([(job.ref, 0) for job in jobs])
    assert [view.record.ref for view in views if view is not None] == [job.ref for job in jobs]
    clocks = run_many(client, [["EXISTS", ModelKeys(f"{models[0]}:0").index], ["TIME"], ["EXISTS", TINY.index]])
    assert (clocks[0], len(clocks[1]), clocks[2]) == (1, 2, 0)
    assert {job.decode() for job in client.scan_iter("gp:*:job:*")} == {
        ModelKeys(job.ref.tag).job(job.ref.token) for job in jobs
    }
    for job in jobs:
        store.cancel(job.ref)
    assert [violation for model in models for violation in Audit(client, model).run()] == []


def test_what_only_a_node_can_answer_is_asked_of_one(client: Client) -> None:
    """The time, or the memory, of a cluster is no one node's: asking without a key is a mistake."""
    for ask in (client.time, client.info, client.dbsize):
        with pytest.raises(TypeError, match="name one by a key"):
            ask()
    assert node_of(client, TINY.queue).time()


def test_a_slot_that_moves_takes_its_jobs_along(cluster: StateCluster, client: Client, store: JobStore) -> None:
    """A model's slot goes to another node, between two writes of a worker and while it waits for work: it writes on,
    its read wakes, and neither it nor a caller notices."""
    rank = builders.delivery(cluster.url)
    first, second = new_job(), new_job()
    store.submit(first)
    (handout,) = rank.take(1, 10).handouts
    rank.write([Write(handout.lease, 0, (entry(0, 5),))])
    was, target = cluster.owner(TINY.queue), _another(cluster, TINY.queue)
    cluster.move(TINY.queue, target)
    answers = rank.write([Write(handout.lease, 1, (entry(1, 6),)), Write(handout.lease, 2, (), completed("xx"))])
    assert [answer.code for answer in answers] == ["ok", "ok"]
    assert store.view(first.ref).record.outputs[0].text == "xx"
    assert was.client.keys("gp:{tiny:0}:*") == []

    taken: list[str] = []

    def take() -> None:
        while not taken:
            taken.extend(found.lease.token for found in rank.take(1, 3000).handouts)

    reader = threading.Thread(target=take)
    reader.start()
    wait_until(lambda: _blocked(target.client), description="the read to block")
    cluster.move(TINY.queue, was)
    store.submit(second)
    reader.join(10)
    assert taken == [second.ref.token]
    assert client.xlen(TINY.queue) == 1
    assert name_of(client, node_of(client, TINY.queue)) == was.address
    store.cancel(second.ref)
    assert Audit(client, "tiny").run() == []
    rank.close()


def test_a_slot_that_is_being_moved_serves_what_is_whole(
    cluster: StateCluster, client: Client, store: JobStore
) -> None:
    """Some keys are at the new node already (ASK): they are read there. A verb that needs keys of both nodes is refused
    as by a server that is away for a moment (TRYAGAIN), and passes once the move is done."""
    job = new_job()
    store.submit(job)
    source, target = cluster.owner(TINY.queue), _another(cluster, TINY.queue)
    cluster.begin_move(TINY.queue, target)
    record = TINY.job(job.ref.token)
    cluster.migrate(source, target, record)
    assert client.hget(record, "state") == b"queued"
    pipe = client.pipeline(transaction=False)
    pipe.hget(record, "state")
    pipe.zcard(TINY.index)
    assert pipe.execute() == [b"queued", 1]
    assert run_many(client, [script("unwatch")(job=record, node="nobody")]) == [[b"ok"]]
    with pytest.raises(StateUnavailable):
        store.cancel(job.ref)
    assert store.read(job.ref).state == "queued"
    while keys := source.cluster("GETKEYSINSLOT", slot_of(TINY.queue), 10):
        cluster.migrate(source, target, *keys)
    for node in cluster.primaries:
        node.cluster("SETSLOT", slot_of(TINY.queue), "NODE", target.id)
    assert store.cancel(job.ref).state == "cancelled"
    assert Audit(client, "tiny").run() == []


def test_a_blocked_read_is_woken_at_its_node(cluster: StateCluster) -> None:
    """A worker that leaves wakes its own read, at whichever node it waits."""
    rank = builders.delivery(cluster.url)
    ended: list[int] = []
    leaving = threading.Event()

    def read() -> None:
        while not leaving.is_set():
            ended.append(len(rank.read(1, 4500)))

    reader = threading.Thread(target=read)
    reader.start()
    wait_until(lambda: rank._reading.server, description="the first read")
    for node in [*cluster.primaries, cluster.primaries[0]]:
        if node is not cluster.owner(TINY.queue):
            cluster.move(TINY.queue, node)
        # The first read at a new node does not wait.
        wait_until(
            lambda at=node: rank._reading.server.address == at.address and _blocked(at.client),  # type: ignore[misc]
            description="the read to block",
        )
        before = len(ended)
        rank.unblock()
        wait_until(lambda count=before: len(ended) > count, description="the read to end", timeout_s=3)  # type: ignore[misc]
    leaving.set()
    rank.unblock()
    reader.join(10)
    assert not any(ended)
    rank.close()


def test_a_verb_is_loaded_at_every_node_it_needs(cluster: StateCluster, client: Client) -> None:
    """Each node has its own cache of scripts, and a node that takes over a slot does not know them."""
    watch = script("unwatch")(job=TINY.job("a"), node="n")
    assert list(run_stream(client, [watch, watch])) == [[b"gone"]] * 2
    cluster.move(TINY.queue, _another(cluster, TINY.queue))
    assert list(run_stream(client, (watch for _ in range(40)))) == [[b"gone"]] * 40
    for node in cluster.primaries:
        node.client.script_flush()
    assert list(run_stream(client, [watch])) == [[b"gone"]]


def test_a_hint_is_heard_whichever_node_it_comes_from(cluster: StateCluster, client: Client) -> None:
    """Nodes pass messages on, so a process listens at one of them."""
    listener = Subscription(client, node_channel("me"))
    for node in cluster.primaries:
        node.client.publish(node_channel("me"), "token")
        assert listener.message(5) == b"token"
    listener.close()


def test_a_process_may_start_before_its_cluster(tmp_path: Path) -> None:
    """Nothing is asked before it is needed; until the nodes are there, the state is away."""
    cluster = StateCluster(tmp_path / "cluster")
    client = connect(cluster.url, timeout_s=0.5)
    store = builders.job_store(client)
    with pytest.raises(StateUnavailable):
        store.ping()
    with pytest.raises(StateUnavailable), state_errors():
        client.get("gp:{tiny:0}:x")
    with cluster:
        wait_until(lambda: _pings(store), description="the store to find it")
        client.connection_pool.disconnect()


def test_one_node_does_for_a_single_server(cluster: StateCluster, client: Client) -> None:
    """A URL that names one node of several as if it were all is told apart from a server that is away."""
    alone = connect(f"redis://{_another(cluster, TINY.queue).address}")
    with pytest.raises(StateUnavailable, match=r"redis\+cluster://"), state_errors():
        alone.exists(TINY.queue)
    alone.connection_pool.disconnect()
    assert client.exists(TINY.queue) == 0


def _another(cluster: StateCluster, key: str) -> ClusterNode:
    """A primary that has not the key."""
    return next(node for node in cluster.primaries if node is not cluster.owner(key))


def _blocked(node: Client) -> bool:
    return int(node.info("clients")["blocked_clients"]) > 0


def _pings(store: JobStore) -> bool:
    try:
        store.ping()
    except StateUnavailable:
        return False
    return True


def test_doctor_looks_at_every_node(cluster: StateCluster, tmp_path: Path) -> None:
    """A setting that may lose jobs is found wherever it is; what all nodes together must be is said once."""
    path = tmp_path / "genpool.toml"
    single = 'broker_url = "redis://127.0.0.1:1/0"\nresult_backend = "redis://127.0.0.1:1/0"'
    path.write_text(f'[state]\nurl = "{cluster.url}"\n{single}\n')
    settings = load_configuration(path, environ={}).settings
    odd = cluster.primaries[1]
    odd.client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        found = {finding.check: finding for finding in examine(settings, lambda _: None)}
    finally:
        odd.client.config_set("maxmemory-policy", "noeviction")
    policies = {name: finding.status for name, finding in found.items() if name.startswith("state memory policy")}
    assert policies == {
        f"state memory policy {node.address}": FAILED if node is odd else OK for node in cluster.primaries
    }
    assert found["state cluster"].detail == "all slots are served; 3 of 3 nodes have no replica"
    assert (found["state writable"].status, found[f"clock {odd.address}"].status) == (OK, OK)


@pytest.mark.parametrize(
    ("lines", "field"),
    [
        ('url = "redis+cluster://a:1,b:2"', "state.broker_url"),
        ('url = "redis+cluster://a:1"\nbroker_url = "redis://c:1"', "state.result_backend"),
        ('url = "redis+cluster://a:1"\nbroker_url = "redis+cluster://c:1"', "state.broker_url"),
        ('url = "redis+cluster://a"', "state.url"),
        ('url = "redis+cluster://a:1/3"', "state.url"),
    ],
)
def test_settings_of_a_cluster_are_checked_at_the_start(tmp_path: Path, lines: str, field: str) -> None:
    """Celery needs a server of its own; a cluster has no databases, and its nodes have ports."""
    path = tmp_path / "genpool.toml"
    path.write_text(f"[state]\n{lines}\n")
    with pytest.raises(ConfigurationError) as error:
        load_configuration(path, environ={})
    assert error.value.param == field


def test_a_cluster_has_one_user_and_many_addresses() -> None:
    """Password, TLS and options of the URL hold for every node."""
    address = cluster_address("rediss+cluster://me:s%40@a.example:6379,[::1]:7000/?ssl_ca_certs=/ca.pem")
    assert address is not None
    assert address.nodes == ("a.example:6379", "[::1]:7000")
    assert address.node_url("b:1") == "rediss://me:s%40@b:1?ssl_ca_certs=/ca.pem"
    assert cluster_address("redis://a:1") is None
