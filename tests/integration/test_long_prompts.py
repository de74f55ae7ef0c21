"""Prompts too large for their record, through a real worker: never a wrong one, and never the end of the worker."""

from __future__ import annotations

import pytest

from pool.store import inputs
from pool.store.audit import Audit
from pool.store.connection import Client as StateClient
from pool.store.ids import parse_ref
from pool.store.keys import ModelKeys
from pool.store.records import JobRecord
from tasks.client import Client
from tasks.payloads import TextPrompt
from tests.builders import request
from tests.integration.celery_process import Site
from tests.waiting import wait_until

KEYS = ModelKeys("tiny:0")
#: More bytes than a record takes, and fewer tokens than the context.
LONG = "The way that can be told is not the way. " * 120


def ended(jobs: Client, job: str) -> JobRecord:
    """The record once it is terminal."""
    wait_until(lambda: jobs.get(job).terminal, description="the job to end", timeout_s=60)
    return jobs.get(job)


def first_block(client: StateClient, job: str) -> str:
    """The key of the first block that a job lists."""
    blocks: bytes = client.hget(KEYS.job(parse_ref(job).token), "blocks")
    return KEYS.input(blocks.decode().split()[0])


def test_a_long_prompt_arrives_whole_or_fails_by_name(
    fresh_site: Site, fresh_jobs: Client, client: StateClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent before any worker was there, tokenized at the door, or inside its record: the same answer each time.
    One that lost a block fails, and its worker goes on."""
    lost = fresh_jobs.submit(request(prompt=TextPrompt(text="! " + LONG)))
    whole = fresh_jobs.submit(request(prompt=TextPrompt(text=LONG)))
    assert client.delete(first_block(client, lost)) == 1
    assert client.exists(first_block(client, whole))
    fresh_site.worker()
    assert (ended(fresh_jobs, lost).state, ended(fresh_jobs, lost).error_code) == ("failed", "input_lost")
    tokenized = fresh_jobs.submit(request(prompt=TextPrompt(text=LONG)))
    assert first_block(client, tokenized) != first_block(client, whole)
    monkeypatch.setattr(inputs, "INLINE_BYTES", 2**20)
    inline = fresh_jobs.submit(request(prompt=TextPrompt(text=LONG)))
    assert client.hget(KEYS.job(parse_ref(inline).token), "blocks") is None
    answers = [ended(fresh_jobs, job) for job in (whole, tokenized, inline)]
    assert len({(answer.outputs, answer.prompt_tokens) for answer in answers}) == 1
    assert answers[0].prompt_tokens == 1920
    assert Audit(client, "tiny").run() == []
