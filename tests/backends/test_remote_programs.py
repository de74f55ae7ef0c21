"""Programs whose model a server over HTTP runs: what its metrics say becomes the rank's observation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.backends.upstream import Upstream
from tests.engine.small_model import write_small_model
from tests.system import System
from tests.waiting import wait_until
from workers.backends.remote_residence import Scraped, scraped

MODEL, CAPACITY = "far", 10_000
VLLM = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
"""
LLAMA = """\
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 1
"""
LLAMA_KV = "# TYPE llamacpp:kv_cache_usage_ratio gauge\nllamacpp:kv_cache_usage_ratio 0.125\n"


def test_series_are_read_by_their_names() -> None:
    """Of the one rank that is meant; what is missing is nothing, and never 0."""
    assert scraped(VLLM, "vllm", 0) == Scraped(3, 0, 0.25)
    assert scraped(VLLM, "vllm", 1) == Scraped(5, 2, 0.5)
    assert scraped(LLAMA, "llama_cpp", None) == Scraped(2, 1, None)
    assert scraped(LLAMA + LLAMA_KV, "llama_cpp", None) == Scraped(2, 1, 0.125)
    assert scraped("", "vllm", None) == Scraped()
    assert scraped(VLLM.replace("kv_cache_usage_perc", "gpu_cache_usage_perc"), "vllm", 1) == Scraped(5, 2, 0.5)


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    upstream = Upstream(delay_s=0.01)
    yield upstream
    upstream.close()


def test_what_its_metrics_say_is_the_ranks_observation(tmp_path: Path, upstream: Upstream) -> None:
    """Usage of its KV times the capacity, and the private tokens of Programs between two requests; without that
    series the ledger counts alone. It has no room to give up: a paused Program's tokens are gone at once."""
    small = str(write_small_model(tmp_path / "small.gguf"))
    upstream.metrics = LLAMA.replace("processing 2", "processing 0") + LLAMA_KV
    fields = {
        "backend": "openai_remote",
        "target_inflight": 4,
        "upstream.base_urls": [upstream.url],
        "upstream.kind": "llama_cpp",
        "upstream.tokenizer": small,
        "upstream.model": "known",
    }
    programs = {"enabled": True, "metrics_interval_seconds": 0.2, "token_capacity_per_dp_rank": CAPACITY}
    sections = {"programs": programs}
    with System(tmp_path / "system", workers=1, models={MODEL: fields}, serves=MODEL, sections=sections) as system:
        system.start()
        url = system.api_url(system.apis[0])

        def rank() -> dict[str, Any]:
            (facts,) = system.http.get(f"{url}/scheduling/diagnostics?model={MODEL}").json()["models"]
            found: dict[str, Any] = facts["ranks"][0]
            return found

        def seen(source: str) -> Callable[[], dict[str, Any] | None]:
            return lambda: found if (found := rank())["capacity_accounting_source"] == source else None

        context = {"program_id": "agent", "kv_retention_ttl_seconds": 60}
        body = {"model": MODEL, "prompt": "Go on", "max_tokens": 8, "temperature": 0}
        answer = system.http.post(f"{url}/v1/completions", json=body | {"vllm_xargs": {"agentic_context": context}})
        assert answer.status_code == 200, answer.text
        observed = wait_until(seen("backend_observation"), description="an observation")
        wait_until(lambda: rank()["observed_tokens"] > CAPACITY / 8, description="tokens of the resting agent")
        assert observed["engine_waiting"] == 1 and observed["engine_running"] == 0
        assert rank()["observed_tokens"] == CAPACITY // 8 + rank()["ledger_tokens"]

        upstream.metrics = LLAMA
        wait_until(seen("ledger_missing_token_estimate"), description="the ledger without the series")
        upstream.metrics = "nonsense"
        assert system.http.post(f"{url}/v1/programs/agent/finish").status_code == 200
        wait_until(lambda: rank()["ledger_tokens"] == rank()["leaving_tokens"] == 0, description="nothing to be left")
        assert system.audit() == []
