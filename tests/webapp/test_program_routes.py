"""Routes of Programs: their end, diagnostics, figures; and a Program from its first request to its last."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from genpool import cli
from pool.program_settings import PrefillCostModel
from pool.rules.programs.tokens import FIRST_COEFFICIENT, next_coefficient
from pool.rules.programs.ttl import cache_miss_impact_seconds
from pool.rules.programs.windows import RequestSample
from pool.store.connection import Client, connect
from pool.store.handouts import Handout, Write
from pool.store.placements import Outcome
from pool.store.program_delivery import ProgramDelivery
from pool.store.program_figures import FIGURES, UPPER
from pool.store.program_keys import ProgramKeys, program_id_of
from pool.store.program_upkeep import Look
from tasks.api_keys import KeyLimits
from tests.builders import completed
from tests.waiting import wait_until
from tests.webapp.playing_worker import MODEL, PlayingWorker
from tests.webapp.program_app import CHAT, RESPONSES, MakeProgramApp, ProgramApp, context, program_apps
from tests.webapp.refusals import error_of
from webapp.auth import NOBODY

DIAGNOSTICS = "/scheduling/diagnostics"
KEYS = ProgramKeys(f"{MODEL}:0")
#: Of the prompt that all requests here have, with the model's chat template.
PROMPT_TOKENS = 21


@pytest.fixture
def make(redis_url: str, client: Client, tmp_path: Path) -> Iterator[MakeProgramApp]:
    """Makes applications."""
    yield from program_apps(redis_url, client, tmp_path)


@pytest.fixture
def app(make: MakeProgramApp) -> ProgramApp:
    """One with a capacity."""
    return make(token_capacity_per_dp_rank=10_000, stats_window_size=1)


@pytest.fixture
def rank(app: ProgramApp, redis_url: str) -> Iterator[ProgramDelivery]:
    """The worker's side of rank `a`, and the model's card."""
    app.join("a")
    publisher = PlayingWorker(redis_url, "a")
    publisher.register()
    made = ProgramDelivery(
        reader=connect(redis_url, max_connections=1),
        writer=connect(redis_url, max_connections=1),
        model=MODEL,
        rank="a",
        lease_ms=60_000,
        result_ttl_ms=60_000,
        incarnation="life-1",
    )
    made.heal()
    yield made
    publisher.close()
    made.reader.connection_pool.disconnect()
    made.writer.connection_pool.disconnect()


def taken(app: ProgramApp, rank: ProgramDelivery) -> Handout:
    """The next request that is sent to the rank, begun; with the planning that it takes."""
    app.plan()
    found = wait_until(lambda: rank.take(1, 100).handouts, description="a request at the rank")
    return found[0]


def end(rank: ProgramDelivery, handout: Handout, **fields: Any) -> None:
    """The rank completes it."""
    outcome = Outcome(**{"prompt_tokens": 100, "context_tokens": 110} | fields)
    (written,) = rank.write([Write(handout.lease, 0, (), replace(completed("x"), outcome=outcome))])
    assert written.code == "ok", written


# --- the end of a Program


def test_finishing_can_be_repeated(app: ProgramApp) -> None:
    """What waits is cancelled; the next request is another generation."""
    job = app.post(**context("p")).get_json()["id"]
    for _ in range(3):
        answer = app.finish("p")
        assert answer.status_code == 200
        assert answer.get_json() == {
            "id": "p",
            "object": "program",
            "models": [{"model": MODEL, "status": "finished"}],
        }
    assert app.get(f"{RESPONSES}/{job}").get_json()["status"] == "cancelled"
    assert error_of(app.get("/v1/programs/p"), 404)["code"] == "not_found"
    assert app.record("p") is None and app.held == 0
    assert app.post(**context("p")).status_code == 200
    assert app.get("/v1/programs/p").get_json()["models"][0]["generation"] == 1


def test_a_program_is_found_by_any_id_that_is_one(app: ProgramApp) -> None:
    """Slashes and letters of any script, as they stand in a URL; others are refused as in a request."""
    name = "task/1:é t?"
    assert app.post(**context(name)).status_code == 200
    path = "task%2F1:%C3%A9%20t%3F"
    assert app.get(f"/v1/programs/{path}").get_json()["id"] == name
    assert app.finish(path).get_json()["id"] == name
    assert error_of(app.get("/v1/programs/" + "x" * 257))["param"] == "program"
    assert error_of(app.finish("%0A"))["param"] == "program"


def test_a_program_of_one_model_is_finished_there(app: ProgramApp) -> None:
    """Where several have one of this id, all are, unless one is named."""
    node = app.node
    assert app.post(**context("p")).status_code == 200
    assert app.finish("p", body={"model": MODEL}).status_code == 200
    assert error_of(app.finish("p", body={"model": "disabled"}), 404)["code"] == "not_found"
    assert error_of(app.finish("p", body={"model": "none"}), 404)["code"] == "model_not_found"
    assert error_of(app.finish("p", body={"modell": MODEL}))["code"] == "unknown_parameter"
    assert error_of(app.http.post("/v1/programs/p/finish", data="{", content_type="application/json"))
    assert error_of(app.finish("never-was"), 404)["message"] == "No Program has this id."
    assert node.programs().store("disabled").read(program_id_of(NOBODY, "p")) is None


def test_a_running_request_ends_its_program(app: ProgramApp, rank: ProgramDelivery) -> None:
    """Finished while one runs, the Program is gone with it."""
    job = app.post(**context("p")).get_json()["id"]
    handout = taken(app, rank)
    assert app.finish("p").get_json()["models"] == [{"model": MODEL, "status": "ending"}]
    assert app.get("/v1/programs/p").get_json()["models"][0]["ending"] is True
    end(rank, handout, ttl_ms=60_000)
    assert app.get(f"{RESPONSES}/{job}").get_json()["status"] == "completed"
    assert app.record("p") is None
    assert app.finish("p").get_json()["models"] == [{"model": MODEL, "status": "finished"}]


def test_the_last_request_says_so(app: ProgramApp, rank: ProgramDelivery) -> None:
    """`expected_resume: false` ends the Program with it; said of a failed request it does not."""
    app.post(**context("p"))
    end(rank, taken(app, rank), ttl_ms=60_000)
    assert app.record("p") is not None
    app.post(**context("p", expected_resume=False))
    end(rank, taken(app, rank), ttl_ms=60_000)
    assert app.record("p") is None


# --- a Program's way


def test_a_program_goes_on_where_it_was(app: ProgramApp, rank: ProgramDelivery) -> None:
    """A chat completion that is waited for, then a stream, each sent to the rank; the store learns from them."""
    answers: list[Any] = []
    for turn, body in enumerate(({}, {"stream": True})):
        thread = threading.Thread(
            target=lambda body=body: answers.append(app.post(CHAT, **context("p", step_id=None), **body))  # type: ignore[misc]
        )
        thread.start()
        handout = wait_until(lambda: app.plan() or rank.take(1, 50).handouts, description="it")[0]  # type: ignore[func-returns-value]
        assert handout.lease.placement is not None and handout.lease.placement.epoch == 1
        end(
            rank,
            handout,
            prompt_tokens=100 + 20 * turn,
            ttl_ms=60_000,
            impact_s=1.5,
            shared_tokens=30,
            fresh_until_ms=1,
        )
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].get_json()["choices"][0]["message"]["content"] == "x"
    assert answers[1].text.endswith("data: [DONE]\n\n")
    state = app.get("/v1/programs/p").get_json()["models"][0]
    assert (state["state"], state["status"], state["step"], state["completed_requests"]) == ("active", "acting", 1, 2)
    prompt_bytes = len('{"kind":"chat","messages":[{"role":"user","content":"hi"}]}')
    learnt = next_coefficient(next_coefficient(FIRST_COEFFICIENT, prompt_bytes, 100), prompt_bytes, 120)
    assert app.node.programs().store(MODEL).coefficient("chat") == pytest.approx(learnt, rel=1e-6)


def test_a_program_that_outgrew_its_rank_comes_back_smaller(app: ProgramApp, rank: ProgramDelivery) -> None:
    """With a shorter prompt, as agents send when they have compacted their history; one that is too long is refused."""
    app.post(**context("p"))
    end(rank, taken(app, rank), context_tokens=20_000)
    refused = error_of(app.post(**context("p", expected_output_length=10_000)))
    assert refused["code"] == "program_capacity_exceeded"
    assert app.post(**context("p")).status_code == 200
    gone = Look(began_ms=0, rank_set=0, moved_tokens=0, tokens=0, gone=(program_id_of(NOBODY, "p"),))
    app.node.programs().upkeep(MODEL).observe("a", "life-1", replace(gone, **observed(app)))
    end(rank, taken(app, rank))
    record = app.record("p")
    assert record is not None and record.number("ctx") == 110


def test_estimates_go_by_what_was_learnt(app: ProgramApp) -> None:
    """Before a worker has published the model nobody can count: then bytes of the prompt are, by door."""
    app.client.hset(KEYS.coefficients, "responses", 2.0)
    app.post(**context("p"), input="x" * 1000)
    record = app.record("p")
    assert record is not None and 2000 < record.number("ctx") < 2300


# --- what the operator sees


def test_diagnostics_need_an_admin(make: MakeProgramApp) -> None:
    """Like all that is about everybody's work."""
    app = make(keys={"alice": KeyLimits(), "admin": KeyLimits()})
    assert error_of(app.get(DIAGNOSTICS), 401)["code"] == "invalid_api_key"
    assert error_of(app.get(DIAGNOSTICS, "alice"), 403)["code"] == "key_not_allowed"
    assert app.get(DIAGNOSTICS, "admin").status_code == 200


def test_diagnostics_tell_what_is_decided(app: ProgramApp, rank: ProgramDelivery) -> None:
    """Settings, ranks with the source of their figures, Programs with the reason; names only when asked for."""
    app.post(**context("runs-secret", expected_output_length=9_800))
    handout = taken(app, rank)
    for name in ("waits-secret", "waits-secret", "too-secret"):
        app.post(**context(name, expected_output_length=500, priority=3 if name == "too-secret" else 0))
    answer = app.get(DIAGNOSTICS)
    assert "secret" not in answer.text
    found = answer.get_json()
    facts = next(each for each in found["models"] if each["model"] == MODEL)
    assert (facts["settings"]["token_capacity_per_dp_rank"], facts["programs_total"]) == (10_000, 3)
    assert facts["retained_requests"] == 3
    (seen,) = facts["ranks"]
    assert (seen["id"], seen["up"], seen["active_programs"], seen["queue_size"]) == ("a", True, 1, 2)
    assert (seen["capacity_accounting_source"], seen["observation_fresh"]) == ("ledger_missing_observation", False)
    assert seen["used_tokens"] > 9_800 and seen["last_admission"]["used_tokens"] == 0
    too, waits, runs = facts["programs"]
    assert [each["id"] for each in (too, waits, runs)] == [
        program_id_of(NOBODY, f"{name}-secret") for name in ("too", "waits", "runs")
    ]
    assert (waits["reason"], waits["waiting_requests"]) == ("over_the_low_watermark", 2)
    assert waits["decision"]["required_tokens"] > 500 and waits["queue_age_seconds"] >= 0
    assert (runs["transition"], runs["reason"], runs["in_flight"], runs["decision"]) == ("admit", "fits", 1, None)
    look = Look(began_ms=0, rank_set=0, moved_tokens=0, tokens=77, waiting=1, running=2)
    app.node.programs().upkeep(MODEL).observe("a", "life-1", replace(look, **observed(app)))
    (seen,) = next(each for each in app.get(DIAGNOSTICS).get_json()["models"] if each["model"] == MODEL)["ranks"]
    assert (seen["capacity_accounting_source"], seen["observation_fresh"]) == ("backend_observation", True)
    assert (seen["observed_tokens"], seen["engine_waiting"], seen["engine_running"]) == (77, 1, 2)
    named = app.get(f"{DIAGNOSTICS}?ids=names&model={MODEL}&limit=1").get_json()["models"]
    assert [(p["owner"], p["name"]) for facts in named for p in facts["programs"]] == [(NOBODY, "too-secret")]
    end(rank, handout)


def test_every_fact_of_a_program_and_its_rank(app: ProgramApp, rank: ProgramDelivery) -> None:
    """One that rests after its second request, with a child that waits for it."""
    for growth in (0, 20):
        app.post(**context("up", step_id=4 if growth else None))
        end(
            rank,
            taken(app, rank),
            prompt_tokens=100 + growth,
            ttl_ms=60_000,
            automatic_ms=60_000,
            shared_tokens=30,
            fresh_until_ms=1,
        )
    child = context("child", parent_program_id="up", blocks_parent=True, priority=7, expected_output_length=9_900)
    app.post(**child)
    facts = next(each for each in app.get(DIAGNOSTICS).get_json()["models"] if each["model"] == MODEL)
    waits, up = facts["programs"]
    assert 59 < up.pop("ttl_left_seconds") <= 60
    assert up == {
        "id": program_id_of(NOBODY, "up"), "owner": None, "name": None, "generation": 0, "epoch": 1,
        "state": "active", "status": "acting", "rank": "a", "parent": "", "blocks_parent": False, "step": 4,
        "context_tokens": 110, "shared_prefix_tokens": 30, "private_tokens": 180, "in_flight": 0,
        "waiting_requests": 0, "priority": 0, "rounds": 2, "segment_rounds": 2, "yielded": False,
        "pause_when_idle": False, "queue_age_seconds": None, "force_in_seconds": None, "transition": "rest",
        "reason": "completed", "decision": None,
    }  # fmt: skip
    assert 0 <= waits["queue_age_seconds"] < 30 and 200 < waits["force_in_seconds"] <= 300
    decision = waits["decision"]
    waits |= {"queue_age_seconds": None, "force_in_seconds": None, "decision": None}
    assert waits == up | {
        "id": program_id_of(NOBODY, "child"), "epoch": 0, "state": "paused", "status": "reasoning",
        "parent": program_id_of(NOBODY, "up"), "blocks_parent": True, "step": 0, "context_tokens": PROMPT_TOKENS,
        "shared_prefix_tokens": 0, "private_tokens": 9_900 + PROMPT_TOKENS, "waiting_requests": 1, "priority": 7,
        "rounds": 0, "segment_rounds": 0, "transition": "create", "reason": "over_the_low_watermark",
        "ttl_left_seconds": None,
    }  # fmt: skip
    assert decision == {
        "admitted": False, "reason": "over_the_low_watermark", "rank": "a", "active_programs": 1, "used_tokens": 180,
        "counted_tokens": 180, "required_tokens": 9_900 + PROMPT_TOKENS, "reserve_tokens": 0, "limit_tokens": 10_000,
        "lacking_tokens": 80 + PROMPT_TOKENS, "gain": None,
    }  # fmt: skip
    (seen,) = facts["ranks"]
    assert seen == {
        "id": "a", "up": True, "active_programs": 1, "reasoning_programs": 0, "queue_size": 1, "retained_requests": 1,
        "capacity_tokens": 10_000, "used_tokens": 180, "ledger_tokens": 180, "leaving_tokens": 0,
        "capacity_accounting_source": "ledger_missing_observation", "observation_age_seconds": None,
        "observation_fresh": False, "observed_tokens": None, "engine_running": None, "engine_waiting": None,
        "target_rounds": 0, "mean_growth_tokens": None, "throughput_per_second": None, "statistics_full": False,
        "last_admission": {"used_tokens": 0, "required_tokens": PROMPT_TOKENS + 100, "reserve_tokens": 0},
    }  # fmt: skip
    assert facts["retained_requests"] == 1
    app.finish("up")
    app.finish("child")


def observed(app: ProgramApp) -> dict[str, int]:
    """What a look that begins now must know of the store."""
    seen = app.node.programs().store(MODEL).snapshot("a")
    return {"began_ms": seen.now_ms, "rank_set": seen.rank_set, "moved_tokens": seen.moved_tokens}


@pytest.mark.parametrize(
    ("query", "field"), [("limit=1001", "limit"), ("limit=x", "limit"), ("ids=all", "ids"), ("x=1", "x")]
)
def test_queries_are_checked(app: ProgramApp, query: str, field: str) -> None:
    """As everywhere."""
    assert error_of(app.get(f"{DIAGNOSTICS}?{query}"))["param"] == field


def test_an_unknown_model_has_no_diagnostics(app: ProgramApp) -> None:
    """404."""
    assert error_of(app.get(f"{DIAGNOSTICS}?model=none"), 404)["code"] == "model_not_found"


def test_the_command_shows_programs(
    app: ProgramApp, rank: ProgramDelivery, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a table and as JSON, by their stored ids; where Programs are off it says so."""
    variables = {
        "GENPOOL_STATE__URL": redis_url,
        "GENPOOL_MODELS__TINY__SOURCE": "random:1",
        "GENPOOL_PROGRAMS__ENABLED": "true",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    app.post(**context("p-secret"))
    handout = taken(app, rank)
    app.post(**context("q-secret"))
    table = CliRunner().invoke(cli, ["programs"]).output
    assert "secret" not in table
    rows = {row.split()[1]: row.split() for row in table.splitlines()[1:]}
    assert rows[program_id_of(NOBODY, "p-secret")][2:5] == ["active", "reasoning", "a"]
    assert rows[program_id_of(NOBODY, "q-secret")][-1] == "fits"
    shown = json.loads(CliRunner().invoke(cli, ["programs", "--json", "--limit", "1"]).output)
    assert [len(facts["programs"]) for facts in shown if facts["model"] == MODEL] == [1]
    assert "1 more" in CliRunner().invoke(cli, ["programs", "--limit", "1"]).output
    monkeypatch.setenv("GENPOOL_PROGRAMS__ENABLED", "false")
    off = CliRunner().invoke(cli, ["programs"])
    assert off.exit_code == 1 and "Programs are off" in off.output
    end(rank, handout)


def samples(app: ProgramApp) -> dict[str, float]:
    """The figures of Programs, without the prefix and the model's label."""
    text = app.get("/metrics").get_data(as_text=True)
    found = re.findall(r"^genpool_program_(\S+) (\S+)$", text, re.MULTILINE)
    return {name.replace(f'model="{MODEL}",', "").replace(f'model="{MODEL}"', ""): float(v) for name, v in found}


def test_figures_of_programs(app: ProgramApp, rank: ProgramDelivery) -> None:
    """What was counted, how the rank stands, and how the last admission was decided; no Program is named."""
    for growth in (0, 20):
        app.post(**context("p-secret"))
        end(
            rank,
            taken(app, rank),
            prompt_tokens=100 + growth,
            ttl_ms=60_000,
            impact_s=1.5,
            shared_tokens=30,
            fresh_until_ms=1,
        )
    found = samples(app)
    assert (
        "secret" not in app.get("/metrics").text and program_id_of(NOBODY, "p-secret") not in app.get("/metrics").text
    )
    assert found['transitions_total{reason="arrival",transition="create"}'] == 1
    assert found['transitions_total{reason="fits",transition="admit"}'] == 1
    assert (found["programs{}"], found['rank_active_programs{rank="a"}'], found['rank_queue_size{rank="a"}']) == (
        1,
        1,
        0,
    )
    assert found['rank_capacity_tokens{rank="a"}'] == 10_000
    assert found['rank_used_tokens{rank="a"}'] == found['rank_ledger_tokens{rank="a"}'] > 0
    assert found['admission_used_tokens{rank="a"}'] == 0 < found['admission_projected_pressure{rank="a"}'] < 0.1
    assert found['capacity_accounting_source{rank="a",source="ledger_missing_observation"}'] == 1
    assert 'observation_age_seconds{rank="a"}' not in found
    counts = {name: found[f'{name}_count{{rank="a"}}'] for name in FAMILIES}
    assert counts == dict.fromkeys(FAMILIES, 2) | {"context_growth_tokens": 1, "request_interval_seconds": 1}
    assert found['cache_miss_impact_seconds_sum{rank="a"}'] == 3
    assert found['cache_miss_impact_seconds_bucket{le="1",rank="a"}'] == 0
    assert found['cache_miss_impact_seconds_bucket{le="2",rank="a"}'] == 2
    assert found['context_growth_tokens_sum{rank="a"}'] == 20
    assert found['armed_ttl_seconds_bucket{le="60",rank="a"}'] == 2
    assert found['shared_prefix_tokens_sum{rank="a"}'] == 60
    assert found['queue_wait_seconds_bucket{le="+Inf",rank="a"}'] == 2
    assert (found['rank_up{rank="a"}'], found['rank_reasoning_programs{rank="a"}']) == (1, 0)
    assert (
        found['admission_required_tokens{rank="a"}'] == PROMPT_TOKENS + 100
        and found['admission_reserve_tokens{rank="a"}'] == 0
    )
    assert found['admission_capacity_pressure{rank="a"}'] == 0
    assert found['rank_leaving_tokens{rank="a"}'] == 0
    look = Look(began_ms=0, rank_set=0, moved_tokens=0, tokens=77, waiting=1, running=2)
    app.node.programs().upkeep(MODEL).observe("a", "life-1", replace(look, **observed(app)))
    found = samples(app)
    assert found['capacity_accounting_source{rank="a",source="backend_observation"}'] == 1
    assert (found['observation_fresh{rank="a"}'], found['rank_used_tokens{rank="a"}']) == (1, 77)
    assert 0 <= found['observation_age_seconds{rank="a"}'] < 3
    assert (found['engine_waiting_requests{rank="a"}'], found['engine_running_requests{rank="a"}']) == (1, 2)


def sample(growth: int, rounds: int) -> RequestSample:
    """A request that grew by so many tokens, in a segment of so many rounds."""
    return RequestSample(100, 10, None, growth, 1.0, None, 0.0, rounds, 1000)


def test_figures_and_facts_of_a_rank_that_reserves_room(app: ProgramApp, rank: ProgramDelivery) -> None:
    """What is reserved for growth at an admission; then so much that the next one stays, with what it would gain and
    cost, while others go on, and leave."""
    app.post(**context("first"))
    end(rank, taken(app, rank), ttl_ms=60_000, sample=sample(20, 3))
    app.post(**context("second"))
    end(rank, taken(app, rank), ttl_ms=60_000, sample=sample(900, 7))
    found = samples(app)
    # 6 rounds for it, and 5 of 6 for the first one.
    assert found['admission_reserve_tokens{rank="a"}'] == 20 * 11
    assert (found['admission_used_tokens{rank="a"}'], found['admission_capacity_pressure{rank="a"}']) == (210, 0.021)
    projected = (210 + PROMPT_TOKENS + 100 + 220) / 10_000
    assert found['admission_projected_pressure{rank="a"}'] == pytest.approx(projected)
    app.post(**context("first"))
    app.post(**context("waits"))
    app.plan()
    app.finish("second")
    found = samples(app)
    assert (found['rank_reasoning_programs{rank="a"}'], found['rank_queue_size{rank="a"}']) == (1, 1)
    assert (found['rank_leaving_tokens{rank="a"}'], found['rank_ledger_tokens{rank="a"}']) == (210, 210)
    assert found['transitions_total{reason="arrival",transition="continue"}'] == 1
    assert found['transitions_total{reason="finished",transition="release"}'] == 1
    facts = next(each for each in app.get(DIAGNOSTICS).get_json()["models"] if each["model"] == MODEL)
    (seen,), (waits, first) = facts["ranks"], facts["programs"]
    assert (seen["target_rounds"], seen["mean_growth_tokens"], seen["statistics_full"]) == (14, 900, True)
    assert (seen["leaving_tokens"], seen["throughput_per_second"]) == (210, 1)
    assert (first["transition"], first["reason"], first["in_flight"]) == ("continue", "arrival", 1)
    decision = waits["decision"]
    assert (decision["admitted"], decision["reason"]) == (False, "room_reserved_for_growth")
    assert decision["reserve_tokens"] == 900 * (14 + 13)
    assert decision["lacking_tokens"] == 420 + PROMPT_TOKENS + 100 + 900 * 27 - 10_000
    impact_s = cache_miss_impact_seconds(PrefillCostModel(), PROMPT_TOKENS)
    # JSON has no word for an infinite loss: the protected rounds would all be lost.
    assert decision["gain"] == {"gain_s": 0, "impact_s": pytest.approx(impact_s), "loss_s": None}
    end(rank, taken(app, rank))


FAMILIES = [name.replace("_ms", "_seconds") for name in FIGURES]


def test_the_scripts_know_the_same_bounds() -> None:
    """Those of lua/lib/figures.lua."""
    from pool.store import scripts  # noqa: PLC0415

    text = (Path(scripts.__file__).parent / "lua" / "lib" / "figures.lua").read_text()
    stated = {unit: tuple(map(int, bounds.split(","))) for unit, bounds in re.findall(r"(\w+) = {([\d, ]+)}", text)}
    assert stated == dict(UPPER)
