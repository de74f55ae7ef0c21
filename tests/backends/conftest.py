"""A system whose models are run by each backend in turn, for the tests that know nothing of what runs them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI

from pool.backend_settings import FURTHER_OPTIONS
from tests.engine.small_model import BYTES_PER_TOKEN, write_small_model
from tests.processes import free_port
from tests.system import System

#: llama.cpp's server, prebuilt, in a process of its own.
XLLAMACPP = [sys.executable, "-m", "workers.backends.xllamacpp_program"]
SLOTS, SLOT_TOKENS = 4, 512


@dataclass(frozen=True)
class Backend:
    """A served model, and the options that what runs it refuses."""

    model: str
    system: System
    lacks: tuple[str, ...] = ()


#: What each model lacks.
LACKS: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "llama": ("min_tokens",),
    "llama-text": ("logprobs", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
    "remote": ("logprobs",),
}


def llama_server(source: str, **fields: Any) -> dict[str, Any]:
    """A catalogue entry of the small model under llama.cpp's server."""
    return {
        "backend": "llama_server",
        "source": source,
        "target_inflight": SLOTS,
        "threads": 1,
        "kv_budget_bytes": SLOTS * SLOT_TOKENS * BYTES_PER_TOKEN,
        "upstream.program": XLLAMACPP,
        **fields,
    }


@pytest.fixture(scope="session")
def every_backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One node and one worker: an engine of ours, llama.cpp's server with token ids and with text, and another genpool,
    which is this one: what it is asked for goes round through the queue again."""
    folder = tmp_path_factory.mktemp("backends")
    small, port = str(write_small_model(folder / "small.gguf")), free_port()
    models = {
        "llama": llama_server(small),
        "llama-text": llama_server(small, **{"upstream.tokenizer": "none"}),
        "remote": {
            "backend": "openai_remote",
            "target_inflight": SLOTS,
            "upstream.base_urls": [f"http://127.0.0.1:{port}/v1"],
            "upstream.model": "tiny",
            "upstream.options": list(FURTHER_OPTIONS),
        },
    }
    system = System(folder / "system", workers=1, models=models, serves=",".join(LACKS), api_ports=[port])
    with system:
        system.start()
        yield system


@pytest.fixture(params=LACKS)
def backend(request: pytest.FixtureRequest, every_backend: System) -> Backend:
    """Each of them."""
    return Backend(request.param, every_backend, LACKS[request.param])


@pytest.fixture
def client(every_backend: System) -> Iterator[OpenAI]:
    """The official client; it resends nothing."""
    url = f"{every_backend.api_url(every_backend.apis[0])}/v1"
    with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=60) as client:
        yield client
