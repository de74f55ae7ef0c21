"""The crowd of the scale benchmark: its copies are as the store's verbs would have made them, and go on like others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.crowd import MODEL, Crowd, crowd_of, shares
from benchmarks.processes import state_server
from benchmarks.scale import ring_figures
from pool.store.audit import Audit

RANKS, PROGRAMS = 3, 60


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that lets a script touch keys that it does not declare."""
    with state_server(tmp_path_factory.mktemp("crowd")) as server:
        yield server.url


@pytest.fixture
def crowd(url: str) -> Iterator[Crowd]:
    """Three ranks with twenty Programs each."""
    made = crowd_of(url, PROGRAMS, RANKS)
    made.fill()
    yield made
    made.client.flushall()
    made.client.connection_pool.disconnect()


def test_a_crowd_is_sound(crowd: Crowd) -> None:
    """An audit of all its keys finds nothing, before and after turns of copies; Programs are there as shared out."""
    assert Audit(crowd.client, MODEL).run() == []
    for rank in crowd.names:
        counts = {kind: crowd.client.zcard(crowd.keys.place(rank)[kind]) for kind in ("active", "waiting")}
        wanted = shares(PROGRAMS, RANKS)
        assert counts == {kind: wanted[kind] for kind in counts}
        assert len(crowd.idle[rank]) == wanted["idle"]
    for decide in (crowd.decide, crowd.decide_by_scan):
        for rank in crowd.names:
            crowd.next_arrives(rank)
            decide(rank)
            crowd.end(rank)
    assert Audit(crowd.client, MODEL).run() == []


def test_copies_have_the_layout_of_the_first(crowd: Crowd) -> None:
    """The same fields, as small as they were."""
    records = [crowd.client.hgetall(key) for key in crowd.client.scan_iter(crowd.keys.record("*"))]
    assert len(records) == PROGRAMS
    kinds = {(record[b"state"], record[b"status"]) for record in records}
    assert len(kinds) == 3
    for kind in kinds:
        assert len({frozenset(each) for each in records if (each[b"state"], each[b"status"]) == kind}) == 1
    encodings = {crowd.client.object("encoding", key) for key in crowd.client.scan_iter(crowd.keys.record("*"))}
    assert encodings == {b"listpack"}


def test_recorded_decisions_are_those_that_are_carried_out(crowd: Crowd) -> None:
    """Nothing happens while they are recorded; then each admits its Program."""
    for rank in crowd.names:
        crowd.next_arrives(rank)
    before = [crowd.client.zcard(crowd.keys.place(rank)["active"]) for rank in crowd.names]
    crowd.decide_at_once(crowd.names)
    after = [crowd.client.zcard(crowd.keys.place(rank)["active"]) for rank in crowd.names]
    assert after == [count + 1 for count in before]
    assert crowd.busy_s > 0
    for rank in crowd.names:
        crowd.end(rank)
    assert Audit(crowd.client, MODEL).run() == []


def test_a_ring_moves_few(url: str) -> None:
    """Two processes say the same homes; about a quarter moves to a fourth rank, and only its own when one goes."""
    found = ring_figures(url, 400, nodes=2)
    assert 10 < found["moved to a fourth rank, %"] <= 35
    assert found["others moved when one went"] == found["nodes disagree"] == 0
