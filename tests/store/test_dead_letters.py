"""Dead letters: listed, tried again as new jobs, removed; never lost by a retry that was cut short, never doubled."""

from __future__ import annotations

from typing import Any

import pytest

from pool.errors import GenpoolError, QueueFull, UnknownModel
from pool.settings import LimitSettings, ModelSettings
from pool.state_settings import StateSettings
from pool.store.connection import Client
from pool.store.dead_letters import DeadLetters
from pool.store.delivery import Delivery
from pool.store.ids import parse_ref
from pool.store.inputs import read_input
from pool.store.jobs import JobStore
from pool.store.keys import ModelKeys
from pool.store.records import NewJob
from tasks import dead_letters
from tasks.config import Settings
from tasks.payloads import GenerationOptions, Sampling, TextPrompt
from tests.builders import give_up, new_job, request

KEYS = ModelKeys("tiny:0")
NOBODYS = f"gen_tiny.0_{'0' * 32}"


@pytest.fixture
def settings(redis_url: str) -> Settings:
    """The models `tiny`, and `off`, which is disabled."""
    return settings_of(redis_url)


def settings_of(url: str, **limits: Any) -> Settings:
    """Settings with these limits."""
    models = {"tiny": ModelSettings(source="random:1"), "off": ModelSettings(source="random:1", enabled=False)}
    return Settings(models=models, state=StateSettings(url=url), limits=LimitSettings(**limits))


def buried(client: Client, store: JobStore, rank: Delivery, /, **fields: Any) -> NewJob:
    """A job that was given up."""
    job = new_job(**fields)
    store.submit(job)
    give_up(client, rank)
    return job


def field_of(client: Client, job: str, name: str) -> str:
    """A field of a job's record."""
    return str(client.hget(KEYS.job(parse_ref(job).token), name).decode())


def outcomes(found: Any) -> dict[str, str]:
    """Outcome or error code by id."""
    return {job: what.code if isinstance(what, GenpoolError) else what for job, what in found}


def end(store: JobStore, *jobs: str) -> None:
    """Cancel jobs that a test leaves queued."""
    for job in jobs:
        store.cancel(parse_ref(job))


def test_a_job_that_was_given_up_is_listed(
    client: Client, store: JobStore, rank_a: Delivery, settings: Settings
) -> None:
    """With its id, the reason, its losses and the last rank; of other models there is none."""
    job = buried(client, store, rank_a)
    (letter,) = dead_letters.listed(settings)
    assert (letter.ref, letter.code, letter.losses, letter.rank) == (job.ref, "poison", 1, "rank-a")
    assert letter.record_exists
    assert abs(letter.at_ms - store.read(job.ref).finished_ms) < 1000
    assert dead_letters.listed(settings, "tiny") == [letter]
    assert dead_letters.listed(settings, "off") == []
    with pytest.raises(UnknownModel, match=r"Known: tiny, off\."):
        dead_letters.listed(settings, "*")
    DeadLetters(client, "tiny").drop([letter])


def test_a_retry_is_a_new_job_of_the_same_content(
    client: Client, store: JobStore, rank_a: Delivery, settings: Settings
) -> None:
    """Same input, options, seed, choices and tenant, in the background; the old job stays failed, its letter goes."""
    body = request(prompt=TextPrompt(text="Once"), sampling=Sampling(temperature=0.5, stop=("x",)), max_tokens=9, n=2)
    job = buried(
        client,
        store,
        rank_a,
        n=2,
        seed=2**63 - 1,
        tenant="acme",
        lane="batch",
        params='{"metadata":{"a":"b"}}',
        options=body.options().stored(),
        input=body.prompt.model_dump_json(),
        run_timeout_ms=1234,
        watch="node-1",
        reader_ms=60_000,
    )
    ((old, new),) = outcomes(dead_letters.retry(settings, [str(job.ref)])).items()
    assert (old, store.read(job.ref).state) == (str(job.ref), "failed")
    record = store.read(parse_ref(new))
    assert (record.ref.kind, record.state, record.background) == ("resp", "queued", True)
    assert (record.n, record.seed, record.tenant, record.params) == (2, 2**63 - 1, "acme", {"metadata": {"a": "b"}})
    options = GenerationOptions.model_validate_json(field_of(client, new, "options"))
    assert options.sampling == body.sampling.model_copy(update={"seed": 2**63 - 1})
    assert options.max_tokens == 9
    assert read_input(client, record.ref) == job.input
    assert [field_of(client, new, name) for name in ("lane", "watch", "run_timeout_ms")] == ["batch", "", "1234"]
    assert not client.exists(KEYS.dead)
    end(store, new)


def test_a_long_input_is_found_again(client: Client, store: JobStore, rank_a: Delivery, settings: Settings) -> None:
    """However the store keeps it."""
    prompt = TextPrompt(text="word " * 20_000)
    job = buried(client, store, rank_a, input=prompt.model_dump_json())
    (new,) = outcomes(dead_letters.retry(settings, [str(job.ref)])).values()
    assert read_input(client, parse_ref(new)) == job.input
    end(store, new)


def test_a_retry_cut_short_before_the_letter_was_removed_starts_nothing_twice(
    client: Client, store: JobStore, rank_a: Delivery, settings: Settings
) -> None:
    """Repeated, it finds the job it had submitted, and removes the letter."""
    job = buried(client, store, rank_a)
    ((entry, fields),) = client.xrange(KEYS.dead)
    (new,) = outcomes(dead_letters.retry(settings, [str(job.ref)])).values()
    client.xadd(KEYS.dead, fields, id=entry)
    assert outcomes(dead_letters.retry(settings, [str(job.ref)])) == {str(job.ref): new}
    assert client.zrange(KEYS.index, 0, -1) == [parse_ref(new).token.encode()]
    assert not client.exists(KEYS.dead)
    # Long after: the job it had submitted has ended, and its record has expired.
    client.xadd(KEYS.dead, fields, id=entry)
    end(store, new)
    client.delete(KEYS.job(parse_ref(new).token))
    assert outcomes(dead_letters.retry(settings, [str(job.ref)])) == {str(job.ref): new}
    assert client.zcard(KEYS.index) == 0
    assert not client.exists(KEYS.dead)


def test_a_job_whose_retry_dies_too_can_be_tried_again(
    client: Client, store: JobStore, rank_a: Delivery, settings: Settings
) -> None:
    """Each try is a job of its own."""
    ids = [str(buried(client, store, rank_a).ref)]
    for _ in range(2):
        (new,) = outcomes(dead_letters.retry(settings, [], "tiny")).values()
        ids.append(new)
        give_up(client, rank_a)
    assert len(set(ids)) == 3
    assert outcomes(dead_letters.drop(settings, [], "tiny")) == {ids[-1]: ""}


def test_what_cannot_be_tried_again_is_told_and_stays(
    client: Client, store: JobStore, rank_a: Delivery, settings: Settings
) -> None:
    """An expired record and an input that was not kept: each by name, and the next id is dealt with all the same."""
    private = buried(client, store, rank_a, store=False)
    expired = buried(client, store, rank_a)
    good = buried(client, store, rank_a)
    client.delete(KEYS.job(expired.ref.token))
    told = dict(dead_letters.retry(settings, [str(job.ref) for job in (private, expired, good)]))
    assert "store: false" in str(told[str(private.ref)])
    assert "has expired" in str(told[str(expired.ref)])
    end(store, str(told[str(good.ref)]))
    left = dead_letters.listed(settings)
    assert [(letter.ref.token, letter.record_exists) for letter in left] == [
        (private.ref.token, True),
        (expired.ref.token, False),
    ]
    # The record is what knew the id's kind; any kind finds the letter.
    assert str(left[1].ref) == f"gen_tiny.0_{expired.ref.token}"
    assert outcomes(dead_letters.drop(settings, [str(private.ref), str(left[1].ref)])) == {
        str(private.ref): "",
        str(left[1].ref): "",
    }
    assert not client.exists(KEYS.dead)


@pytest.mark.parametrize("act", [dead_letters.retry, dead_letters.drop])
def test_unknown_ids_are_named_and_never_patterns(
    client: Client, store: JobStore, rank_a: Delivery, settings: Settings, act: Any
) -> None:
    """Whatever the id holds, nothing else is touched."""
    job = buried(client, store, rank_a)
    odd = ["*", "", NOBODYS, f"gen_tiny.0_{'?' * 32}", f"gen_nope.0_{job.ref.token}", f"gen_off.0_{job.ref.token}"]
    odd.append(f"gen_tiny.7_{job.ref.token}")
    assert outcomes(act(settings, odd)) == dict.fromkeys(odd, "not_found")
    (letter,) = dead_letters.listed(settings)
    DeadLetters(client, "tiny").drop([letter])


def test_a_full_queue_ends_a_retry_and_the_letter_stays(
    client: Client, store: JobStore, rank_a: Delivery, redis_url: str
) -> None:
    """The same would be said of all that follow."""
    jobs = [buried(client, store, rank_a) for _ in range(2)]
    settings = settings_of(redis_url, pending_per_model=1)
    tried = dead_letters.retry(settings, [], "tiny")
    old, new = next(tried)
    with pytest.raises(QueueFull):
        next(tried)
    (letter,) = dead_letters.listed(settings)
    assert (old, letter.ref) == (str(jobs[0].ref), jobs[1].ref)
    DeadLetters(client, "tiny").drop([letter])
    end(store, str(new))


def test_a_disabled_models_letters_stay(client: Client, store: JobStore, redis_url: str, rank_a: Delivery) -> None:
    """Nobody would run the new job."""
    job = buried(client, store, rank_a)
    off = Settings(models={"tiny": ModelSettings(source="random:1", enabled=False)}, state=StateSettings(url=redis_url))
    assert outcomes(dead_letters.retry(off, [str(job.ref)])) == {str(job.ref): "model_not_found"}
    assert outcomes(dead_letters.drop(off, [str(job.ref)])) == {str(job.ref): ""}


def test_many_are_read_and_removed_page_by_page(client: Client, settings: Settings) -> None:
    """No step touches more than a hundred."""
    for number in range(250):
        client.xadd(KEYS.dead, {"job": f"{number:032x}", "code": "poison", "losses": 3, "rank": "r"})
    letters = dead_letters.listed(settings)
    assert [letter.ref.token for letter in letters] == [f"{number:032x}" for number in range(250)]
    assert DeadLetters(client, "tiny").drop(letters) == 250
    assert DeadLetters(client, "tiny").drop(letters) == 0
    assert not client.exists(KEYS.dead)


def test_letters_behind_a_moment_are_told_with_celerys_ids(client: Client, store: JobStore, rank_a: Delivery) -> None:
    """Each once, oldest first; those whose record has gone have no id that anybody could know."""
    letters = DeadLetters(client, "tiny")
    before = letters.entry_ago(60_000)
    jobs = [buried(client, store, rank_a, task_id=f"uuid-{number}") for number in range(3)]
    client.delete(KEYS.job(jobs[1].ref.token))
    told = letters.after(before)
    assert [(task_id, code) for _, task_id, code in told] == [("uuid-0", "poison"), ("uuid-2", "poison")]
    assert [task_id for _, task_id, _ in letters.after(told[0][0])] == ["uuid-2"]
    assert letters.after(told[-1][0]) == letters.after(letters.entry_ago(-60_000)) == []
    letters.drop(list(letters))
