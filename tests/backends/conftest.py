"""A system whose models are run by each backend in turn, for the tests that know nothing of what runs them.

With VLLM=1 in the environment (`make test-vllm`) that is vLLM's CPU build alone, which takes gigabytes and minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI

from benchmarks.vllm_server import checkpoint_folder, vllm_programs, vllm_variables
from pool.backend_settings import FURTHER_OPTIONS
from tests.engine.small_model import BYTES_PER_TOKEN, write_small_model
from tests.processes import free_port
from tests.system import System
from tests.waiting import wait_until

#: llama.cpp's server, prebuilt, in a process of its own.
XLLAMACPP = [sys.executable, "-m", "workers.backends.xllamacpp_program"]
SLOTS, SLOT_TOKENS = 4, 512


@dataclass(frozen=True)
class Backend:
    """A served model, and the options that what runs it refuses."""

    model: str
    system: System
    lacks: tuple[str, ...] = ()


VLLM_ONLY = bool(os.environ.get("VLLM"))
VLLM_START_S = 900.0
#: What each model lacks.
LACKS: dict[str, tuple[str, ...]] = {
    "tiny": (),
    "llama": ("min_tokens",),
    "llama-text": ("logprobs", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens"),
    "remote": ("logprobs",),
}
if VLLM_ONLY:
    LACKS = {"vllm": ()}


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


def vllm_serve(**fields: Any) -> dict[str, Any]:
    """A catalogue entry of SmolLM2 under vLLM; installs it on first use, and sets what its environment must say."""
    programs = vllm_programs()
    assert programs is not None, "vLLM cannot be installed here"
    variables = vllm_variables(programs, threads=1)
    os.environ.update({name: value for name, value in variables.items() if name != "PATH"})
    os.environ["PATH"] += f":{programs}"
    return {
        "backend": "vllm_serve",
        "source": str(checkpoint_folder()),
        "target_inflight": SLOTS,
        "upstream.program": [str(programs / "vllm"), "serve"],
        # Compiling takes longer than all that is asked here.
        "upstream.arguments": ["--max-model-len", "2048", "--dtype", "bfloat16", "--enforce-eager"],
        "upstream.start_seconds": VLLM_START_S,
        **fields,
    }


def start(system: System) -> None:
    """All of it; a first start of vLLM compiles for minutes."""
    system.state.start()
    system.await_state()
    for part in [*system.apis, *system.workers]:
        part.start()
    for api in system.apis:
        system.await_api(api)
    for model in LACKS:
        wait_until(
            lambda model=model: any(rank.facts["state"] == "loaded" for rank in system.ranks(model)),  # type: ignore[misc]
            description=f"{model} to be served",
            timeout_s=VLLM_START_S if VLLM_ONLY else 90,
            every_s=0.1,
        )


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
    if VLLM_ONLY:
        models = {"vllm": vllm_serve()}
    sections = {"server": {"sync_wait_seconds": 110}}
    system = System(
        folder / "system", workers=1, models=models, serves=",".join(LACKS), api_ports=[port], sections=sections
    )
    with system:
        start(system)
        yield system


@pytest.fixture(params=LACKS)
def backend(request: pytest.FixtureRequest, every_backend: System) -> Backend:
    """Each of them."""
    return Backend(request.param, every_backend, LACKS[request.param])


@pytest.fixture
def client(every_backend: System) -> Iterator[OpenAI]:
    """The official client; it resends nothing."""
    url = f"{every_backend.api_url(every_backend.apis[0])}/v1"
    with OpenAI(base_url=url, api_key="unused", max_retries=0, timeout=120) as client:
        yield client
