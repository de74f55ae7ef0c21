"""Agents that share a long system prompt, through the API, the state server and a worker, with both engines.

`cached_tokens` is exactly what two prompts have in common, cut down to what the engine shares in, and each text is the
one that a model without any reuse gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from pool.store.server import StateServer
from tasks.api_keys import new_key
from tasks.payloads import ChatPrompt, Message
from tests.engine.small_model import BYTES_PER_TOKEN, VOCABULARY, write_small_model
from tests.integration.celery_process import Site
from tests.waiting import wait_until
from tests.webapp.api_process import ApiProcess
from workers.engines.paged_attention import KV_PAGE

CONTEXT = 4096
#: Room for four sessions of either engine.
KV_BYTES = 8 * CONTEXT * BYTES_PER_TOKEN
#: Positions in which an engine shares.
UNITS = {"numpy": KV_PAGE, "llama_cpp": 2}
TENANTS = ("first", "second")
SYSTEM = " ".join(f"In place {number} you may do what other people of this world have made." for number in range(80))
#: Long enough to be worth a copy of all that is before it.
QUESTION = "Who could have been there before, what would they do for us now, and how much of it is still good? "
TOKENS = 8

Turn = dict[str, str]


@dataclass
class Agent:
    """A conversation: `said` so far, by it and by the model; `before`: the last prompt."""

    tenant: str
    said: list[Turn] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    before: list[Turn] = field(default_factory=list)

    def asks(self, text: str) -> list[Turn]:
        """The conversation with its next question."""
        return [*self.said, {"role": "user", "content": text}]


class Served:
    """A node of the API, and keys of two tenants."""

    def __init__(self, node: ApiProcess, keys: dict[str, str]) -> None:
        self._url = f"{node.base_url}/v1/chat/completions"
        self._keys = keys

    def ask(self, model: str, tenant: str, messages: list[Turn]) -> tuple[str, int]:
        """The answer's text, and how many of the prompt's tokens were cached."""
        body = {"model": model, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        headers = {"Authorization": f"Bearer {self._keys[tenant]}"}
        answer = httpx.post(self._url, json=body, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        document: dict[str, Any] = answer.json()
        assert document["usage"]["prompt_tokens"] == len(encoded(messages))
        cached: int = document["usage"]["prompt_tokens_details"]["cached_tokens"]
        return document["choices"][0]["message"]["content"], cached


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One worker with the same weights four times: each engine with the reuse that is shipped, and without any."""
    folder = tmp_path_factory.mktemp("site")
    keys, lines = zip(*(new_key(tenant) for tenant in TENANTS), strict=True)
    with StateServer(tmp_path_factory.mktemp("state")) as server:
        site = Site(server.url, folder)
        models = add_models(site, write_small_model(folder / "small.gguf", context_length=CONTEXT))
        site.worker(model=",".join(models), wait=False)
        for model in models:
            wait_until(partial(site.ranks, model), description=f"a rank of {model}", timeout_s=60)
        settings = {"CONFIG": str(folder / "genpool.toml"), "API_KEYS": ";".join(lines)}
        node = ApiProcess(server.url, folder / "api", **settings).start()
        yield Served(node, dict(zip(TENANTS, keys, strict=True)))
        node.stop()
        site.close()


def add_models(site: Site, weights: Path) -> list[str]:
    """Into the site's configuration; their names."""
    config = Path(site.env["GENPOOL_CONFIG"])
    text, names = config.read_text(), []
    for backend in UNITS:
        for reuse in ("exact", "off"):
            names.append(model_of(backend, reuse))
            text += f'[models.{names[-1]}]\nbackend = "{backend}"\nsource = "{weights}"\nprefix_reuse = "{reuse}"\n'
            text += f"target_inflight = 2\nkept_prefixes = 2\nthreads = 1\nkv_budget_bytes = {KV_BYTES}\n"
    config.write_text(text)
    return names


def model_of(backend: str, reuse: str) -> str:
    """The model's name."""
    return f"{backend}-{reuse}".replace("_", "-")


def encoded(messages: list[Turn]) -> list[int]:
    """The prompt's token ids."""
    return VOCABULARY.encode_prompt(ChatPrompt(messages=tuple(map(Message.model_validate, messages))))


def shared(prompt: list[Turn], other: list[Turn], unit: int) -> int:
    """Tokens that both prompts begin with, in whole units."""
    left, right = encoded(prompt), encoded(other)
    common = next((at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), len(right))
    return common // unit * unit


@pytest.mark.parametrize("backend", UNITS)
def test_agents_begin_with_what_they_share(served: Served, backend: str) -> None:
    """The second agent begins with the system prompt, and each one's next turn with its own conversation, although
    the other one was served in between. A second tenant begins with nothing, and then with its own. No text changes."""
    model, plain, unit = model_of(backend, "exact"), model_of(backend, "off"), UNITS[backend]

    def cached(agent: Agent, question: str) -> int:
        """Ask, compare the text, and take the answer into the conversation; the tokens that were cached."""
        messages = agent.asks(question)
        text, tokens = served.ask(model, agent.tenant, messages)
        if tokens:
            assert served.ask(plain, agent.tenant, messages) == (text, 0)
        agent.before, agent.said = messages, [*messages, {"role": "assistant", "content": text}]
        return tokens

    anna, bert, other = Agent("first"), Agent("first"), Agent("second")
    assert cached(anna, QUESTION * 8) == 0
    assert cached(bert, f"But {QUESTION * 8}") == shared(bert.before, anna.before, unit) > 2000
    for agent in (anna, bert):
        before = agent.before
        assert cached(agent, "And then?") == shared(agent.before, before, unit) > 2200
    assert cached(other, QUESTION * 8) == 0
    before = other.before
    assert cached(other, "And then?") == shared(other.before, before, unit) > 2200
