"""The memory of this machine, and budgets that fit into it or do not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pool.settings import ModelSettings
from tasks import machine_memory
from tasks.machine_memory import available_bytes, fit

KIB = 2**10


def model(**budgets: int) -> ModelSettings:
    """A model with these budgets, of few bytes otherwise."""
    least = {"kv_budget_bytes": 1, "scratch_bytes_per_session": 1, "scratch_budget_bytes": 1}
    return ModelSettings.model_validate({"source": "random:1", **least, **budgets})


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which the test writes what the system tells; 100 KiB are available."""
    monkeypatch.setattr(machine_memory, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine_memory, "_CGROUPS", tmp_path / "groups")
    write(tmp_path / "proc/meminfo", "MemTotal: 300 kB\nMemAvailable: 100 kB\n")
    write(tmp_path / "proc/self/cgroup", "4:memory:/old\n0::/outer/inner\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    """A file and the folders it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_each_model_has_what_the_smaller_ones_leave() -> None:
    """The largest budget of the largest model is the one to lower, to what the others leave."""
    small = ("small", model(kv_budget_bytes=50, weight_bytes=9))
    found = fit([("large", model(kv_budget_bytes=60)), small], 100)
    assert list(found) == ["large", "small"]
    assert (found["small"].fits, found["small"].needed_bytes, found["small"].left_bytes) == (True, 60, 100)
    assert (found["large"].fits, found["large"].needed_bytes, found["large"].left_bytes) == (False, 61, 40)
    assert (found["large"].field, found["large"].most_bytes) == ("kv_budget_bytes", 39)
    corrected = fit([("large", model(kv_budget_bytes=39)), small], 100)
    assert corrected["large"].fits and corrected["small"].fits
    assert not fit([("large", model(kv_budget_bytes=40)), small], 100)["small"].fits


@pytest.mark.parametrize("field", machine_memory.FIELDS)
def test_each_budget_may_be_the_one_too_many(field: str) -> None:
    """Where the others leave nothing, no value of it fits."""
    full = ("full", model(kv_budget_bytes=499))
    alone, beside = (fit([*others, ("b", model(**{field: 1000}))], 500)["b"] for others in ([], [full]))
    assert (alone.field, alone.fits, beside.field, beside.fits) == (field, False, field, False)
    assert (beside.left_bytes, alone.most_bytes > 0, beside.most_bytes > 0) == (0, True, False)


def test_what_our_own_workers_have_is_available(machine: Path) -> None:
    """Budgets are of whole workers, whether these run already or not; a process that has gone has nothing."""
    assert available_bytes() == 100 * KIB
    write(machine / "proc/7/statm", "90 20 5 1 0 60 0\n")
    assert available_bytes([7, 8]) == 100 * KIB + 20 * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("group", ["", "outer", "outer/inner"])
def test_a_limit_of_any_group_above_holds(machine: Path, group: str) -> None:
    """A container's, a service's, a user's."""
    write(machine / "groups/memory.max", "max\n")
    write(machine / "groups" / group / "memory.max", "50000\n")
    assert available_bytes() == 50_000


def test_a_machine_that_does_not_say_is_not_guessed(machine: Path) -> None:
    """Nothing is known, rather than nothing available."""
    (machine / "proc/meminfo").unlink()
    assert available_bytes([7]) is None
