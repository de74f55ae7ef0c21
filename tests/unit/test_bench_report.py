"""The benchmarks' arithmetic: medians, targets, the order of rounds, and the object that ends the output."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.report import Report, Sample, Target, interleaved, machine, medians, percentile, ratio, table


def test_a_median_is_taken_over_the_rounds_that_have_the_figure() -> None:
    """One outlier does not move it, and a figure that only some rounds have counts where it is."""
    rounds = [{"jobs/s": 10.0}, {"jobs/s": 1000.0, "p99 ms": 4.0}, {"jobs/s": 12.0, "p99 ms": 2.0}]
    assert medians(rounds) == {"jobs/s": 12.0, "p99 ms": 3.0}


def test_a_percentile_is_one_of_the_values() -> None:
    """The smallest value that the share does not exceed; of nothing there is none."""
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 50) == 50.0
    assert percentile(values, 99) == 99.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target("t", 8.0, at_least=8), True),
        (Target("t", 7.99, at_least=8), False),
        (Target("t", 5.0, at_most=5), True),
        (Target("t", 5.01, at_most=5), False),
        (Target("t", None, at_least=0), False),
    ],
)
def test_a_bound_itself_meets_the_target_and_no_figure_misses_it(target: Target, met: bool) -> None:
    """Bounds are inclusive; what was not measured is never met."""
    assert target.met is met


def test_a_ratio_needs_both_figures() -> None:
    """A peer that could not run gives no ratio, and neither does a rate of nothing."""
    assert ratio(6.0, 2.0) == 3.0
    assert ratio(None, 2.0) is None
    assert ratio(6.0, None) is None
    assert ratio(6.0, 0.0) is None


def test_rounds_take_turns_and_begin_with_another_contestant_each() -> None:
    """Nobody runs twice in a row within a round, nobody always runs first, and every sample is kept in order."""
    order: list[str] = []

    def run(name: str) -> Sample:
        order.append(name)
        return {"turn": float(len(order))}

    contestants: dict[str, Callable[[], Sample]] = {name: partial(run, name) for name in "abc"}
    samples = interleaved(contestants, rounds=3)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b"]
    assert samples["a"] == [{"turn": 1.0}, {"turn": 6.0}, {"turn": 8.0}]


def test_a_table_is_aligned() -> None:
    """Every line is equally long."""
    lines = table([["name", "value"], ["a", "1"], ["longer", "12345678"]]).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1


def test_the_output_ends_with_one_object_of_five_fields(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last line is the verdict; the recorded file holds it too, with medians and all rounds."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    rounds = [{"jobs/s": 8.0}, {"jobs/s": 9.0}, {"jobs/s": 30.0}]
    done = Report(
        name="example",
        parameters={"jobs": 5},
        samples={"ours": rounds},
        targets=[Target("ours / theirs", 4.56789, at_least=8), Target("lag ms", None, at_most=5)],
        machine={"cores": 2},
    )
    report.publish(done, json_file=tmp_path / "copy.json", record=True)
    verdict = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert verdict == {
        "name": "example",
        "ratios": {"ours / theirs": 4.568, "lag ms": None},
        "targets": {"ours / theirs": ">= 8", "lag ms": "<= 5"},
        "met": {"ours / theirs": False, "lag ms": False},
        "machine": {"cores": 2},
    }
    (recorded,) = tmp_path.glob("example-*.json")
    document = json.loads(recorded.read_text())
    assert document.items() >= verdict.items()
    assert document["medians"] == {"ours": {"jobs/s": 9.0}}
    assert document["rounds"] == {"ours": rounds}
    assert json.loads((tmp_path / "copy.json").read_text()) == document


def test_machine_facts_name_no_machine() -> None:
    """CPU, cores, system and versions are all there is: no host name, no path."""
    facts = machine()
    assert facts["cores"] >= 1
    assert facts["versions"]["redis"]
    assert set(facts) == {"cpu", "cores", "system", "python", "versions"}
