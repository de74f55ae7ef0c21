"""Greedy output is what it was when it was last looked at."""

from __future__ import annotations

import pytest

from tasks.ports import Engine
from tests.engine import golden


@pytest.mark.parametrize(
    ("engine_name", "source"), [("tiny", "random:7"), ("smollm2", "smollm2-135m-instruct")], indirect=["engine_name"]
)
def test_golden_tokens(engine: Engine, source: str) -> None:
    """Prompts have the same ids, and their greedy output the same tokens, on every machine."""
    assert golden.generate(engine) == golden.load()[source]
