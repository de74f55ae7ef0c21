"""What is told of Programs by the processes that plan."""

from __future__ import annotations

import logging

import pytest

from tests.program_site import Site
from tests.waiting import wait_until


def test_a_change_of_source_is_told_once_by_all(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """A warning when the ledger has to do, a word when the engine reports again."""
    scene, other = site.scene, site.process()
    caplog.set_level(logging.INFO, "genpool.programs")
    scene.arrive("lead")
    site.woken()
    site.seconds_pass("lead", "activated_ms", seconds=10)
    for process in (site.programs[0], other, site.programs[0]):
        site.tick(process)

    def told(what: str) -> list[int]:
        return [record.levelno for record in caplog.records if record.getMessage().startswith(what)]

    assert told("capacity_observation_fallback") == [logging.WARNING]

    def recovered() -> bool:
        site.observe("a", 200)
        site.tick(other)
        return bool(told("capacity_observation_recovered"))

    wait_until(recovered, description="an observation to be seen while it is fresh")
    assert told("capacity_observation_recovered") == [logging.INFO]


def test_unmeasured_coefficients_are_named_at_the_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    """Those of each model, with the two reference figures."""
    site.programs[0].start()
    (line,) = [record.getMessage() for record in caplog.records if "reference_calibration" in record.getMessage()]
    assert "prefill_cost_model.decode_throughput_alpha" in line
    assert "13.93 s" in line and "98.23 tokens/s" in line
