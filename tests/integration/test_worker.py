"""A real Celery worker: what it serves, refuses, shows and obeys."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from celery import Celery
from celery.exceptions import CeleryCommandException, TaskRevokedError
from celery.worker import state as celery_state

from pool.errors import InvalidRequest
from pool.store.connection import connect
from pool.store.ids import new_ref, parse_ref
from pool.store.keys import ModelKeys
from pool.store.stored_jobs import erase
from tasks.celery import create_app
from tasks.client import Client
from tasks.payloads import Sampling, TextPrompt
from tasks.queues import Queues
from tests.builders import delivery, request
from tests.celery_answers import answer
from tests.integration.celery_process import Site, Worker
from tests.waiting import wait_until
from workers.host import Host

LONG = {"max_tokens": 1900, "sampling": Sampling(temperature=0.0, ignore_eos=True)}
CANARY = "ZQ-CANARY-17"


@pytest.fixture(autouse=True)
def _a_worker_serves(worker: Worker) -> None:
    """All tests share one, which none of them may end."""
    assert worker.process.poll() is None


@pytest.fixture(scope="module")
def app(site: Site) -> Iterator[Celery]:
    """A Celery application as a caller has it; one for the module, because Celery's connection pools are global."""
    app = create_app(site.settings)
    yield app
    # Results unsubscribe when they are collected, which must happen while their backend lives.
    gc.collect()
    app.tasks["genpool.generate"].services.close()
    app.backend.result_consumer.stop()
    app.backend.client.connection_pool.disconnect()
    app.pool.force_close_all()
    app.close()


def ended(jobs: Client, job_id: str) -> str:
    """The job's terminal state, once it has one."""
    wait_until(lambda: jobs.get(job_id).terminal, description="the job to end", timeout_s=30)
    return jobs.get(job_id).state


def test_a_job_runs_and_its_log_joins_to_its_text(jobs: Client) -> None:
    """The simplest way: submit, follow, read."""
    job = jobs.submit(request(max_tokens=20))
    text = "".join(entry.text for entry in jobs.follow(job))
    record = jobs.get(job)
    assert record.state == "incomplete"
    assert record.outputs[0].text == text
    assert (record.prompt_tokens, record.output_tokens) == (5, 20)


def test_tokens_are_counted_while_they_come(site: Site, jobs: Client) -> None:
    """`genpool queues` shows a rate during a long generation, not only when it ends, and none when all is still."""
    client = connect(site.url, max_connections=1)
    queues = Queues(site.settings, client)

    def rate() -> float:
        return next(queue.output_tokens_per_second for queue in queues.look() if queue.model == "tiny")

    try:
        job = jobs.submit(request(**LONG))
        wait_until(lambda: rate() > 0 and not jobs.get(job).terminal, description="a rate", timeout_s=30)
        jobs.cancel(job)
        wait_until(lambda: rate() == 0, description="no rate", timeout_s=60)
    finally:
        client.connection_pool.disconnect()


def test_the_task_class_submits_and_answers(app: Celery, jobs: Client) -> None:
    """`delay` returns a result whose id is the job's id, and `get` gives text and usage."""
    result = app.tasks["genpool.generate"].delay(model="tiny", prompt="Hello", max_tokens=4, temperature=0.0)
    told = answer(result)
    assert told["id"] == result.id
    assert told["outputs"][0]["text"] == jobs.get(result.id).outputs[0].text
    assert told["usage"] == {"input_tokens": 5, "cached_tokens": 0, "output_tokens": 4}


def test_the_result_of_a_deleted_job_is_forgotten(app: Celery) -> None:
    """Its text is nowhere any more, the result backend included, whatever id Celery knows it by."""
    services, call = app.tasks["genpool.generate"].services, {"prompt": "Hello", "max_tokens": 4}
    direct = app.tasks["genpool.generate"].delay(model="tiny", **call)
    by_name = app.send_task("genpool.generate", kwargs=call, queue="tiny")
    for result, ref in (
        (direct, parse_ref(direct.id)),
        (by_name, new_ref("celery", "tiny", token=UUID(by_name.id).hex)),
    ):
        kept = app.backend.get_key_for_task(result.id)
        answer(result)
        assert services.client.exists(kept)
        erase(services.client, services.store, ref)
        wait_until(lambda kept=kept: not services.client.exists(kept), description="the result to be forgotten")
    wait_until(lambda: not services.client.exists(ModelKeys("tiny:0").outbox), description="an empty outbox")


def test_a_job_sent_by_name_is_answered_too(app: Celery) -> None:
    """`send_task` through the broker: same job, same text, under the uuid that Celery chose."""
    call = {"prompt": "Hello", "max_tokens": 4, "temperature": 0.0}
    sent = answer(app.send_task("genpool.generate", kwargs=call, queue="tiny"))
    direct = answer(app.tasks["genpool.generate"].delay(model="tiny", **call))
    assert sent["outputs"] == direct["outputs"]


def test_bad_calls_are_refused_with_the_argument_named(app: Celery) -> None:
    """The task class raises at once; a message sent by name fails its result; the worker goes on."""
    task = app.tasks["genpool.generate"]
    for call, named in (
        ({"model": "tiny", "prompt": "x", "max_tokens": "4"}, "max_tokens"),
        ({"model": "tiny", "prompt": "x", "colour": 1}, "colour"),
        ({"model": "tiny"}, "prompt"),
        ({"model": "tiny", "prompt": "x", "temperature": float("nan")}, "plain JSON"),
    ):
        with pytest.raises(InvalidRequest, match=named):
            task.delay(**call)
    with pytest.raises(InvalidRequest, match="countdown"):
        task.apply_async(kwargs={"model": "tiny", "prompt": "x"}, countdown=5)
    with pytest.raises(InvalidRequest, match="max_tokens"):
        answer(app.send_task("genpool.generate", kwargs={"prompt": "x", "max_tokens": 0}, queue="tiny"))
    assert answer(task.delay(model="tiny", prompt="x", max_tokens=1))["usage"]["output_tokens"] == 1


def test_inspect_shows_running_generations(site: Site, jobs: Client) -> None:
    """`inspect generations` and `inspect active` list the job, `inspect ranks` and `engine` tell of the loop."""
    job = jobs.submit(request(**LONG))
    wait_until(lambda: jobs.get(job).state == "running", description="the job to run")
    shown: dict[str, Any] = {}

    def seen() -> bool:
        (shown["generations"],) = site.inspect("generations").values()
        return bool(shown["generations"]) or jobs.get(job).terminal

    again = [jobs.submit(request(**LONG)) for _ in range(20)]
    wait_until(seen, description="a running generation to be listed", timeout_s=30)
    (row, *_) = shown["generations"]
    assert row["id"] in {job, *again}
    assert row["model"] == "tiny"
    (ranks,) = site.inspect("ranks").values()
    assert ranks[0]["state"] == "loaded"
    assert ranks[0]["configured_target_inflight"] == 8
    (engine,) = site.inspect("engine").values()
    assert engine["tiny"]["ticks"] > 0
    (active,) = site.inspect("active").values()
    assert all(each["name"] == "genpool.generate" and each["args"] == [] for each in active)
    for each in (job, *again):
        if not jobs.get(each).terminal:
            jobs.cancel(each)


def test_a_cancelled_generation_stops_and_frees_its_slot(site: Site, jobs: Client) -> None:
    """The record is terminal at once; the worker drops it, and a late completion does not change it."""
    job = jobs.submit(request(**LONG))
    wait_until(lambda: jobs.get(job).logged_tokens > 0, description="the first token")
    assert jobs.cancel(job).state == "cancelled"
    wait_until(lambda: all(rank["runtime_inflight"] == 0 for rank in site.ranks()), description="the slot to be free")
    assert jobs.get(job).state == "cancelled"
    assert jobs.get(job).logged_tokens < 1900


def test_revoke_cancels_running_and_queued_generations(site: Site, app: Celery, jobs: Client) -> None:
    """By job id, and by the uuid of a message sent by name."""
    held = [jobs.submit(request(**LONG)) for _ in range(20)]
    call = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
    sent = app.send_task("genpool.generate", kwargs=call, queue="tiny")
    app.control.revoke([*held, sent.id])
    assert {ended(jobs, job) for job in held[8:]} == {"cancelled"}
    with pytest.raises(TaskRevokedError):
        answer(sent)
    for job in held:
        assert ended(jobs, job) in ("cancelled", "incomplete")
    wait_until(lambda: site.ranks()[0]["state"] == "loaded", description="the rank to say that it serves")


def test_terminate_cancels_running_and_queued_generations_too(site: Site, app: Celery, jobs: Client) -> None:
    """Celery's other command: the record is cancelled and the slots are free; no signal reaches the worker."""
    held = [jobs.submit(request(**LONG)) for _ in range(20)]
    wait_until(lambda: jobs.get(held[0]).logged_tokens > 0, description="a running generation")
    app.control.broadcast("terminate", arguments={"signal": "KILL", "task_id": held})
    for job in held:
        assert ended(jobs, job) in ("cancelled", "incomplete")
    assert jobs.get(held[-1]).state == "cancelled"
    wait_until(lambda: all(rank["runtime_inflight"] == 0 for rank in site.ranks()), description="free slots")


def test_whatever_terminates_a_request_cancels_its_job(site: Site, app: Celery, jobs: Client) -> None:
    """Celery's own code may call `terminate` of the request that it sees: that ends the job's record. Ending the
    generation alone would leave the job running for ever."""
    services = app.tasks["genpool.generate"].services
    host = Host(SimpleNamespace(app=app, hostname="seen@here", consumer=None), services, limit=None)
    job = jobs.submit(request(model="other"))
    rank = delivery(site.url, "seen@here", model="other")
    (handout,) = rank.take(1, 1000).handouts
    host._begun(handout, "other")
    celery_state.requests[job].terminate(None, signal="KILL")
    assert jobs.get(job).state == "cancelled"
    host._left(handout, "cancelled", None)
    assert job not in celery_state.requests
    for client in (rank.reader, rank.writer):
        client.connection_pool.disconnect()


def test_the_pool_grows_and_shrinks_generations_in_flight(site: Site, app: Celery) -> None:
    """`pool_grow` and `pool_shrink` change the effective limit, never below one."""

    def limit() -> int:
        return int(site.ranks()[0]["effective_target_inflight"])

    app.control.pool_grow(3)
    wait_until(lambda: limit() == 11, description="the limit to rise")
    app.control.pool_shrink(20)
    wait_until(lambda: limit() == 1, description="the limit to fall to one")
    app.control.pool_grow(7)
    wait_until(lambda: limit() == 8, description="the limit to be back")


def test_models_follow_the_queues_that_are_consumed(site: Site, app: Celery, jobs: Client) -> None:
    """`add_consumer` loads another model, `cancel_consumer` drains it again, in sight of `inspect`; jobs left behind
    stay queued."""
    app.control.add_consumer("other")
    wait_until(lambda: site.ranks("other"), description="the other model to be served", timeout_s=20)
    assert ended(jobs, jobs.submit(request(model="other"))) == "incomplete"

    def asked(command: str) -> Any:
        (answer,) = app.control.inspect(timeout=20, limit=1)._request(command).values()
        return answer

    long = jobs.submit(request(model="other", n=8, **LONG))
    wait_until(lambda: jobs.get(long).state == "running", description="the job to run")
    app.control.cancel_consumer("other")
    wait_until(lambda: asked("engine")["other"]["state"] == "draining", description="the other model to be draining")
    assert {each["model"]: each["state"] for each in asked("ranks")} == {"tiny": "loaded", "other": "draining"}
    assert [each["id"] for each in asked("generations") if each["model"] == "other"] == [long]
    jobs.cancel(long)
    wait_until(lambda: not site.ranks("other"), description="the other model to be drained", timeout_s=20)
    job = jobs.submit(request(model="other"))
    assert jobs.get(job).state == "queued"
    jobs.cancel(job)


def test_events_show_every_state_and_no_prompt(app: Celery, jobs: Client) -> None:
    """sent, received, started and succeeded for a job that ends; failed ones and cancelled ones by their own event;
    never the prompt, never the text."""
    seen: list[dict[str, Any]] = []
    with app.connection_for_read() as connection:
        receiver = app.events.Receiver(connection, handlers={"*": seen.append})
        listening = threading.Thread(target=receiver.capture, kwargs={"limit": None, "timeout": None, "wakeup": True})
        listening.start()
        wait_until(lambda: seen, description="the receiver to hear the worker", timeout_s=20)
        job = jobs.submit(request(prompt=TextPrompt(text=CANARY)))
        cancelled = jobs.submit(request(prompt=TextPrompt(text=CANARY), **LONG))
        wait_until(lambda: jobs.get(cancelled).logged_tokens > 0, description="the first token")
        jobs.cancel(cancelled)
        wanted = {(job, "task-succeeded"), (cancelled, "task-revoked")}
        wait_until(lambda: wanted <= {(event.get("uuid"), event["type"]) for event in list(seen)},
                   description="the final events", timeout_s=20)  # fmt: skip
        receiver.should_stop = True
        listening.join(timeout=20)
    kinds = [event["type"] for event in seen if event.get("uuid") == job]
    assert kinds == ["task-sent", "task-received", "task-started", "task-succeeded"]
    assert "task-revoked" in [event["type"] for event in seen if event.get("uuid") == cancelled]
    assert CANARY not in repr(seen)
    assert jobs.get(job).outputs[0].text not in repr(seen)


def test_prompts_are_in_no_log(worker: Worker, jobs: Client) -> None:
    """Whatever happens to a job, the worker's output does not hold its prompt."""
    job = jobs.submit(request(prompt=TextPrompt(text=CANARY)))
    ended(jobs, job)
    assert CANARY not in worker.output()
    assert "Traceback" not in worker.output()


@pytest.mark.parametrize("arguments", [("-P", "solo"), ("-P", "threads"), ("-P", "prefork")])
def test_other_pools_are_refused_with_what_to_type(site: Site, arguments: tuple[str, ...]) -> None:
    """No traceback, one line, exit code 1."""
    done = site.celery("worker", "-Q", "tiny", *arguments)
    assert done.returncode == 1
    assert "Type: celery -A tasks worker -Q tiny" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.filterwarnings("ignore::celery.exceptions.SecurityWarning")
def test_a_configured_prefork_is_refused_too(site: Site) -> None:
    """An application whose `worker_pool` was changed cannot fork an engine either."""
    changed = create_app(site.settings)
    changed.conf.worker_pool = "prefork"
    with pytest.raises(CeleryCommandException, match="Type: celery -A tasks worker -Q tiny"):
        changed.Worker(queues=["tiny"], hostname="configured@here")


def test_a_worker_without_a_model_is_refused(site: Site) -> None:
    """Without -Q, or with a queue that is no model, it names the models there are."""
    for arguments in ((), ("-Q", "unknown-model")):
        done = site.celery("worker", *arguments)
        assert done.returncode == 1
        assert "Models: " in done.stderr
        assert "tiny" in done.stderr
        assert "Traceback" not in done.stderr


def test_an_idle_worker_holds_few_connections(site: Site, worker: Worker) -> None:
    """The state server sees a bounded number of clients, whatever was done before."""
    client = connect(site.url, max_connections=1)
    names = client.client_list()
    client.connection_pool.disconnect()
    assert worker.process.poll() is None
    assert len(names) < 40
