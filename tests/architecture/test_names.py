"""Names of test files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_files_share_a_name() -> None:
    """Without packages, pytest imports a test file by its bare name: the second of two is refused."""
    names = Counter(path.name for path in TESTS.glob("*/test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
