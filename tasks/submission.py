"""One way in for every door: check a request against the model's card, fix its seed, and build the job to store.

HTTP, the Celery task class, the broker bridge and the command line all call `Submitter`, so validation and limits are
the same everywhere.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from pool.errors import ContextTooLong, InvalidRequest, UnknownModel
from pool.replica_settings import CONSISTENT_HASH
from pool.settings import ModelSettings
from pool.store.connection import Client
from pool.store.flows import session_of
from pool.store.ids import JobRef, new_ref
from pool.store.jobs import JobStore
from pool.store.log import pack_ids
from pool.store.ranks import Card, RankRegistry
from pool.store.records import NewJob
from tasks.config import Settings
from tasks.payloads import MAX_SEED, GenerationOptions, GenerationRequest, Prompt, Sampling
from tasks.vocabulary import Vocabulary

#: Each option at the value that asks for nothing.
NEUTRAL = Sampling()
#: How long a cached card is used before the registry is asked whether it changed.
CARD_FRESH_S = 5.0


@dataclass(frozen=True, slots=True)
class _Held:
    card: Card
    vocabulary: Vocabulary | None
    checked_at_s: float


class Cards:
    """Model cards with their vocabularies, cached per process."""

    def __init__(self, client: Client, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._held: dict[str, _Held] = {}
        self._lock = Lock()

    def get(self, model: str) -> tuple[Card, Vocabulary | None] | None:
        """The model's card, and its vocabulary where it has one; None while no worker has ever loaded the model."""
        held = self._held.get(model)
        now_s = self._clock()
        if held is not None and now_s - held.checked_at_s < CARD_FRESH_S:
            return held.card, held.vocabulary
        registry = RankRegistry(self._client, model)
        if held is not None and registry.card_fingerprint() == held.card.fingerprint:
            self._held[model] = _Held(held.card, held.vocabulary, now_s)
            return held.card, held.vocabulary
        with self._lock:
            card = registry.card()
            if card is None:
                return None
            vocabulary = Vocabulary.from_blob(card.vocabulary) if card.vocabulary else None
            self._held[model] = _Held(card, vocabulary, now_s)
            return card, vocabulary


def tokenize(prompt: Prompt, card: Card, vocabulary: Vocabulary) -> list[int]:
    """The prompt's token ids; what is certainly too long is refused after a look, at the door and in a worker alike.

    Raises ContextTooLong and InvalidRequest.
    """
    vocabulary.check_length(prompt, card.context_length)
    return vocabulary.encode_prompt(prompt)


def fit(options: GenerationOptions, card: Card, prompt_tokens: int) -> int:
    """Output tokens the request may have: its own limit, or what the context leaves when it names none.

    Raises ContextTooLong with both numbers, and InvalidRequest (`kv_budget_exceeded`) when the context would hold it
    but no rank's KV budget does. A session peaks at prompt + max_tokens - 1 positions: prefill emits the first token.
    """
    wanted = options.max_tokens if options.max_tokens is not None else card.context_length - prompt_tokens
    if wanted < 1 or prompt_tokens + wanted > card.context_length:
        raise ContextTooLong(
            prompt_tokens=prompt_tokens,
            max_tokens=max(wanted, 1),
            context_length=card.context_length,
            param="max_tokens",
        )
    if prompt_tokens + wanted - 1 > card.max_positions:
        if options.max_tokens is None and prompt_tokens <= card.max_positions:
            return card.max_positions - prompt_tokens + 1
        raise InvalidRequest(
            f"The request needs KV for {prompt_tokens + wanted - 1} tokens, but a session of this model may hold "
            f"{card.max_positions} tokens.",
            param="max_tokens",
            code="kv_budget_exceeded",
        )
    return wanted


def check_sampling(model: str, sampling: Sampling, card: Card, vocabulary: Vocabulary | None) -> None:
    """Refuse what the model's engine lacks (`unsupported_parameter`) and token ids that it does not have, at the door
    and in a worker alike. Raises InvalidRequest naming the option, the model, the id and the limit."""
    engine = f"the engine of model {model}" + (f" ({card.backend})" if card.backend else "")
    if sampling.logprobs and not card.logprobs:
        raise _lacking("logprobs", f"{engine} gives no log-probabilities")
    if sampling.seed is not None and not card.seed:
        raise _lacking("seed", f"{engine} cannot repeat a generation")
    for name in card.lacks:
        if getattr(sampling, name, None) != getattr(NEUTRAL, name, None):
            raise _lacking(name, f"{engine} has no such option")
    if vocabulary is None:
        return
    for name, ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        for token_id in ids:
            if token_id >= vocabulary.size:
                raise InvalidRequest(
                    f"{name}: token id {token_id} is outside this model's vocabulary: ids go from 0 to "
                    f"{vocabulary.size - 1}.",
                    param=name,
                )


def _lacking(name: str, what: str) -> InvalidRequest:
    message = f"{name} is not supported: {what}."
    return InvalidRequest(message, param=name, code="unsupported_parameter")


class Submitter:
    """Turns requests into stored jobs. `catalogue`: the models as they are now, None for those of the settings."""

    def __init__(
        self,
        store: JobStore,
        cards: Cards,
        settings: Settings,
        catalogue: Callable[[], Mapping[str, ModelSettings]] | None = None,
    ) -> None:
        self.store = store
        self.cards = cards
        self._catalogue = catalogue or (lambda: settings.models)
        self._all_results = settings.state.celery_results == "all"
        self._timeouts = {
            "queue_timeout_ms": round(settings.limits.queue_timeout_seconds * 1000),
            "run_timeout_ms": round(settings.limits.run_timeout_seconds * 1000),
            "tombstone_ms": settings.state.tombstone_ttl_seconds * 1000,
        }
        self._share = {"weight": settings.limits.weight_per_key, "inflight_cap": settings.limits.inflight_per_key}

    def models(self) -> list[str]:
        """Public names of the enabled models."""
        return [name for name, model in self._catalogue().items() if model.enabled]

    def goes_by_session(self, model: str) -> bool:
        """Whether the session of a request has a say in which replica of the model serves it."""
        settings = self._catalogue().get(model)
        return settings is not None and settings.request_policy == CONSISTENT_HASH

    def prepare(self, request: GenerationRequest, *, door: str, session: str = "", **record: Any) -> NewJob:
        """Everything but the storing: raises UnknownModel, InvalidRequest or ContextTooLong.

        `session`: its caller's name for the session it belongs to, "" for none; only a hash of it is stored, where
        replicas go by it. `record` holds further NewJob fields (params, watch, background, ...); `token` a fixed id (32
        hex digits).
        Without a card (no worker yet) the prompt is measured by the worker before it runs; without a vocabulary by the
        server that runs the model.
        """
        if request.model not in self.models():
            raise UnknownModel("No model of this name is served here.", param="model")
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbelow(MAX_SEED + 1)
        known = self.cards.get(request.model)
        if known is not None:
            card, vocabulary = known
            check_sampling(request.model, request.sampling, card, vocabulary)
            if vocabulary is not None:
                ids = tokenize(request.prompt, card, vocabulary)
                request = request.model_copy(update={"max_tokens": fit(request, card, len(ids))})
                record |= {"prompt": pack_ids(ids), "prompt_tokens": len(ids)}
        ref: JobRef = new_ref(door, request.model, token=record.pop("token", None))
        if self._all_results:
            record["celery"] = True
        waits = {"lane": request.lane, "fairness": request.fairness_key}
        fixed = self._timeouts | self._share | waits | record
        job = NewJob(
            ref=ref,
            door=door,
            options=request.options().stored(),
            input=request.prompt.model_dump_json(),
            seed=seed,
            n=request.n,
            **fixed,
        )
        if not session or not self.goes_by_session(request.model):
            return job
        return replace(job, session=session_of(job.tenant, session))

    def submit(self, request: GenerationRequest, *, door: str, **record: Any) -> JobRef:
        """Prepare and store; the id is valid from then on, on every node."""
        job = self.prepare(request, door=door, **record)
        self.store.submit(job)
        return job.ref
