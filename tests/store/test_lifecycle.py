"""What is wanted of a model, and how an unload goes, in the store."""

from __future__ import annotations

from contextlib import closing

import pytest

from pool.errors import ModelClosed
from pool.settings import ModelSettings
from pool.state_settings import StateSettings
from pool.store.connection import Client
from pool.store.delivery import Delivery
from pool.store.handouts import Write
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.lifecycle import Lifecycle
from pool.store.ranks import RankRegistry, Wish
from pool.store.unloading import Unloading
from tasks.config import Settings
from tasks.lifecycle import ModelAdmin, ModelLoadFailed
from tasks.services import open_services
from tests.builders import RESULT_TTL_MS, completed, delivery, entry, new_job, sweeper, swept_steadily

MODEL = "tiny"
KEYS = ModelKeys(f"{MODEL}:0")


@pytest.fixture
def lifecycle(client: Client) -> Lifecycle:
    """The model's."""
    return Lifecycle(client, MODEL)


@pytest.fixture
def unloading(lifecycle: Lifecycle, store: JobStore) -> Unloading:
    """What any process does while it is being unloaded."""
    return Unloading(lifecycle, store, result_ttl_ms=RESULT_TTL_MS)


def beat(client: Client, rank: str, state: str) -> Wish:
    """A rank that tells this state; what it is told."""
    wish = RankRegistry(client, MODEL).beat(rank, f"life-of-{rank}", lease_ms=60_000, facts={"state": state})
    assert wish is not None
    return wish


def state(lifecycle: Lifecycle) -> str:
    """As it is shown."""
    wanted, ranks = lifecycle.look()
    return wanted.state(ranks)


def refusal(store: JobStore, **fields: object) -> ModelClosed:
    """What a submit is told."""
    with pytest.raises(ModelClosed) as refused:
        store.submit(new_job(), **fields)  # type: ignore[arg-type] # a test's own
    assert refused.value.param == "model"
    return refused.value


def test_a_load_that_failed_says_why_in_one_sentence(redis_url: str, client: Client, lifecycle: Lifecycle) -> None:
    """Whether or not the reason ends as one."""
    settings = Settings(state=StateSettings(url=redis_url), models={MODEL: ModelSettings(source="random:1")})
    with closing(open_services(settings)) as services:
        beat(client, "rank-a", "failed")
        asked = ModelAdmin(services).load(MODEL)
        for reason in ("No weights at x.", "No weights at x"):
            lifecycle.load_failed(asked.wanted.change, "rank-a", reason)
            with pytest.raises(ModelLoadFailed) as failed:
                ModelAdmin(services).settle(asked, 0)
            assert failed.value.message == "tiny could not be loaded: No weights at x."


def test_an_unload_ends_what_waits_and_spares_what_runs(
    store: JobStore, rank_a: Delivery, lifecycle: Lifecycle, unloading: Unloading, client: Client
) -> None:
    """From the first instant nothing comes in and nothing begins, also what a rank has read already; all that waits
    ends as `model_unloading`, further choices included; what runs ends by itself, and then the model is unloaded."""
    beat(client, "rank-a", "loaded")
    jobs = [new_job(n=2) for _ in range(5)]
    for job in jobs[:2]:
        store.submit(job)
    running = rank_a.take(4, 100).handouts
    for job in jobs[2:]:
        store.submit(job)
    read = rank_a.read(1, 100)
    assert lifecycle.unload(60_000).code == "ok"
    assert refusal(store).code == "model_unloading"
    assert list(rank_a.begin(read)) == [] and rank_a.take(1, 1).handouts == []
    step = unloading.go_on()
    assert (step.ended, step.code, state(lifecycle)) == (3, "busy", "unloading")
    for job in jobs[2:]:
        record = store.read(job.ref)
        assert (record.state, record.error_code) == ("failed", "model_unloading")
    assert unloading.go_on().ended == 0
    answers = rank_a.write([Write(job.lease, 0, (entry(0, 7),), completed("x", "x")) for job in running])
    assert [answer.code for answer in answers] == ["ok", "ok"]
    assert unloading.go_on().code == "busy", "the rank still has the model"
    beat(client, "rank-a", "unloaded")
    assert unloading.go_on().code == "ok" and state(lifecycle) == "unloaded"
    assert refusal(store).code == "model_not_loaded"
    assert [store.read(job.ref).state for job in jobs[:2]] == ["completed", "completed"]
    assert client.xlen(KEYS.queue) == 0 and not client.exists(KEYS.index)


def test_what_comes_back_to_the_queue_ends_too(
    store: JobStore, rank_a: Delivery, lifecycle: Lifecycle, unloading: Unloading, client: Client
) -> None:
    """A worker that hands back what it runs, and one that dies with it; what was logged stays readable."""
    for _ in range(2):
        store.submit(new_job())
    back, lost = rank_a.take(2, 100).handouts
    rank_a.write([Write(job.lease, 0, (entry(0, 7, text="so far"),)) for job in (back, lost)])
    lifecycle.unload(60_000)
    rank_a.hand_back([back.lease])
    assert unloading.go_on().ended == 1
    swept_steadily(client)
    client.zadd(KEYS.leases, {lost.lease.token: 1})
    swept = sweeper(client).sweep(MODEL)
    assert swept.requeued == 1
    assert sweeper(client).sweep(MODEL).requeued == 0 and state(lifecycle) == "unloaded"
    for token in (back.lease.token, lost.lease.token):
        assert client.hmget(KEYS.job(token), "state", "error_code") == [b"failed", b"model_unloading"]
        assert client.llen(KEYS.log(token)) == 1


def test_the_time_to_drain_ends_what_still_runs(
    store: JobStore, rank_a: Delivery, lifecycle: Lifecycle, unloading: Unloading, client: Client
) -> None:
    """Whatever its worker does: the job fails by name. A later call may shorten the time, never lengthen it."""
    store.submit(new_job())
    (job,) = rank_a.take(1, 100).handouts
    lifecycle.unload(60_000)
    assert unloading.go_on().ended == 0
    assert lifecycle.unload(600_000).code == "same"
    assert beat(client, "rank-a", "draining").drain_ms <= 60_000
    assert lifecycle.unload(0).code == "same"
    assert beat(client, "rank-a", "draining").drain_ms == 0
    assert unloading.go_on().ended == 0, "its worker has a moment to hand it back"
    client.hincrby(KEYS.model, "until_ms", -3000)
    assert unloading.go_on().ended == 1
    assert client.hget(KEYS.job(job.lease.token), "error_code") == b"model_unloading"
    assert rank_a.write([Write(job.lease, 0, (entry(0, 7),), completed("x"))])[0].code == "stale"
    assert state(lifecycle) == "unloading", "the rank has not let go of the model"
    beat(client, "rank-a", "failed")
    unloading.go_on()
    assert state(lifecycle) == "unloaded"


def test_a_load_waits_for_the_drain(
    store: JobStore, lifecycle: Lifecycle, unloading: Unloading, client: Client
) -> None:
    """It is carried out once the unload is over; until then clients may come back. Another unload takes it back."""
    assert beat(client, "rank-a", "loaded") == Wish()
    lifecycle.unload(60_000)
    assert refusal(store).retry_after_s is None
    assert lifecycle.load().code == "later"
    assert refusal(store).retry_after_s is not None and state(lifecycle) == "unloading"
    assert not beat(client, "rank-a", "draining").loaded
    assert unloading.go_on().code == "busy"
    before = beat(client, "rank-a", "unloaded")
    assert unloading.go_on().code == "ok"
    wish = beat(client, "rank-a", "loading")
    assert (wish.loaded, wish.is_asked, wish.change) == (True, True, before.change + 1)
    assert state(lifecycle) == "loading"
    store.submit(job := new_job())
    store.cancel(job.ref)
    beat(client, "rank-a", "loaded")
    assert not beat(client, "rank-a", "loaded").is_asked and state(lifecycle) == "loaded"
    lifecycle.unload(60_000)
    lifecycle.load()
    lifecycle.unload(60_000)
    beat(client, "rank-a", "unloaded")
    unloading.go_on()
    assert state(lifecycle) == "unloaded"


def test_wishes_may_be_repeated(lifecycle: Lifecycle, unloading: Unloading, client: Client) -> None:
    """The second load of a loaded or loading model and the second unload change nothing."""
    beat(client, "rank-a", "loaded")
    first = lifecycle.load()
    assert (first.code, lifecycle.load()) == ("ok", type(first)("same", first.change))
    unloaded = lifecycle.unload(1000)
    assert (unloaded.change, lifecycle.unload(1000).code) == (first.change + 1, "same")
    beat(client, "rank-a", "unloaded")
    unloading.go_on()
    assert lifecycle.unload(1000).code == "same" and state(lifecycle) == "unloaded"
    assert unloading.go_on().code == "kept"


def test_a_load_that_failed_on_all_ranks_refuses(store: JobStore, lifecycle: Lifecycle, client: Client) -> None:
    """Of two ranks the second failure says that the model has failed; until then jobs wait. Asking again tries again,
    and one rank that loads it is enough."""
    lifecycle.load()
    for rank in ("rank-a", "rank-b"):
        wish = beat(client, rank, "loading")
    assert not _fails(lifecycle, client, "rank-a", wish)
    store.submit(job := new_job())
    store.cancel(job.ref)
    assert _fails(lifecycle, client, "rank-b", wish)
    assert refusal(store).code == "model_failed" and state(lifecycle) == "failed"
    assert lifecycle.read().last_error == "no such file"
    again = lifecycle.load()
    assert (again.code, again.change) == ("ok", wish.change + 1)
    assert lifecycle.read().last_error == "no such file", "kept until a load succeeds"
    beat(client, "rank-b", "loaded")
    lifecycle.loaded()
    assert state(lifecycle) == "loaded" and not lifecycle.read().last_error
    assert not _fails(lifecycle, client, "rank-a", beat(client, "rank-a", "loading"))
    store.submit(job := new_job())
    store.cancel(job.ref)


def test_a_worker_that_fails_unasked_keeps_nobody_out(store: JobStore, lifecycle: Lifecycle, client: Client) -> None:
    """At its start, or as one of several after a load that worked: jobs wait, and the error is shown."""
    assert not _fails(lifecycle, client, "rank-a", beat(client, "rank-a", "loading"))
    assert lifecycle.read().takes_jobs and state(lifecycle) == "failed"
    store.submit(job := new_job())
    store.cancel(job.ref)


def test_a_refused_submit_frees_its_key(store: JobStore, lifecycle: Lifecycle) -> None:
    """With an Idempotency-Key the refusal is final for the id, as that of a full queue is; a job that is there is found
    by a resend, also while the model takes no others."""
    known, other = new_job(), new_job()
    store.submit(known)
    lifecycle.unload(1000)
    store.submit(known)
    assert store.claim("default", "key", other.ref, body_hash="h", ttl_ms=60_000) is None
    with pytest.raises(ModelClosed):
        store.submit(other, key="key")
    third = new_job()
    assert store.claim("default", "key", third.ref, body_hash="other", ttl_ms=60_000) is None
    store.cancel(known.ref)


def test_a_large_input_goes_with_its_job(
    store: JobStore, lifecycle: Lifecycle, unloading: Unloading, client: Client, redis_url: str
) -> None:
    """Blocks that only the record names are let go of, too; and a model of another name goes on."""
    other = delivery(redis_url, model="other")
    store.submit(new_job(input="x" * 200_000, prompt=b"", store=False))
    store.submit(new_job(model="other"))
    lifecycle.unload(1000)
    assert unloading.go_on().ended == 1
    assert list(client.scan_iter(match=KEYS.input("*"))) == []
    (taken,) = other.take(1, 100).handouts
    other.write([Write(taken.lease, 0, (), completed("x"))])
    other.close()


def _fails(lifecycle: Lifecycle, client: Client, rank: str, wish: Wish) -> bool:
    beat(client, rank, "failed")
    return lifecycle.load_failed(wish.change, rank, "no such file")
