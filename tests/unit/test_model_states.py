"""The state of a model, from what is wanted and what its ranks do."""

from __future__ import annotations

from typing import get_args

import pytest

from pool.rules import model_states
from pool.rules.model_states import DRAINING, FAILED, LOADED, LOADING, UNLOADED, UNLOADING, WAITING, state_of

STATES = [
    # unloads, is_unloaded, is_asked, has_failed, ranks, state
    ((True, False, False, False), [LOADED], UNLOADING),
    ((True, False, False, False), [], UNLOADING),
    ((True, True, False, False), [UNLOADED], UNLOADED),
    ((True, True, False, False), [], UNLOADED),
    ((False, False, False, False), [], UNLOADED),
    ((False, False, True, False), [], UNLOADED),
    ((False, False, False, False), [LOADING], LOADING),
    ((False, False, False, False), [FAILED, LOADING], LOADING),
    ((False, False, True, False), [UNLOADED], LOADING),
    ((False, False, True, False), [FAILED], LOADING),
    ((False, False, False, False), [FAILED, LOADED, WAITING], LOADED),
    ((False, False, True, True), [FAILED, LOADED], LOADED),
    ((False, False, True, True), [FAILED, FAILED], FAILED),
    ((False, False, True, True), [], FAILED),
    ((False, False, False, False), [FAILED], FAILED),
    ((False, False, False, False), [DRAINING], LOADING),
]


@pytest.mark.parametrize(("wanted", "ranks", "state"), STATES)
def test_states(wanted: tuple[bool, bool, bool, bool], ranks: list[str], state: str) -> None:
    """One loaded rank is enough; a rank that failed, or is unloaded, may not have heard of a new try."""
    unloads, is_unloaded, is_asked, has_failed = wanted
    found = state_of(unloads=unloads, is_unloaded=is_unloaded, is_asked=is_asked, has_failed=has_failed, ranks=ranks)
    assert found == state


def test_types_name_every_state() -> None:
    """What a schema lists of models and ranks is what they may be."""
    assert get_args(model_states.ModelState) == model_states.STATES
    assert set(get_args(model_states.RankState)) == {*model_states.RANK_STATES, model_states.STOPPED}
