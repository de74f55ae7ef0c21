"""`genpool check --rerun`: ended jobs run again must give the same bytes (I2)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from pool.store.connection import Client as Redis
from pool.store.ids import parse_ref
from pool.store.keys import keys_of
from pool.store.log import pack, unpack
from tasks.client import Client
from tasks.maintenance import Maintenance
from tasks.payloads import Sampling
from tasks.rerun import Reruns, audit_texts
from tasks.services import open_services
from tests.builders import request
from tests.integration.celery_process import Site
from tests.waiting import wait_until


@pytest.fixture
def site(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A worker with the real engine."""
    site = Site(redis_url, tmp_path_factory.mktemp("site"))
    site.worker()
    yield site
    site.close()


@pytest.fixture
def ended(site: Site) -> list[str]:
    """Greedy and sampled jobs, one with two choices, one whose input was not kept."""
    client = Client(site.settings)
    sampled = Sampling(temperature=0.9, ignore_eos=True)
    ids = [
        client.submit(request(max_tokens=30)),
        client.submit(request(max_tokens=30, sampling=sampled)),
        client.submit(request(max_tokens=20, sampling=sampled, n=2)),
        client.submit(request(max_tokens=20), store=False),
    ]
    wait_until(lambda: all(client.get(job).terminal for job in ids), description="all to end", timeout_s=30)
    client.close()
    return ids


def test_the_same_request_gives_the_same_bytes(site: Site, ended: list[str], client: Redis) -> None:
    """Every job whose input was kept is compared; a text that was changed by hand, in record and log alike, so that
    no other invariant sees it, is named."""
    assert audit_texts(site.settings, 10) == Reruns(compared=3, not_run=1, differing=())
    ref = parse_ref(ended[0])
    keys = keys_of(ref)
    (output,) = json.loads(client.hget(keys.job(ref.token), "outputs"))
    last = unpack(client.lindex(keys.log(ref.token), -1))
    client.hset(keys.job(ref.token), "outputs", json.dumps([output | {"text": output["text"] + "!"}]))
    client.lset(keys.log(ref.token), -1, pack(type(last)(last.seq, last.choice, last.token_ids, last.text + "!")))
    said = site.run_genpool("check")
    assert (said.returncode, said.stdout) == (0, "No violation.\n")
    said = site.run_genpool("check", "--rerun", "10", "--json")
    assert said.returncode == 1
    assert [(found["invariant"], found["subject"]) for found in json.loads(said.stdout)] == [("I2", ref.token)]


def test_another_models_texts_are_not_compared(site: Site, ended: list[str], client: Redis) -> None:
    """Jobs that ended on other weights than those loaded now prove nothing."""
    for job in ended:
        ref = parse_ref(job)
        client.hset(keys_of(ref).job(ref.token), "engine", "another")
    assert audit_texts(site.settings, 10) == Reruns(0, 0, ())


def test_a_second_run_that_does_not_end_with_its_text_proves_nothing(site: Site, ended: list[str]) -> None:
    """No worker serves any more and the queue takes one job: that one times out, the others are refused. Neither is a
    violation, and neither ends the audit."""
    assert len(ended) == 4
    site.close()
    limits = site.settings.limits.model_copy(update={"queue_timeout_seconds": 0.5, "pending_per_model": 1})
    settings = site.settings.model_copy(update={"limits": limits})
    with closing(open_services(settings)) as services:
        upkeep = Maintenance(services.sweeper, ["tiny"])
        upkeep.start()
        try:
            assert audit_texts(settings, 10) == Reruns(compared=0, not_run=4, differing=())
        finally:
            upkeep.stop()
