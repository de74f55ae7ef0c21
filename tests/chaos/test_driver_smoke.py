"""The chaos driver itself, for a few seconds: enough to see that it still drives, injects and judges."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

OPTIONS = ("--seconds", "8", "--rate", "5", "--pace", "1.5", "3", "--seed", "11")
ROOT = Path(__file__).parents[2]


def test_a_short_run_loses_nothing(tmp_path: Path) -> None:
    """Jobs are sent while faults are done, the verdict is clean, and the figures say so."""
    figures = tmp_path / "figures.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.driver", *OPTIONS, "--json", str(figures)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (run,) = map(json.loads, figures.read_text().splitlines())
    assert run["faults_done"] >= 2
    assert run["jobs"]["acknowledged"] >= 15
    assert {run[name] for name in ("lost", "duplicated", "unexpected", "texts_that_differ", "violations")} == {0}
