"""How many requests may wait in one API process, and what that takes."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest

from tests.webapp.api_process import ApiProcess
from webapp.errors import TooManyWaiting
from webapp.node import WaitingPlaces


@pytest.fixture
def few_files() -> Iterator[int]:
    """As many open files as a login shell often allows, for the test and what it starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = min(1024, soft)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    yield few
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("threads", "places"), [(1, 1), (2, 1), (24, 21), (256, 224), (2048, 2016)])
def test_an_eighth_of_the_threads_never_waits_but_not_more_than_32(threads: int, places: int) -> None:
    """Each place can be taken once; one more is refused until one is given back."""
    waiting = WaitingPlaces(threads)
    for _ in range(places):
        waiting.take()
    with pytest.raises(TooManyWaiting):
        waiting.take()
    waiting.give_back()
    waiting.take()


def test_a_node_asks_for_as_many_files_as_it_may_have_connections(
    start_node: Callable[..., ApiProcess], few_files: int
) -> None:
    """Started where 1,024 open files are allowed, a node of 2,048 threads allows itself more, if it can."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    node = start_node(SERVER__THREADS="2048")
    assert node.process is not None
    soft, _ = resource.prlimit(node.process.pid, resource.RLIMIT_NOFILE)
    assert soft > few_files
    assert soft >= (2048 + 512 if hard == resource.RLIM_INFINITY else min(hard, 2048 + 512))
