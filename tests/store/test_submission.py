"""The one way in: limits, seeds and what a job is told to leave behind."""

from __future__ import annotations

import pytest

from pool.errors import ContextTooLong, InvalidRequest, UnknownModel
from pool.settings import LimitSettings, ModelSettings
from pool.state_settings import StateSettings
from pool.store.connection import Client
from pool.store.jobs import JobStore
from pool.store.ranks import Card, RankRegistry
from tasks.config import Settings
from tasks.payloads import GenerationOptions, Sampling, TextPrompt, TokenPrompt
from tasks.submission import Cards, Submitter
from tests.builders import request
from workers.engines.tiny import tiny_vocabulary


def submitter(client: Client, store: JobStore, **state: object) -> Submitter:
    """A way in for the model `tiny`, and for `off`, which is disabled."""
    models = {"tiny": ModelSettings(source="random:1"), "off": ModelSettings(source="random:1", enabled=False)}
    limits = LimitSettings(queue_timeout_seconds=7, run_timeout_seconds=8)
    return Submitter(store, Cards(client), Settings(models=models, limits=limits, state=StateSettings(**state)))


def publish(client: Client, *, context_length: int = 64, max_positions: int = 64, **able: bool) -> None:
    """A worker's card."""
    vocabulary = tiny_vocabulary()
    card = Card(context_length, max_positions, vocabulary.fingerprint(), vocabulary.to_blob(), **able)
    RankRegistry(client, "tiny").publish(card)


def test_unknown_and_disabled_models_are_refused(client: Client, store: JobStore) -> None:
    """By name, before anything is stored."""
    for name in ("nope", "off"):
        with pytest.raises(UnknownModel):
            submitter(client, store).prepare(request(model=name), door="celery")


def test_seed_and_limits_are_fixed_at_submit(client: Client, store: JobStore) -> None:
    """An absent seed is drawn once, an absent limit is what the context leaves, timeouts come from the settings."""
    publish(client)
    job = submitter(client, store).prepare(request(max_tokens=None), door="celery")
    options = GenerationOptions.model_validate_json(job.options)
    assert options.max_tokens == 64 - 5
    assert (job.prompt_tokens, len(job.prompt)) == (5, 20)
    assert (job.queue_timeout_ms, job.run_timeout_ms) == (7000, 8000)
    assert job.seed != submitter(client, store).prepare(request(), door="celery").seed


def test_what_does_not_fit_is_refused_with_both_numbers(client: Client, store: JobStore) -> None:
    """Context first, then the KV of a rank; the exact limit fits."""
    publish(client, context_length=64, max_positions=32)
    way_in = submitter(client, store)
    with pytest.raises(ContextTooLong, match=r"5 tokens.*60 more.*64"):
        way_in.prepare(request(max_tokens=60), door="celery")
    with pytest.raises(InvalidRequest, match=r"34 tokens.*32"):
        way_in.prepare(request(max_tokens=30), door="celery")
    assert way_in.prepare(request(max_tokens=28), door="celery").prompt_tokens == 5
    unlimited = GenerationOptions.model_validate_json(way_in.prepare(request(max_tokens=None), door="celery").options)
    assert unlimited.max_tokens == 28
    with pytest.raises(InvalidRequest, match="512"):
        way_in.prepare(request(prompt=TokenPrompt(token_ids=(512,))), door="celery")


def test_what_the_engine_lacks_and_unknown_ids_are_refused(client: Client, store: JobStore) -> None:
    """By name, with the id and the limit; an engine that cannot repeat refuses a seed, and only a seed."""
    publish(client)
    way_in = submitter(client, store)
    for options, name in (
        ({"logit_bias": {511: 1, 512: 1}}, "logit_bias"),
        ({"stop_token_ids": (512,)}, "stop_token_ids"),
    ):
        with pytest.raises(InvalidRequest, match=rf"{name}.*512.*511") as refusal:
            way_in.prepare(request(sampling=Sampling(**options)), door="celery")
        assert refusal.value.param == name
    assert way_in.prepare(request(sampling=Sampling(logit_bias={511: 1}, logprobs=True)), door="celery")
    publish(client, logprobs=False, seed=False)
    way_in = submitter(client, store)
    for options, name in (({"logprobs": True}, "logprobs"), ({"seed": 0}, "seed")):
        with pytest.raises(InvalidRequest, match=name) as refusal:
            way_in.prepare(request(sampling=Sampling(**options)), door="celery")
        assert refusal.value.code == "unsupported_parameter"
    assert way_in.prepare(request(), door="celery").seed >= 0


def test_without_a_card_the_worker_will_measure(client: Client, store: JobStore) -> None:
    """The prompt stays as it was given."""
    job = submitter(client, store).prepare(request(prompt=TextPrompt(text="as given")), door="celery")
    assert (job.prompt, job.prompt_tokens) == (b"", None)
    assert "as given" in job.input


def test_all_jobs_leave_a_celery_result_when_asked_to(client: Client, store: JobStore) -> None:
    """`state.celery_results = "all"` includes jobs of other doors."""
    assert not submitter(client, store).prepare(request(), door="responses").celery
    assert submitter(client, store, celery_results="all").prepare(request(), door="responses").celery


def test_a_text_far_too_long_is_refused_after_a_look(client: Client, store: JobStore) -> None:
    """Only as much of it is tokenized as shows that it cannot fit; a long text that may fit is measured whole."""
    publish(client, context_length=50_000, max_positions=50_000)
    way_in = submitter(client, store)
    with pytest.raises(ContextTooLong) as refusal:
        way_in.prepare(request(prompt=TextPrompt(text="a " * 4_000_000)), door="celery")
    assert 50_000 < refusal.value.prompt_tokens < 100_000
    job = way_in.prepare(request(prompt=TextPrompt(text="a " * 20_000), max_tokens=1), door="celery")
    assert job.prompt_tokens == 20_001
