"""What is told of Programs by the processes that plan. What workers tell: `test_program_seat.py`."""

from __future__ import annotations

import logging

import pytest

from pool.program_settings import ProgramSettings
from pool.settings import ModelSettings
from tasks.config import Settings
from tasks.program_log import log, set_log_level, tell
from tasks.programs import Programs
from tests.program_lines import line_of, told
from tests.program_scene import pid
from tests.program_site import HELD, MODEL, Site, with_settings
from tests.waiting import wait_until


def test_lines_are_read_by_people_and_programs(caplog: pytest.LogCaptureFixture) -> None:
    """An event and `name=value`; no value can look like another one, or begin a line of its own."""
    given = {"none": None, "yes": True, "part": 1 / 3, "count": 3, "rank": "tiny@host-2", "text": 'a "b"=\n c'}
    with caplog.at_level(logging.INFO, "genpool.programs"):
        tell(logging.INFO, "some_event", **given)
        tell(logging.DEBUG, "some_event")
    (record,) = caplog.records
    shown = r'none=none yes=true part=0.333 count=3 rank=tiny@host-2 text="a \"b\"=\n c"'
    assert record.getMessage() == f"some_event {shown}"
    assert line_of(record.getMessage()).values["text"] == given["text"]


@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_log_level_is_what_is_told(level: str, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever else the process logs."""
    caplog.set_level(logging.CRITICAL, "genpool.programs")
    set_log_level(ProgramSettings(enabled=True, log_level=level))
    assert logging.getLevelName(log.getEffectiveLevel()) == level.upper()


def test_an_admission_is_told_with_its_numbers(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """By the stored id, and not by the name."""
    site.scene.arrive("lead")
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.woken()
    (line,) = told(caplog)
    assert (line.level, line.event) == ("INFO", "program_admit")
    assert line.values == {
        "model": MODEL,
        "program": pid("lead"),
        "rank": "a",
        "reason": "fits",
        "used_tokens": "0",
        "required_tokens": "200",
        "reserve_tokens": "0",
        "limit_tokens": "1000",
        "active": "0",
        "gain_s": "none",
    }


@with_settings(binding_only=True)
def test_a_program_that_is_only_bound_is_told_of_when_it_gets_a_place_late(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rank was lost; another one takes it."""
    site.scene.arrive("lead")
    site.die("a")
    site.join("b", "second")
    with caplog.at_level(logging.INFO, "genpool.programs"):
        site.tick()
    (line,) = told(caplog, "program_admit")
    assert line.values == {"model": MODEL, "program": pid("lead"), "rank": "b", "reason": "bound"}


def test_a_pause_is_told_with_its_reason(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """And with the tokens that it frees, where they are known."""
    scene = site.scene
    scene.arrive("lead")
    site.woken()
    scene.end(*scene.take(), context_tokens=110, **HELD)
    with caplog.at_level(logging.INFO, "genpool.programs"):
        scene.due("ttl", "lead")
        site.tick()
    (line,) = told(caplog, "program_pause")
    assert line.level == "INFO"
    expected = {"model": MODEL, "program": pid("lead"), "rank": "a", "reason": "ttl_expired", "tokens": "unknown"}
    assert line.values == expected


def test_a_change_of_source_is_told_once_by_all(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A warning when the ledger has to do, a word when the engine reports again."""
    scene, other = site.scene, site.process()
    caplog.set_level(logging.INFO, "genpool.programs")
    scene.arrive("lead")
    site.woken()
    site.seconds_pass("lead", "activated_ms", seconds=10)
    for process in (site.programs[0], other, site.programs[0]):
        site.tick(process)
    (line,) = told(caplog, "capacity_observation_fallback")
    assert line.level == "WARNING"
    assert line.values == {"model": MODEL, "rank": "a", "source": "ledger_missing_observation"}

    def recovered() -> bool:
        site.observe("a", 200)
        site.tick(other)
        return bool(told(caplog, "capacity_observation_recovered"))

    wait_until(recovered, description="an observation to be seen while it is fresh")
    (line,) = told(caplog, "capacity_observation_recovered")
    assert (line.level, line.values["source"]) == ("INFO", "backend_observation")
    assert len(told(caplog, "capacity_observation_fallback")) == 1


@with_settings(rank_gone_seconds=0.001)
def test_a_lost_rank_is_told_of_until_it_is_gone(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Who waited for it waits for another one."""
    site.scene.arrive("lead", tokens=2000)
    site.join("b", "second")
    site.die("a")

    def is_gone() -> bool:
        site.tick()
        return bool(told(caplog, "program_rank_gone"))

    with caplog.at_level(logging.INFO, "genpool.programs"):
        wait_until(is_gone, description="the rank to leave the ring")
    lines = told(caplog, "program_rank_lost", "program_rebind", "program_rank_gone")
    assert [(line.level, line.event) for line in lines] == [
        ("WARNING", "program_rank_lost"),
        ("INFO", "program_rebind"),
        ("INFO", "program_rank_gone"),
    ]
    assert [line.values for line in lines] == [
        {"model": MODEL, "rank": "a"},
        {"model": MODEL, "rank": "a", "to": "b", "programs": "1"},
        {"model": MODEL, "rank": "a"},
    ]


def test_unmeasured_coefficients_are_named_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Those of each model, with the two reference figures."""
    site.programs[0].start()
    (line,) = told(caplog)
    assert (line.level, line.event) == ("WARNING", "program_scheduling_reference_calibration")
    assert len(line.values["defaults"].split(",")) == 7
    assert "prefill_cost_model.decode_throughput_alpha" in line.values["defaults"]
    assert (line.values["model"], line.values["prefill_tokens"], line.values["context_tokens"]) == (
        MODEL,
        "50000",
        "200000",
    )
    assert float(line.values["prefill_s"]) == pytest.approx(13.93, abs=0.005)
    assert float(line.values["decode_tokens_per_s"]) == pytest.approx(98.23, abs=0.005)
    assert "genpool calibrate" in line.values["advice"]


def test_planning_that_fails_is_told_once_without_values(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """With the place in the code; what a library says may quote its input."""
    scene = site.scene
    scene.client.set(scene.keys.dirty, "no-set-canary")
    for _ in range(2):
        site.tick()
    (line,) = told(caplog)
    assert (line.level, line.event, line.values["model"]) == ("WARNING", "program_planning_failed", MODEL)
    assert line.values["error"].endswith("Error")
    assert ",programs._attempt:" in line.values["place"]
    assert "canary" not in caplog.text
    scene.client.delete(scene.keys.dirty)


def test_models_of_which_the_same_is_to_be_said_share_a_line(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """In an API process; a worker tells of the models that it serves alone."""
    own = {"c": {"prefill_cost_model": {"intercept_seconds": 1}}}
    configured = Settings(
        programs=ProgramSettings.model_validate({"enabled": True, "models": own}),
        models={name: ModelSettings(source="random:1") for name in ("a", "b", "c")},
    )
    for serves, lines in ((None, ["a,b", "c"]), (["b"], ["b"])):
        caplog.clear()
        process = Programs(site.scene.client, site.scene.jobs, configured, terms=site.scene.terms)
        process.start(serves)
        process.stop()
        assert [line.values["model"] for line in told(caplog, "program_scheduling_reference_calibration")] == lines
