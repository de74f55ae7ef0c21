"""Admission: budgets that are checked, and decisions in a fixed order, with their numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from pool.errors import ConfigurationError
from pool.rules.admission import Budgets, Reason, Request, Usage, decide, peak_positions
from pool.settings import ModelSettings

MIB = 2**20
FREE = Usage(slots=4, in_flight=0, ahead=0, queued=0, kv_positions=100)


def test_defaults() -> None:
    """A rank that is told nothing has these bounds."""
    assert Budgets() == Budgets(0, 64 * MIB, MIB, 16 * MIB, 8, 64, 8, 512, 1.0)


@pytest.mark.parametrize(
    ("field", "least"),
    [
        ("weight_bytes", 0),
        ("max_queue_depth", 0),
        ("kv_budget_bytes", 1),
        ("scratch_bytes_per_session", 1),
        ("scratch_budget_bytes", 1),
        ("max_active_sessions", 1),
        ("max_batch_size", 1),
        ("max_prefill_tokens_per_tick", 1),
    ],
)
def test_whole_numbers_within_their_bounds(field: str, least: int) -> None:
    """The least is taken; below it, a fraction, a boolean and a text are refused, and the error names the field."""
    assert getattr(Budgets(**{field: least}), field) == least
    wrong: list[Any] = [least - 1, 1.5, True, "8"]
    for value in wrong:
        with pytest.raises(ConfigurationError, match=rf"^{field}: must be a whole number >= {least}") as refused:
            Budgets(**{field: value})
        assert refused.value.param == field


@pytest.mark.parametrize("value", [0.99, float("nan"), float("inf"), True, "2"])
def test_overcommit_is_a_number_from_one_on(value: Any) -> None:
    """Less than all that is there cannot be promised, nor more than any number."""
    with pytest.raises(ConfigurationError, match=r"^kv_overcommit") as refused:
        Budgets(kv_overcommit=value)
    assert refused.value.param == "kv_overcommit"
    assert Budgets(kv_overcommit=2.5).kv_overcommit == 2.5


def test_budgets_come_from_the_model_settings() -> None:
    """Every field is a setting of the same name and default."""
    assert Budgets.of(ModelSettings(source="random:1")) == Budgets()
    odd = {field.name: 3 + index for index, field in enumerate(fields(Budgets))}
    odd["scratch_budget_bytes"] = 1000
    assert Budgets.of(ModelSettings(source="random:1", **odd)) == Budgets(**odd)


@pytest.mark.parametrize(("most", "budget", "each", "cap"), [(8, 16, 1, 8), (8, 6, 2, 3), (8, 1, 2, 1), (2, 99, 1, 2)])
def test_scratch_bounds_the_active_sessions(most: int, budget: int, each: int, cap: int) -> None:
    """max(1, min(max_active, scratch_budget // scratch_per_session))."""
    budgets = Budgets(max_active_sessions=most, scratch_budget_bytes=budget, scratch_bytes_per_session=each)
    assert budgets.active_cap == cap


def test_a_session_peaks_below_prompt_plus_output() -> None:
    """Prefill emits the first token and the last one is never fed back: 3 + 5 tokens need 7 positions, 3 + 1 need 3."""
    assert peak_positions(3, 5) == 7
    assert peak_positions(3, 1) == 3


@pytest.mark.parametrize(
    ("request_", "budgets", "usage", "reason"),
    [
        (Request(" ", 3, 5), {}, {}, Reason.INVALID),
        (Request("a", 0, 5), {}, {}, Reason.INVALID),
        (Request("a", 3, 0), {}, {}, Reason.INVALID),
        (Request("a", 3, 5, 0), {}, {}, Reason.INVALID),
        (Request("a", 3, 5, 1, -1), {}, {}, Reason.INVALID),
        (Request("a", 3, 5, 1, True), {}, {}, Reason.INVALID),
        (Request("a", 3, 5), {}, {"is_known": True}, Reason.DUPLICATE),
        (Request("a", 96, 5), {}, {}, Reason.ADMITTED),
        (Request("a", 96, 6), {}, {}, Reason.KV_BUDGET),
        (Request("a", 3, 5), {"scratch_bytes_per_session": 17 * MIB}, {}, Reason.SCRATCH_BUDGET),
        (Request("a", 3, 5), {}, {"in_flight": 3}, Reason.ADMITTED),
        (Request("a", 3, 5), {}, {"in_flight": 4}, Reason.QUEUED),
        (Request("a", 3, 5), {}, {"in_flight": 1, "ahead": 1}, Reason.QUEUED),
        (Request("a", 3, 5), {}, {"in_flight": 4, "queued": 63}, Reason.QUEUED),
        (Request("a", 3, 5), {}, {"in_flight": 4, "queued": 64}, Reason.QUEUE_FULL),
        (Request("a", 3, 5, 2), {}, {"in_flight": 4, "queued": 63}, Reason.QUEUE_FULL),
        (Request("a", 3, 5), {"max_queue_depth": 0}, {"in_flight": 3}, Reason.ADMITTED),
        (Request("a", 3, 5), {"max_queue_depth": 0}, {"in_flight": 4}, Reason.QUEUE_FULL),
        (Request("a", 3, 5, 9), {"max_queue_depth": 0}, {"in_flight": 3}, Reason.ADMITTED),
    ],
)
def test_the_reason(request_: Request, budgets: dict[str, Any], usage: dict[str, Any], reason: Reason) -> None:
    """One bound each, at the bound and one beyond it."""
    decision = decide(request_, Budgets(**budgets), replace(FREE, **usage))
    assert (decision.session, decision.reason) == (request_.session, reason)
    assert decision.accepted == (reason in ("admitted", "queued"))


def test_the_order_of_the_checks() -> None:
    """A request at fault in every way is refused for the first; put right one by one, for the next."""
    budgets = Budgets(max_queue_depth=0, scratch_bytes_per_session=17 * MIB)
    usage = replace(FREE, is_known=True, in_flight=4)
    reasons = [decide(Request("", 999, 5), budgets, usage).reason, decide(Request("a", 999, 5), budgets, usage).reason]
    usage = replace(usage, is_known=False)
    reasons += [decide(Request("a", 999, 5), budgets, usage).reason, decide(Request("a", 9, 5), budgets, usage).reason]
    reasons += [decide(Request("a", 9, 5), Budgets(max_queue_depth=0), usage).reason]
    assert [str(reason) for reason in reasons] == [
        "rejected-invalid",
        "rejected-duplicate",
        "rejected-kv-budget",
        "rejected-scratch-budget",
        "rejected-queue-full",
    ]


def test_the_detail_holds_the_numbers() -> None:
    """Whoever reads it knows which bound to raise."""
    assert "104 tokens" in decide(Request("a", 100, 5), Budgets(), FREE).detail
    assert "holds 100" in decide(Request("a", 100, 5), Budgets(), FREE).detail
    full = decide(Request("a", 3, 5, 2), Budgets(max_queue_depth=7), replace(FREE, in_flight=4, queued=6))
    assert "6 sessions are queued and 2 more were asked for, but only 7 may be" in full.detail
