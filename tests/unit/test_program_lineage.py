"""What a key allows a Program to ask for, who descends from whom, and how steps are counted."""

from __future__ import annotations

import pytest

from pool.errors import InvalidRequest
from pool.program_settings import CANONICAL_KEY
from pool.rules.programs.claims import Hints, check_limits
from pool.rules.programs.lineage import MAX_DEPTH, ancestors, step_of
from pool.rules.programs.metadata import MAX_WHOLE

# --- limits of a key


def test_hints_within_a_keys_limits() -> None:
    """What the key's line allows, and everything where it says nothing."""
    check_limits(Hints(priority=2**31 - 1, deadline_seconds=0.0), max_priority=None, min_deadline_seconds=None)
    check_limits(Hints(priority=5, deadline_seconds=2.0), max_priority=5, min_deadline_seconds=2.0)
    check_limits(Hints(), max_priority=0, min_deadline_seconds=2.0)


def test_hints_beyond_a_keys_limits_are_refused() -> None:
    """The field and the limit are named."""
    with pytest.raises(InvalidRequest, match="priority of at most 5") as refused:
        check_limits(Hints(priority=6), max_priority=5, min_deadline_seconds=None)
    assert refused.value.param == f"{CANONICAL_KEY}.priority"
    with pytest.raises(InvalidRequest, match=r"deadline of at least 1\.5 seconds") as refused:
        check_limits(Hints(deadline_seconds=1.4), max_priority=None, min_deadline_seconds=1.5)
    assert refused.value.param == f"{CANONICAL_KEY}.deadline_seconds"


# --- lineage and steps


def test_ancestors_nearest_first() -> None:
    """Up to the root, whose parent nobody knows."""
    parents = {"c": "b", "b": "a"}
    assert ancestors("d", "c", parents.get) == ("c", "b", "a")
    assert ancestors("d", None, parents.get) == ()


@pytest.mark.parametrize("parent", ["p", "child", "grandchild"])
def test_nobody_is_his_own_ancestor(parent: str) -> None:
    """Also when it is a descendant that is named; what was known of the Program's own parent does not matter."""
    parents = {"grandchild": "child", "child": "p", "p": "old"}
    with pytest.raises(InvalidRequest, match="own ancestor") as refused:
        ancestors("p", parent, parents.get)
    assert refused.value.param == "parent_program_id"


def test_trees_have_a_greatest_depth() -> None:
    """The walk ends, also over a circle that should not be there."""
    parents = {str(level): str(level - 1) for level in range(1, MAX_DEPTH + 1)}
    assert len(ancestors("new", str(MAX_DEPTH - 1), parents.get)) == MAX_DEPTH
    with pytest.raises(InvalidRequest, match=f"at most {MAX_DEPTH} levels"):
        ancestors("new", str(MAX_DEPTH), parents.get)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_DEPTH} levels"):
        ancestors("new", "x", {"x": "y", "y": "x"}.get)


@pytest.mark.parametrize(
    ("given_step", "previous", "step"),
    [(None, None, 0), (None, 0, 1), (None, 7, 8), (3, 7, 3), (0, None, 0), (None, MAX_WHOLE, MAX_WHOLE)],
)
def test_steps_count_on(given_step: int | None, previous: int | None, step: int) -> None:
    """The first omitted one is 0, a later one follows the previous; what is given is taken."""
    assert step_of(given_step, previous) == step
