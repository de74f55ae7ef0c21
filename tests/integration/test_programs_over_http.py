"""An agent over HTTP with the official client, on a real node and a real worker with the numpy engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, OpenAI

from tests.system import TINY, System
from tests.waiting import wait_until

#: Names from outside stand in no log.
AGENT = "agent-whose-name-is-its-own"
#: The tiny model's tokens, of which each turn's prompt has some more: long beside the engine's grid.
TOKENS = [5 + 7 * at % 200 for at in range(192)]
TURNS = 3


def of_program(name: str, **context: Any) -> dict[str, Any]:
    """What the official client sends besides."""
    return {"vllm_xargs": {"agentic_context": {"program_id": name, **context}}}


def test_an_agent_from_its_first_request_to_its_last(tmp_path: Path) -> None:
    """Completions, chat and responses, waited for, streamed and in the background, of one Program; each finds the KV
    of the one before. A client that leaves cancels its request, and an end that was said is one."""
    programs = {"enabled": True, "metrics_interval_seconds": 0.2, "program_scheduling_enable_key": "auto"}
    sections = {"programs": programs | {"token_capacity_per_dp_rank": 100_000}}
    with System(tmp_path, apis=1, workers=1, serves=TINY, sections=sections) as system:
        system.start()
        url = system.api_url(system.apis[0])
        client = OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=30)
        options: dict[str, Any] = {"model": TINY, "temperature": 0}
        kept = of_program(AGENT, kv_retention_ttl_seconds=60)
        for turn in range(1, TURNS + 1):
            asked: dict[str, Any] = {"prompt": TOKENS[: 64 * turn], "max_tokens": 4, "extra_body": kept}
            if turn == 2:
                pieces = list(client.completions.create(**asked, **options, stream=True))
                assert pieces[-1].choices[0].finish_reason is not None
            else:
                assert client.completions.create(**asked, **options).choices[0].text
        state = system.http.get(f"{url}/v1/programs/{AGENT}").json()["models"][0]
        assert (state["state"], state["status"], state["completed_requests"]) == ("active", "acting", TURNS)

        said = client.chat.completions.create(
            messages=[{"role": "user", "content": "Hi."}],
            max_tokens=4,
            **options,
            extra_headers={"x-session-id": "chat"},
        )
        assert said.choices[0].message.content is not None
        first = client.responses.create(
            input="Hi.", max_output_tokens=4, background=True, **options, extra_body=of_program("responses")
        )
        ended = wait_until(lambda: ended_of(client, first.id), description="the response")
        assert ended.status in ("completed", "incomplete")
        last = client.responses.create(
            input="More.",
            max_output_tokens=4,
            previous_response_id=first.id,
            **options,
            extra_body=of_program("responses", expected_resume=False),
        )
        assert last.output_text is not None
        assert system.http.get(f"{url}/v1/programs/responses").status_code == 404

        stream = client.completions.create(
            prompt="x", max_tokens=200, **options, stream=True, extra_body=of_program("left") | {"ignore_eos": True}
        )
        next(iter(stream))
        stream.close()
        wait_until(
            lambda: system.http.get(f"{url}/v1/programs/left").status_code == 404,
            description="the end of a Program whose only request was cancelled",
        )
        with pytest.raises(APIStatusError) as refused:
            client.completions.create(prompt="x", **options, extra_body=of_program(AGENT, step_id=-1))
        assert refused.value.status_code == 400

        figures = wait_until(lambda: figures_after(system, url), description="the worker's next heartbeat")
        cached = re.search(r"^genpool_engine_prompt_tokens_cached_total\S* (\S+)$", figures, re.MULTILINE)
        waits = re.search(r"^genpool_program_queue_wait_seconds_count\S* (\S+)$", figures, re.MULTILINE)
        assert waits is not None and float(waits[1]) == 7 and cached is not None and float(cached[1]) > 100
        (facts,) = system.http.get(f"{url}/scheduling/diagnostics?model={TINY}").json()["models"]
        assert facts["ranks"][0]["up"] and facts["programs_total"] == 2
        for name in (AGENT, "chat:lead"):
            for _ in range(2):
                assert system.http.post(f"{url}/v1/programs/{name}/finish").status_code == 200
        wait_until(lambda: system.http.get(f"{url}/v1/programs/{AGENT}").status_code == 404, description="its end")
        assert system.audit() == []
        assert not any(AGENT in part.output() for part in system.parts)


def figures_after(system: System, url: str) -> str | None:
    """The figures, once the worker has told of the six that ended by themselves."""
    text = system.http.get(f"{url}/metrics").text
    return text if re.search(r"^genpool_engine_completed_sessions_total\S* 6(\.0)?$", text, re.MULTILINE) else None


def ended_of(client: OpenAI, job: str) -> Any:
    """The response, once it has ended."""
    found = client.responses.retrieve(job)
    return found if found.status not in ("queued", "in_progress") else None


def test_a_place_that_ends_between_ticks_is_given_on(tmp_path: Path) -> None:
    """The end of a hold, the KV that goes, and the room that it leaves are each noticed as they come: with a tick a
    minute, who waits for the place begins all the same."""
    programs = {"enabled": True, "metrics_interval_seconds": 60, "token_capacity_per_dp_rank": 400}
    with System(tmp_path, apis=1, workers=1, serves=TINY, sections={"programs": programs}) as system:
        system.start()
        client = OpenAI(base_url=f"{system.api_url(system.apis[0])}/v1", api_key="any", max_retries=0, timeout=30)
        asked: dict[str, Any] = {"model": TINY, "temperature": 0, "prompt": TOKENS, "max_tokens": 4}
        for name in ("one", "two", "three"):
            held = of_program(name, kv_retention_ttl_seconds=0.5)
            assert client.completions.create(**asked, extra_body=held).choices[0].text
        assert system.audit() == []
