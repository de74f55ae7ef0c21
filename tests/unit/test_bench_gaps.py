"""What the benchmark of gaps counts as one, and the picture it draws."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmarks.gap_plot import svg
from benchmarks.itl import NEWCOMER, Run, Sink
from tasks.ports import Failed, Finished, Tokens


def test_the_longest_gap_lies_where_the_prompt_was_prefilled() -> None:
    """One that ended before the prompt came, or began after the newcomer's first token, does not count; one that began
    before the arrival, or ended with that token, does."""
    gaps = [(-0.5, 9000.0), (0.1, 300.0), (1.0, 900.0), (2.0, 700.0), (9.0, 5000.0)]
    assert Run(gaps, until_s=2.0, tokens={}).longest_ms == 900.0
    assert Run(gaps, until_s=4.5, tokens={}).longest_ms == 5000.0
    assert Run(gaps[:3], until_s=0.05, tokens={}).sample()["p50 gap before ms"] == 9000.0


def test_a_run_that_fails_is_no_result() -> None:
    """By what the engine said; an end is noted."""
    sink = Sink()
    sink.deliver([Tokens("a", 1, 0, (5, 6), "x"), Finished(NEWCOMER, 1, (), 3, 0)])
    sink.await_tokens(["a"], 2)
    assert (sink.tokens["a"], len(sink.times_s["a"]), sink.ended) == ([5, 6], 2, {NEWCOMER})
    sink.deliver([Failed("a", 1, "engine_error", "The engine failed.")])
    with pytest.raises(RuntimeError, match=r"The engine failed\."):
        sink.await_tokens(["a"], 2)


def test_the_picture_has_a_point_for_each_gap() -> None:
    """On a scale of decades that holds them all, earlier ones further left, longer ones higher up."""
    picture = ElementTree.fromstring(svg("gaps", {"one": [(-1.0, 12.0), (2.0, 800.0)], "two": [(0.5, 12.0)]}))
    points = [(float(each.get("cx", "")), float(each.get("cy", ""))) for each in picture.iter() if "r" in each.attrib]
    (early, low), (late, high), (middle, same) = points
    assert early < middle < late
    assert high < low == same
    texts = [each.text for each in picture.iter() if each.text and each.text.strip()]
    assert {"one", "two", "10 ms", "1000 ms", "0", "2"} <= set(texts)
    with pytest.raises(ValueError, match="no gaps"):
        svg("gaps", {"one": []})
