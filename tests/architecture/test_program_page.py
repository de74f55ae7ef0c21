"""docs/program-parameters.md is whole, and what it names is there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from pool.program_settings import DecodeThroughputModel, PrefillCostModel, ProgramSettings
from tasks.program_diagnostics import ModelFacts, ProgramFacts, RankFacts
from webapp.program_metrics import GAUGES, HISTOGRAMS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "program-parameters.md").read_text()
NESTED = {"prefill_cost_model": PrefillCostModel, "decode_throughput_model": DecodeThroughputModel}
PARAMETERS = [
    *ProgramSettings.model_fields,
    *(f"{name}.{field}" for name, kind in NESTED.items() for field in kind.model_fields),
]


def rows(section: str) -> Iterator[list[str]]:
    """The cells of each row of a section's table, its head left out."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    for line in lines[2:]:
        yield [cell.strip() for cell in line.strip("|").split("|")]


def known_tests() -> set[str]:
    """Names of all tests."""
    return {
        name
        for path in (ROOT / "tests").glob("*/test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }


def test_every_parameter_has_a_row() -> None:
    """Each field of the settings, and no other."""
    assert sorted(row[0].strip("`") for row in rows("Parameters")) == sorted(PARAMETERS)


def test_every_metric_has_a_row() -> None:
    """Each family about Programs."""
    families = [*GAUGES, *(name for name, _ in HISTOGRAMS.values())]
    families += ["programs", "transitions_total", "capacity_accounting_source"]
    assert sorted(row[0].strip("`") for row in rows("Metrics")) == sorted(families)


def test_every_field_of_the_diagnostics_has_a_row() -> None:
    """Of a model, a rank, a Program."""
    kinds = {"model": ModelFacts, "rank": RankFacts, "Program": ProgramFacts}
    stated = sorted((row[0], row[1].strip("`")) for row in rows("Diagnostics"))
    assert stated == sorted((name, field.name) for name, kind in kinds.items() for field in fields(kind))


@pytest.mark.parametrize("section", ["Parameters", "Log events", "Metrics", "Diagnostics"])
def test_no_cell_is_empty_and_what_it_names_exists(section: str) -> None:
    """Files, what stands in them, and tests."""
    known = known_tests()
    for cells in rows(section):
        assert all(cells), cells
        *_, code, test, _ = cells
        named = re.findall(r"`(test_\w+)`", test)
        assert named and set(named) <= known, (cells[0], set(named) - known)
        files = re.findall(r"`((?:pool|tasks|workers|webapp)/[\w/]+\.(?:py|lua))`(?: `([\w.]+)`)?", code)
        assert files, cells[0]
        for file, name in files:
            source = (ROOT / file).read_text()
            assert not name or re.search(rf"\b(?:def|class) {name.rpartition('.')[2]}\b", source), (cells[0], name)
        if section == "Log events":
            assert cells[0].strip("`") in (ROOT / files[0][0]).read_text()


def test_tables_have_no_ragged_row() -> None:
    """As many cells as their heads."""
    for section, columns in (("Parameters", 4), ("Log events", 5), ("Metrics", 4), ("Diagnostics", 5)):
        assert {len(row) for row in rows(section)} == {columns}
