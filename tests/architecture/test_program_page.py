"""docs/program-parameters.md is whole, and what it names is there."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from functools import cache
from pathlib import Path

import pytest

from pool.program_settings import DecodeThroughputModel, PrefillCostModel, ProgramSettings
from pool.rules.programs.admission import Decision, Reason
from pool.rules.programs.batch_gain import Gain
from pool.rules.programs.facts import PauseReason
from tasks.program_diagnostics import ModelFacts, ProgramFacts, RankFacts, _admission, _decision
from webapp.program_metrics import GAUGES, HISTOGRAMS, PREFIX, REASONS, TRANSITIONS
from webapp.schemas.programs import _CONTEXT_FIELDS, _HINT_FIELDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "program-parameters.md").read_text()
CODE = ("pool", "tasks", "workers", "webapp")
#: Sections, and the heads of their tables.
SECTIONS = {
    "Parameters": ["parameter", "code", "test", "observed effect"],
    "Log events": ["event", "level", "code", "test", "told when"],
    "Metrics": ["family", "code", "test", "observed effect"],
    "Diagnostics": ["of", "field", "code", "test", "what it tells"],
    "Identity": ["rule", "code", "test", "observed effect"],
    "Fields of a request": ["field", "code", "test", "observed effect"],
}
NESTED = {"prefill_cost_model": PrefillCostModel, "decode_throughput_model": DecodeThroughputModel}
PARAMETERS = [
    *ProgramSettings.model_fields,
    *(f"{name}.{field}" for name, kind in NESTED.items() for field in kind.model_fields),
]
FAMILIES = [
    *GAUGES,
    *(name for name, _ in HISTOGRAMS.values()),
    *("programs", "transitions_total", "capacity_accounting_source"),
]


def table(section: str) -> list[list[str]]:
    """The cells of a section's table, its head first."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not line.startswith("|---")]


def rows(section: str) -> list[dict[str, str]]:
    """Each row of it, by the columns' names."""
    head, *rest = table(section)
    return [dict(zip(head, cells, strict=True)) for cells in rest]


def names(section: str, column: str) -> list[str]:
    """What the rows of a section are about, sorted."""
    return sorted(row[column].strip("`") for row in rows(section))


@cache
def known_tests() -> dict[str, str]:
    """The source of each test by its name; of several of one name all together."""
    found: dict[str, str] = {}
    for path in (ROOT / "tests").glob("*/test_*.py"):
        for body, name in re.findall(
            r"^(def (test_\w+)\(.*?)(?=^[^\s)]|\Z)", path.read_text(), re.MULTILINE | re.DOTALL
        ):
            found[name] = found.get(name, "") + body
    return found


@cache
def told() -> frozenset[tuple[str, str, str]]:
    """Each event that the code tells: its name, its level, its file. Fails where that cannot be seen."""
    found = set()
    for path in (path for package in CODE for path in (ROOT / package).rglob("*.py")):
        source = path.read_text()
        if "tell(" not in source:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tell":
                level, event = node.args
                assert isinstance(level, ast.Attribute) and isinstance(event, ast.Constant), ast.unparse(node)
                found.add((event.value, level.attr, str(path.relative_to(ROOT))))
    return frozenset(found)


def test_every_parameter_has_a_row() -> None:
    """Each field of the settings, and no other."""
    assert names("Parameters", "parameter") == sorted(PARAMETERS)


def test_every_log_event_has_a_row() -> None:
    """Each that the code tells, with its level, and no other."""
    stated = {(row["event"].strip("`"), row["level"], row["code"].split("`")[1]) for row in rows("Log events")}
    assert stated == told()
    assert len(rows("Log events")) == len(stated)


def test_nobody_else_logs_of_programs() -> None:
    """So that all lines have one form."""
    using = [
        str(path.relative_to(ROOT))
        for package in CODE
        for path in (ROOT / package).rglob("*.py")
        if 'getLogger("genpool.programs")' in path.read_text()
    ]
    assert using == ["tasks/program_log.py"]
    source = (ROOT / "tasks" / "program_log.py").read_text()
    assert re.findall(r"\blog\.(\w+)\(", source) == ["isEnabledFor", "log", "setLevel"]


def test_every_metric_has_a_row() -> None:
    """Each family about Programs, and no other."""
    assert names("Metrics", "family") == sorted(FAMILIES)


def test_every_field_of_the_diagnostics_has_a_row() -> None:
    """Of a model, a rank and its last admission, a Program, its decision and that one's gain; and no other."""
    decision = _decision(Decision("p", "r", Reason.GROWTH_RESERVE, 1, 1, 1, 1, 1, 1, Gain(1, 1, 1)))
    kinds: dict[str, list[str]] = {
        "model": [field.name for field in fields(ModelFacts)],
        "rank": [field.name for field in fields(RankFacts)],
        "admission": [*(_admission(b"1 2 3") or ())],
        "Program": [field.name for field in fields(ProgramFacts)],
        "decision": [*decision],
        "gain": [*decision["gain"]],
    }
    stated = sorted((row["of"], row["field"].strip("`")) for row in rows("Diagnostics"))
    assert stated == sorted((kind, name) for kind, of_kind in kinds.items() for name in of_kind)


def test_every_field_of_a_request_has_a_row() -> None:
    """Those of the canonical object; the page names those of a hint."""
    assert names("Fields of a request", "field") == sorted(_CONTEXT_FIELDS)
    (hint,) = re.findall(r"`agent_hint` has (.*?)\.\n", PAGE, re.DOTALL)
    assert set(re.findall(r"`(\w+)`", hint)) == set(_HINT_FIELDS)


@pytest.mark.parametrize("section", SECTIONS)
def test_no_cell_is_empty_and_what_it_names_exists(section: str) -> None:
    """Files, what stands in them, and tests."""
    assert table(section)[0] == SECTIONS[section]
    for row in rows(section):
        assert all(row.values()), row
        named = re.findall(r"`(test_\w+)`", row["test"])
        assert named and set(named) <= set(known_tests()), (row, set(named) - set(known_tests()))
        files = re.findall(r"`((?:pool|tasks|workers|webapp)/[\w/]+\.(?:py|lua))`(?: `([\w.]+)`)?", row["code"])
        assert files, row
        for file, name in files:
            source = (ROOT / file).read_text()
            last = name.rpartition(".")[2]
            assert not name or re.search(rf"\b(?:def|class|function) {last}\b", source), (row, name)


@pytest.mark.parametrize(
    ("section", "column"), [("Log events", "event"), ("Metrics", "family"), ("Diagnostics", "field")]
)
def test_a_test_of_what_is_seen_looks_at_it(section: str, column: str) -> None:
    """By its name: that a test is named says nothing yet."""
    for row in rows(section):
        name = row[column].strip("`")
        sources = [known_tests()[each] for each in re.findall(r"`(test_\w+)`", row["test"])]
        assert any(
            re.search(rf"(?<![a-z_]){name}(?:_(?:bucket|sum|count))?(?![a-z_])", source) for source in sources
        ), name


def test_other_pages_name_what_there_is() -> None:
    """Metrics, with the words of their labels, and what the log tells of Programs."""
    metrics = (ROOT / "docs" / "metrics.md").read_text()
    known = set(re.findall(r"^\| `(genpool_\w+)` \|", metrics, re.MULTILINE))
    assert {PREFIX + family for family in FAMILIES} <= known
    events = {event for event, _, _ in told()}
    for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]:
        text = page.read_text()
        for name in re.findall(r"\bgenpool_(?:program|engine|jobs|http)_\w+(?![\w.*])", text):
            assert re.sub(r"_(?:bucket|sum|count)$", "", name) in known or name in known, (page.name, name)
        assert set(re.findall(r'transition="(\w+)"', text)) <= set(TRANSITIONS), page.name
        assert set(re.findall(r'reason="(\w+)"', text)) <= REASONS, page.name
        assert set(re.findall(r"log `(\w+)`", text)) <= events, page.name
    assert {reason.value for reason in PauseReason} <= REASONS
