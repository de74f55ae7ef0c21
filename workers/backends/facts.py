"""What a server says of itself when it is ready: how long a session may be, how many it runs at once, its build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from pool.errors import ConfigurationError, GenpoolError
from tasks.vocabulary import Vocabulary
from workers.backends.endpoint import Endpoint
from workers.backends.reading import count_of

#: Words, digits, other scripts, spaces and a byte sequence: two tokenizers that agree on it are one.
SAMPLE = "The 42 lighthouses  stood\n\nfor 1,999 years; Größe, Привет, 你好 🎉 def f(x): return x**2"


@dataclass(frozen=True, slots=True)
class Facts:
    """0 and "" where the server does not say. `context_tokens`: prompt and output of a session; `slots`: sessions at
    once."""

    context_tokens: int = 0
    slots: int = 0
    build: str = ""


def facts_of(endpoint: Endpoint, kind: str, model: str) -> Facts:
    """Ask. `model`: the server's name of it. Raises ConfigurationError where it has no such model, GenpoolError where
    it does not answer."""
    with endpoint.probe() as client:
        try:
            return _llama_cpp(client, endpoint) if kind == "llama_cpp" else _openai(client, endpoint, model)
        except (httpx2.HTTPError, ValueError) as error:
            raise GenpoolError(
                f"The server does not say what it serves ({type(error).__name__}).", code="upstream_away"
            ) from None


def check_tokenizer(endpoint: Endpoint, kind: str, model: str, vocabulary: Vocabulary) -> None:
    """Raise ConfigurationError where the server cuts a text into other tokens: then it has another tokenizer, and
    everything would be wrong."""
    if kind == "vllm":
        path, body, name = "/tokenize", {"model": model, "prompt": SAMPLE, "add_special_tokens": False}, "tokens"
    else:
        path, body, name = "/tokenize", {"content": SAMPLE, "add_special": False, "parse_special": False}, "tokens"
    with endpoint.probe() as client:
        try:
            found = client.post(endpoint.url(path), json=body).raise_for_status().json()
        except (httpx2.HTTPError, ValueError) as error:
            raise GenpoolError(
                f"The server does not tokenize ({type(error).__name__}).", code="upstream_away"
            ) from None
    ids = found.get(name) if isinstance(found, dict) else None
    if ids != vocabulary.encode(SAMPLE, special=False):
        raise ConfigurationError("The tokenizer is not that of the server's model.", param="upstream.tokenizer")


def _openai(client: httpx2.Client, endpoint: Endpoint, model: str) -> Facts:
    answer = client.get(endpoint.url("models"))
    if answer.status_code != 200:
        return Facts()
    listed = answer.json()
    entries = listed.get("data") if isinstance(listed, dict) else None
    if not isinstance(entries, list):
        return Facts()
    known = {entry["id"]: entry for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)}
    if known and model not in known:
        raise ConfigurationError(
            f"The server at {endpoint.base} has no model {model!r}; it has {', '.join(sorted(known)[:5])}.",
            param="upstream.model",
        )
    return Facts(context_tokens=count_of(known.get(model, {}), "max_model_len") or 0)


def _llama_cpp(client: httpx2.Client, endpoint: Endpoint) -> Facts:
    props: Mapping[str, Any] = client.get(endpoint.url("/props")).raise_for_status().json()
    defaults = props.get("default_generation_settings")
    build = props.get("build_info")
    return Facts(
        context_tokens=count_of(defaults, "n_ctx") or 0,
        slots=count_of(props, "total_slots") or 0,
        build=build if isinstance(build, str) else "",
    )
