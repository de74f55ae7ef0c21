"""Backends over HTTP: a server elsewhere, or one that is a child of this process."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable

from pool.errors import ConfigurationError
from pool.settings import ModelSettings
from pool.store.ranks import Card
from tasks.config import Settings
from tasks.vocabulary import Vocabulary
from workers.backends.dialect import Dialect
from workers.backends.endpoint import Endpoint, key_of
from workers.backends.facts import Facts, check_tokenizer, facts_of
from workers.backends.llama_cpp_dialect import LlamaCppDialect
from workers.backends.llama_server import llama_server
from workers.backends.openai_dialect import OpenAiDialect
from workers.backends.remote_residence import RemoteResidence
from workers.backends.remote_runner import RemoteRunner
from workers.backends.served import Served
from workers.backends.server_process import ServerProcess
from workers.backends.tokenizers_of import vocabulary_of
from workers.backends.vllm_dialect import VllmDialect
from workers.backends.vllm_serve import vllm_serve
from workers.backends.watch import Watch

#: More requests in flight than any configuration may ask for.
NO_BOUND = 1024
#: What each kind of server takes beyond OpenAI's own options, asked with text.
TEXT_OPTIONS = {
    "vllm": ("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
    "llama_cpp": ("top_k", "min_p"),
}


def open_remote(
    name: str, model: ModelSettings, settings: Settings, limit: int, part: int, is_wanted: Callable[[], bool]
) -> Served:
    """Reach the server of rank `part` of a model, or start it; blocks until it serves. A server elsewhere is awaited
    for as long as that takes. Raises GenpoolError by name."""
    vocabulary = vocabulary_of(name, model)
    process = _process(name, model)
    endpoint = _endpoint(model, part) if process is None else Endpoint("", trust_env=False)
    kind = _kind(model)
    watch = Watch(name, endpoint, kind, process=process, unwell_s=model.upstream.stall_seconds)
    try:
        watch.await_ready(math.inf if process is None else model.upstream.start_seconds, is_wanted)
        return _serve(name, model, settings, limit, endpoint, watch, vocabulary)
    except BaseException:
        watch.close()
        raise


def parts_of(model: ModelSettings) -> int:
    """How many ranks one worker process has of a model: one for each of those that its servers offer."""
    if model.backend != "openai_remote":
        return 1
    return len(model.upstream.base_urls) * model.upstream.ranks_per_url


def _kind(model: ModelSettings) -> str:
    return {"llama_server": "llama_cpp", "vllm_serve": "vllm"}.get(model.backend, model.upstream.kind)


def _process(name: str, model: ModelSettings) -> ServerProcess | None:
    if model.backend == "llama_server":
        return llama_server(name, model)
    return vllm_serve(name, model) if model.backend == "vllm_serve" else None


def _endpoint(model: ModelSettings, part: int) -> Endpoint:
    upstream = model.upstream
    url, rank = divmod(part, upstream.ranks_per_url)
    return Endpoint(upstream.base_urls[url], key_of(upstream.api_key_env), rank if upstream.ranks_per_url > 1 else None)


def _serve(
    name: str,
    model: ModelSettings,
    settings: Settings,
    limit: int,
    endpoint: Endpoint,
    watch: Watch,
    vocabulary: Vocabulary | None,
) -> Served:
    kind = _kind(model)
    theirs = name if model.backend == "vllm_serve" else model.upstream.model or name
    facts = facts_of(endpoint, kind, theirs)
    if vocabulary is not None:
        if kind == "openai":
            raise ConfigurationError(
                f"Model {name}: a tokenizer is of use only where the server takes token ids: kind vllm or llama_cpp.",
                param="upstream.kind",
            )
        if not facts.context_tokens:
            raise ConfigurationError(f"Model {name}: the server does not say how long a session may be.")
        check_tokenizer(endpoint, kind, theirs, vocabulary)
    dialect = _dialect(kind, model, theirs, vocabulary)
    runner = RemoteRunner(
        endpoint,
        dialect,
        vocabulary,
        model.upstream,
        limit=limit,
        most=facts.slots or NO_BOUND,
        look=watch.look,
    )
    runner.on_start = lambda: watch.start(runner.ended, runner.back)
    buffer_tokens = settings.programs.of_model(name).decode_buffer_tokens
    return Served(
        runner=runner,
        card=_card(model, facts, dialect, vocabulary, theirs),
        vocabulary=vocabulary,
        same_bytes=False,
        residence=lambda _held, _on_pause: RemoteResidence(runner, endpoint, kind, buffer_tokens),
        close=watch.close,
    )


def _dialect(kind: str, model: ModelSettings, theirs: str, vocabulary: Vocabulary | None) -> Dialect:
    if vocabulary is None:
        return OpenAiDialect(theirs, TEXT_OPTIONS.get(kind, model.upstream.options))
    return VllmDialect(theirs) if kind == "vllm" else LlamaCppDialect()


def _card(model: ModelSettings, facts: Facts, dialect: Dialect, vocabulary: Vocabulary | None, theirs: str) -> Card:
    """Without a vocabulary, the server looks at lengths."""
    told = [
        model.backend,
        model.source,
        theirs,
        facts.build,
        facts.context_tokens,
        "" if vocabulary is None else vocabulary.fingerprint(),
    ]
    context_tokens = 0 if vocabulary is None else facts.context_tokens
    return Card(
        context_length=context_tokens,
        max_positions=context_tokens,
        fingerprint=hashlib.sha256(json.dumps(told).encode()).hexdigest(),
        vocabulary=b"" if vocabulary is None else vocabulary.to_blob(),
        logprobs=dialect.logprobs,
        lacks=dialect.lacks,
        backend=model.backend,
    )
