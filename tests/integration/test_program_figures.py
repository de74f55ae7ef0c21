"""What a node and a worker tell of Programs that they really run: each metric, each line of their logs, diagnostics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from pool.store.program_keys import program_id_of
from tests.program_lines import Told, line_of
from tests.system import TINY, System
from tests.waiting import wait_until
from webapp.auth import NOBODY
from webapp.program_metrics import GAUGES, HISTOGRAMS, PREFIX

#: What agents begin with alike: long beside the steps of 64 tokens in which KV is found again.
SHARED = "You have tools: read, write, run. " * 25
NAMES = ("secret-one", "secret-two", "secret-brief")


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One node and one worker, after some requests of three Programs."""
    with System(
        tmp_path_factory.mktemp("system"),
        workers=1,
        serves=TINY,
        sections={
            "programs": {"enabled": True, "metrics_interval_seconds": 0.2, "log_level": "debug"},
            f"programs.models.{TINY}": {"token_capacity_per_dp_rank": 20_000},
        },
    ) as system:
        system.start()
        one, two, brief = NAMES
        ask(system, one, SHARED + "Fix the first bug.")
        ask(system, two, SHARED + "Write a test for the second bug.")
        ask(system, one, SHARED + "Fix the first bug. Then run all tests, and say which of them fail.")
        # A prompt that is no continuation finds nothing of its own.
        ask(system, one, "x" * 1000)
        ask(system, brief, SHARED, kv_retention_ttl_seconds=0.1)
        yield system


def ask(system: System, name: str, prompt: str, **hints: Any) -> None:
    """A request of a Program, whose place is kept for a minute, from its beginning to its end."""
    context = {"program_id": name, "kv_retention_ttl_seconds": 60} | hints
    asked = {"model": TINY, "prompt": prompt, "max_tokens": 8, "vllm_xargs": {"agentic_context": context}}
    answer = system.http.post(f"{system.api_url(system.apis[0])}/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text


def samples(system: System) -> dict[str, dict[str, float]]:
    """Values by family, without the prefix, and labels."""
    text = system.http.get(f"{system.api_url(system.apis[0])}/metrics").text
    found: dict[str, dict[str, float]] = {}
    for family, labels, value in re.findall(rf"^{PREFIX}(\w+){{(.*)}} (\S+)$", text, re.MULTILINE):
        if f'model="{TINY}"' in labels:
            found.setdefault(family, {})[labels] = float(value)
    return found


def lines(system: System) -> list[Told]:
    """All that the node and the worker have told of Programs, whatever stands before it in a line."""
    text = "\n".join(part.output() for part in (*system.apis, *system.workers))
    found = re.findall(r"\b(?:DEBUG|INFO|WARNING)\S* ([a-z]+_[a-z_]+ model=.*|[a-z]+_[a-z_]+ program=.*)", text)
    return [line_of(line) for line in found]


def test_every_metric_has_a_value(system: System) -> None:
    """Of the rank that worked, once its engine was looked at; of each histogram at least one value."""
    wait_until(lambda: "observation_fresh" in samples(system), description="an observation")
    found = samples(system)
    assert set(found) == {
        "programs",
        "transitions_total",
        "capacity_accounting_source",
        *GAUGES,
        *(f"{family}_{part}" for family, _ in HISTOGRAMS.values() for part in ("bucket", "count", "sum")),
    }
    assert {family for family, _ in HISTOGRAMS.values() if not only(found[f"{family}_count"])} == set()
    assert only(found["programs"]) == 3
    assert only(found["rank_active_programs"]) in (2, 3)
    assert only(found["rank_capacity_tokens"]) == 20_000
    assert 0 < only(found["rank_used_tokens"]) < 20_000
    assert 0 < only(found["admission_required_tokens"]) < only(found["rank_ledger_tokens"]) + 1000
    assert 0 < only(found["admission_projected_pressure"]) < 1
    assert only(found["shared_prefix_tokens_sum"]) > 64
    assert only(found["context_growth_tokens_sum"]) > 10
    transitions = {re.sub(r'.*transition="(\w+)".*', r"\1", labels) for labels in found["transitions_total"]}
    assert {"create", "admit", "continue", "rest"} <= transitions


def only(values: dict[str, float]) -> float:
    """The value of a family that has one."""
    (value,) = values.values()
    return value


def test_processes_tell_what_happens(system: System) -> None:
    """The node as well as the worker, whichever made a transition; by stored ids."""
    expected = {
        "program_scheduling_reference_calibration",
        "program_admit",
        "program_pause",
        "request_dispatch",
        "cache_observation",
        "continuity_sample",
        "ttl_armed",
        "unexpected_cache_discontinuity",
        "capacity_observation",
    }
    wait_until(lambda: expected <= {line.event for line in lines(system)}, description="all events")
    told = lines(system)
    paused = [line.values for line in told if line.event == "program_pause"]
    assert [(each["program"], each["reason"]) for each in paused] == [(program_id_of(NOBODY, NAMES[2]), "ttl_expired")]
    admitted = [line.values["program"] for line in told if line.event == "program_admit"]
    assert sorted(admitted) == sorted(program_id_of(NOBODY, name) for name in NAMES)
    for part in (*system.apis, *system.workers):
        assert "secret" not in part.output()
        # As each process logs everything, its level included.
        assert re.search(r"WARNING\S* program_scheduling_reference_calibration ", part.output())


def test_diagnostics_follow_the_engine(system: System) -> None:
    """The rank's use is what its engine reported, not older than three intervals, and each Program has its numbers."""

    def model() -> dict[str, Any]:
        answer = system.http.get(f"{system.api_url(system.apis[0])}/scheduling/diagnostics?model={TINY}").json()
        found: dict[str, Any] = answer["models"][0]
        return found

    wait_until(lambda: model()["ranks"][0]["observation_fresh"], description="a fresh observation")
    found = model()
    (rank,) = found["ranks"]
    assert rank["up"] and rank["observed_tokens"] > 0
    assert found["programs_total"] == 3
    assert {each["id"] for each in found["programs"]} == {program_id_of(NOBODY, name) for name in NAMES}
    one = next(each for each in found["programs"] if each["id"] == program_id_of(NOBODY, NAMES[0]))
    assert (one["state"], one["status"], one["rounds"]) == ("active", "acting", 2)
    assert one["context_tokens"] > 900 and 0 < one["ttl_left_seconds"] <= 60
