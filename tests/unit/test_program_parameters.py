"""What each parameter of `[programs]` changes: one scene, two values, two outcomes. A parameter that is ignored, or
read in another's place, fails here. Those that need a state server are in `store/test_program_effects.py`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pool.program_settings import DecodeThroughputModel, PrefillCostModel, ProgramSettings
from pool.rules.programs.admission import Decision, Reason, decide, standing_of
from pool.rules.programs.capacity import usage
from pool.rules.programs.cross_rank import Gate, plan_relocations, relocate, standing_as_destination
from pool.rules.programs.facts import CapacitySource, Means, Observation, Program, Rank
from pool.rules.programs.force import force_ms, give_up_ms
from pool.rules.programs.identity import claim_of
from pool.rules.programs.order import ordered
from pool.rules.programs.repair import plan_repair
from pool.rules.programs.resume import yields
from pool.rules.programs.tokens import shared_prefix_freshness_seconds
from pool.rules.programs.ttl import (
    acting_ttl_seconds,
    cache_miss_impact_seconds,
    decode_throughput,
    place_share,
    prefill_seconds,
    reference_calibration,
    retention,
)
from pool.rules.programs.windows import target_rounds
from tests.unit.program_snapshots import NOW_MS, WARM, idle, rank, running, settings, waiting

#: Full windows of tools that take 2 s.
QUICK = Means(continuity_full=True, intervals_s=(2.0,) * 4)


def decided(candidate: Program, shown: Rank, given: ProgramSettings) -> Decision:
    """The candidate alone, on the rank as it is."""
    return decide(candidate, shown, standing_of(shown, given, NOW_MS), given, NOW_MS)


def effects(name: str, values: tuple[Any, ...], scene: Any, **fixed: Any) -> list[Any]:
    """What the scene shows under each value."""
    return [scene(settings(**fixed, **{name: value})) for value in values]


# --- who belongs to a Program, and where it begins


def test_enabled_turns_the_warning_of_reference_figures_on() -> None:
    """Off, nothing is scheduled, so nobody is warned."""
    found = [reference_calibration(ProgramSettings(enabled=on)) for on in (False, True)]
    assert [warning is not None for warning in found] == [False, True]


def test_program_scheduling_enable_key_says_who_opts_in() -> None:
    """Headers alone make a Program under `auto`; the canonical object under both."""
    canonical = {"vllm_xargs": {"agentic_context": {"program_id": "p"}}}

    def opted(given: ProgramSettings) -> list[bool]:
        key = given.program_scheduling_enable_key
        return [claim_of({}, {"x-session-id": "s"}, key) is not None, claim_of(canonical, {}, key) is not None]

    values = ("vllm_xargs.agentic_context", "auto")
    assert effects("program_scheduling_enable_key", values, opted) == [[False, True], [True, True]]


# --- admission


def test_max_active_programs_per_target_bounds_their_number() -> None:
    """The third of three."""

    def third(given: ProgramSettings) -> Reason:
        return decided(waiting("c"), rank(running("a"), running("b")), given).reason

    assert effects("max_active_programs_per_target", (2, 3), third) == [Reason.ACTIVE_PROGRAMS, Reason.FITS]


def test_admission_waiting_request_threshold_is_the_gate() -> None:
    """Two requests wait in the engine."""
    crowd = rank(observation=Observation(NOW_MS - 1, tokens=0, waiting=2))

    def candidate(given: ProgramSettings) -> Reason:
        return decided(waiting("c"), crowd, given).reason

    found = effects("admission_waiting_request_threshold", (2, 3, 0), candidate)
    assert found == [Reason.ENGINE_WAITING, Reason.FITS, Reason.FITS]


def test_decode_buffer_tokens_are_reserved_for_output() -> None:
    """Where the request gives no hint."""

    def required(given: ProgramSettings) -> int:
        return decided(waiting("c", 200), rank(), given).required_tokens

    assert effects("decode_buffer_tokens", (0, 100), required) == [200, 300]


def test_low_watermark_ratio_ends_admission() -> None:
    """At 900 of 1,000 tokens."""

    def candidate(given: ProgramSettings) -> Reason:
        return decided(waiting("c", 100), rank(running("a", 800)), given).reason

    assert effects("low_watermark_ratio", (0.89, 0.9), candidate) == [Reason.WATERMARK, Reason.FITS]


def test_enable_batch_gain_admission_may_outweigh_the_reserve() -> None:
    """Decoding takes so long that one more in the batch is worth it."""
    busy = rank(running("a", 900, rounds=9), means=replace(WARM, decode_s=60.0))

    def candidate(given: ProgramSettings) -> Reason:
        return decided(waiting("c", 80), busy, given).reason

    found = effects("enable_batch_gain_admission", (False, True), candidate)
    assert found == [Reason.GROWTH_RESERVE, Reason.BATCH_GAIN]


def test_max_segment_rounds_caps_the_protected_rounds_and_ends_a_segment() -> None:
    """Windows that say 4 rounds protect 3 at most; a Program of 3 rounds yields."""
    full = [running("a", 600), waiting("w", 300)]
    done = idle("d", 400, rounds=3)

    def segment(given: ProgramSettings) -> tuple[int, bool]:
        target = target_rounds(WARM, given.max_segment_rounds)
        return target, yields(done, rank(done, *full), given, NOW_MS)

    assert effects("max_segment_rounds", (3, 14), segment) == [(3, True), (4, False)]


# --- order, force, another rank


def test_resume_order_ranks_equals() -> None:
    """The one that finished last, or the one that has waited longest."""
    programs = [
        waiting("old", waited_ms=5000, last_finish_ms=NOW_MS - 9000),
        waiting("new", waited_ms=1000, last_finish_ms=NOW_MS - 2000),
    ]

    def first(given: ProgramSettings) -> str:
        return ordered(programs, given, NOW_MS)[0].id

    assert effects("resume_order", ("mru", "fcfs"), first) == ["new", "old"]


def test_queue_timeout_seconds_bounds_every_wait() -> None:
    """The request's, and with it the force wait."""

    def waits(given: ProgramSettings) -> tuple[int, int]:
        return give_up_ms(given, 0), force_ms(rank(), given, 0, ahead=0)

    assert effects("queue_timeout_seconds", (100.0, 600.0), waits) == [(100_000, 100_000), (600_000, 300_000)]


def test_force_resume_timeout_seconds_bounds_the_force_wait() -> None:
    """Where no figure says less."""

    def forced(given: ProgramSettings) -> int:
        return force_ms(rank(), given, 0, ahead=3)

    assert effects("force_resume_timeout_seconds", (40.0, 300.0), forced) == [40_000, 300_000]


MOVED = waiting("moved", 100, waited_ms=5000, was_active=True)
SOURCE = rank(
    running("a", 950), waiting("first", 10, waited_ms=9000, was_active=True, last_finish_ms=NOW_MS), MOVED, means=WARM
)
OTHER = rank(running("b", 700), id="s", means=WARM)


def relocated(given: ProgramSettings) -> Decision | Gate:
    """The Program that moves, or why it stays."""
    ranks = {"r": SOURCE, "s": OTHER}
    standings = {name: standing_as_destination(each, given, NOW_MS, WARM) for name, each in ranks.items()}
    return relocate(MOVED, ranks, standings, given, NOW_MS)


def test_global_queue_lets_programs_move() -> None:
    """Else each stays with its last rank."""

    def planned(given: ProgramSettings) -> list[str]:
        return [move.decision.rank for move in plan_relocations([SOURCE, OTHER], given, NOW_MS, WARM, limit=8)]

    assert effects("global_queue", (False, True), planned, enable_batch_gain_admission=False) == [[], ["s"]]


def test_cross_rank_headroom_ratio_is_the_room_a_move_needs() -> None:
    """300 are free there and 50 here, for a context of 100."""

    def moves(given: ProgramSettings) -> bool:
        return isinstance(relocated(given), Decision)

    fixed = {"global_queue": True, "enable_batch_gain_admission": False}
    assert effects("cross_rank_headroom_ratio", (2.5, 2.6), moves, **fixed) == [True, False]


def test_metrics_interval_seconds_is_what_freshness_and_residence_go_by() -> None:
    """An observation of 2.5 s ago is fresh for three intervals of a second; a move waits for one interval of 6 s."""
    seen = rank(observation=Observation(NOW_MS - 2500, tokens=10))

    def by_interval(given: ProgramSettings) -> tuple[CapacitySource, bool]:
        return usage(seen, given, NOW_MS).source, relocated(given) is Gate.TOO_SOON

    fixed = {"global_queue": True, "enable_batch_gain_admission": False}
    assert effects("metrics_interval_seconds", (0.5, 1.0, 6.0), by_interval, **fixed) == [
        (CapacitySource.STALE, False),
        (CapacitySource.OBSERVATION, False),
        (CapacitySource.OBSERVATION, True),
    ]


# --- repair


def test_high_watermark_ratio_begins_a_repair() -> None:
    """At 950 of 1,000 tokens."""
    full = rank(idle("a", 450), idle("b", 500))

    def pauses(given: ProgramSettings) -> int:
        return len(plan_repair(full, given, NOW_MS).pauses)

    assert effects("high_watermark_ratio", (0.94, 0.95), pauses, low_watermark_ratio=0.5) == [1, 0]


def test_low_watermark_ratio_ends_a_repair() -> None:
    """One of three is enough for 0.7, two for 0.4."""
    full = rank(idle("a", 333), idle("b", 333), idle("c", 333))

    def pauses(given: ProgramSettings) -> int:
        return len(plan_repair(full, given, NOW_MS).pauses)

    assert effects("low_watermark_ratio", (0.7, 0.4), pauses, high_watermark_ratio=0.9) == [1, 2]


# --- shared prefixes and TTLs


def test_shared_prefix_freshness_warmup_seconds_hold_while_the_window_is_cold() -> None:
    """And only then."""

    def fresh(given: ProgramSettings) -> list[float]:
        mature = Means(full=True, end_to_end_s=2.0, uncached_tokens=100.0)
        return [
            shared_prefix_freshness_seconds(given, means, capacity_tokens=10_000, reasoning=4)
            for means in (Means(), mature)
        ]

    found = effects("shared_prefix_freshness_warmup_seconds", (77.0, 100.0), fresh)
    assert found == [[77.0, 100.0], [100.0, 100.0]]


def test_shared_prefix_freshness_kv_turnovers_scale_the_freshness() -> None:
    """A turnover takes 50 s."""

    def fresh(given: ProgramSettings) -> float:
        mature = Means(full=True, end_to_end_s=2.0, uncached_tokens=100.0)
        return shared_prefix_freshness_seconds(given, mature, capacity_tokens=10_000, reasoning=4)

    assert effects("shared_prefix_freshness_kv_turnovers", (2.0, 3.0), fresh) == [100.0, 150.0]


def test_max_acting_ttl_seconds_caps_the_automatic_ttl() -> None:
    """Tools of 2 s are waited for where that is allowed; 1 s would be for nothing."""

    def ttl(given: ProgramSettings) -> float:
        return acting_ttl_seconds(given, QUICK, miss_impact_s=20.0)

    assert effects("max_acting_ttl_seconds", (1.0, 3.0, 10.0), ttl) == [0.0, 3.0, 10.0]


def test_place_cost_is_what_a_second_of_a_place_costs() -> None:
    """A place of 250 of 1,000 tokens, or of one of four Programs: a quarter of its rank, or all of it."""
    bounds: list[dict[str, int | None]] = [
        {"token_capacity_per_dp_rank": 1000, "max_active_programs_per_target": 64},
        {"token_capacity_per_dp_rank": 1000, "max_active_programs_per_target": 2},
        {"token_capacity_per_dp_rank": None, "max_active_programs_per_target": 4},
        {"token_capacity_per_dp_rank": 100, "max_active_programs_per_target": 64},
    ]

    def shares(given: ProgramSettings) -> list[float]:
        return [place_share(given.model_copy(update=bound), 250) for bound in bounds]

    assert effects("place_cost", ("share", "rank"), shares) == [[0.25, 0.5, 0.25, 1.0], [1.0] * 4]


def test_max_kv_retention_ttl_seconds_caps_a_hint() -> None:
    """A request asks for 400 s."""

    def kept(given: ProgramSettings) -> float:
        return retention(given, Means(), 1.0, 400.0).ttl_s

    assert effects("max_kv_retention_ttl_seconds", (300.0, 500.0), kept) == [300.0, 400.0]


# --- the cost models


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("intercept_seconds", 3.0),
        ("linear_seconds_per_1k_tokens", 6.0),
        ("quadratic_seconds_per_1k_tokens_squared", 12.0),
    ],
)
def test_each_prefill_coefficient_counts_in_its_power(name: str, seconds: float) -> None:
    """2,000 tokens with this one at 3 and the others at 0."""
    nothing = dict.fromkeys(PrefillCostModel.model_fields, 0.0)
    assert prefill_seconds(PrefillCostModel(**nothing | {name: 3.0}), 2000) == seconds


def test_prefill_costs_bound_the_ttl_and_the_batch_gain() -> None:
    """Nothing is waited for that costs nothing, and nothing that costs much is admitted for a little gain."""
    busy = rank(running("a", 900, rounds=9), means=replace(WARM, decode_s=60.0))

    def dear(given: ProgramSettings) -> tuple[float, Reason]:
        miss_s = cache_miss_impact_seconds(given.prefill_cost_model, 80)
        return acting_ttl_seconds(given, QUICK, miss_s), decided(waiting("c", 80), busy, given).reason

    free = PrefillCostModel(
        intercept_seconds=0, linear_seconds_per_1k_tokens=0, quadratic_seconds_per_1k_tokens_squared=0
    )
    values = (free, PrefillCostModel(intercept_seconds=500.0))
    assert effects("prefill_cost_model", values, dear) == [(0.0, Reason.BATCH_GAIN), (10.0, Reason.GROWTH_RESERVE)]


def test_decode_throughput_alpha_lowers_what_a_miss_costs() -> None:
    """A prefill of 10 s costs between 20 and 10."""
    found = [
        cache_miss_impact_seconds(
            PrefillCostModel(
                intercept_seconds=10,
                linear_seconds_per_1k_tokens=0,
                quadratic_seconds_per_1k_tokens_squared=0,
                decode_throughput_alpha=alpha,
            ),
            500,
        )
        for alpha in (0.0, 0.25, 1.0)
    ]
    assert found == [20.0, 17.5, 10.0]


@pytest.mark.parametrize(
    ("name", "tokens_per_s"),
    [
        ("fixed_step_seconds", 2.0),
        ("batch_step_seconds_per_request", 0.5),
        ("context_step_seconds_per_token", 0.02),
    ],
)
def test_each_decode_coefficient_counts_for_its_part_of_a_step(name: str, tokens_per_s: float) -> None:
    """4 requests with 100 tokens of context in sum; with this one at 2 and the others at next to nothing."""
    little = {"fixed_step_seconds": 1e-12, "batch_step_seconds_per_request": 0.0, "context_step_seconds_per_token": 0.0}
    assert decode_throughput(DecodeThroughputModel(**little | {name: 2.0}), 4, 100) == pytest.approx(tokens_per_s)


def test_decode_throughput_model_says_what_a_larger_batch_gains() -> None:
    """All where only the step counts, nothing where each request costs a step of its own."""
    busy = rank(running("a", 900, rounds=9), means=replace(WARM, decode_s=60.0))

    def candidate(given: ProgramSettings) -> Reason:
        return decided(waiting("c", 80), busy, given).reason

    values = (
        DecodeThroughputModel(
            fixed_step_seconds=1.0, batch_step_seconds_per_request=0.0, context_step_seconds_per_token=0.0
        ),
        DecodeThroughputModel(
            fixed_step_seconds=1e-9, batch_step_seconds_per_request=1.0, context_step_seconds_per_token=0.0
        ),
    )
    assert effects("decode_throughput_model", values, candidate) == [Reason.BATCH_GAIN, Reason.GROWTH_RESERVE]


def test_models_differ_where_they_say_so() -> None:
    """One model's coefficients count for it alone."""
    given = ProgramSettings.model_validate(
        {"enabled": True, "models": {"m": {"prefill_cost_model": {"intercept_seconds": 9.0}}}}
    )
    found = [prefill_seconds(given.of_model(name).prefill_cost_model, 1) for name in ("m", "other")]
    assert found == pytest.approx([9.0, 0.066], rel=0.01)
