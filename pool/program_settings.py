"""`[programs]`: scheduling of whole agents. What may be configured, in which range, with which default.

`token_capacity_per_dp_rank` and the two cost models belong to a model on a kind of machine: `[programs.models.NAME]`
overrides them for one model, field by field.
"""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import Field, model_validator

from pool.sections import Section
from pool.settings import ModelName

SectionT = TypeVar("SectionT", bound=Section)

CANONICAL_KEY = "vllm_xargs.agentic_context"
#: Names of before, by the field of now: accepted in files and variables, never printed.
OLDER_NAMES = {"token_capacity_per_target": "token_capacity_per_dp_rank"}


def _with_todays_names(data: Any) -> Any:
    """Raw settings with their older names replaced. Raises ValueError where both are given."""
    if not isinstance(data, dict):
        return data
    for older, name in OLDER_NAMES.items():
        if older in data and name in data:
            raise ValueError(f"{older} is the older name of {name}: give one of them")
    return {OLDER_NAMES.get(name, name): value for name, value in data.items()}


class PrefillCostModel(Section):
    """Seconds of a cold prefill of x thousand uncached tokens: intercept + linear x + quadratic x^2."""

    intercept_seconds: float = Field(
        default=0.06600061907132926, ge=0, description="Fixed part of the estimated cost of a cold prefill."
    )
    linear_seconds_per_1k_tokens: float = Field(
        default=0.05702024012166613, ge=0, description="Cost of each 1,000 uncached prompt tokens."
    )
    quadratic_seconds_per_1k_tokens_squared: float = Field(
        default=0.0044057347937978475, ge=0, description="Cost that grows with the square of 1,000 uncached tokens."
    )
    decode_throughput_alpha: float = Field(
        default=0.15,
        ge=0,
        le=1,
        description="Part of the decode throughput that is left while a prefill shares the batch. Lower: a cache miss "
        "counts as more expensive.",
    )


class DecodeThroughputModel(Section):
    """Seconds of one decode step of B requests with C tokens of context in all: fixed + per request B + per token C."""

    fixed_step_seconds: float = Field(
        default=0.010635218423115973, gt=0, description="Part of a decode step that does not depend on the batch."
    )
    batch_step_seconds_per_request: float = Field(
        default=0.0004192803698834784, ge=0, description="What each request of the batch adds to a decode step."
    )
    context_step_seconds_per_token: float = Field(
        default=1.420458414996201e-7, ge=0, description="What each token of all contexts adds to a decode step."
    )


class ProgramModelSettings(Section):
    """`[programs.models.NAME]`: what differs for one model; what is absent is as in `[programs]`."""

    token_capacity_per_dp_rank: int | None = Field(
        default=None, ge=1, description="As in `[programs]`, for this model."
    )
    prefill_cost_model: PrefillCostModel | None = Field(default=None, description="As in `[programs]`, for this model.")
    decode_throughput_model: DecodeThroughputModel | None = Field(
        default=None, description="As in `[programs]`, for this model."
    )

    _older_names = model_validator(mode="before")(_with_todays_names)


class ProgramSettings(Section):
    """`[programs]`. With `enabled` false any other field given is an error: nothing here would have an effect."""

    enabled: bool = Field(
        default=False, description="Whether Programs are scheduled. Requests without Program metadata never notice."
    )
    program_scheduling_enable_key: Literal["vllm_xargs.agentic_context", "auto"] = Field(
        default="vllm_xargs.agentic_context",
        description="Which requests belong to a Program: those with the canonical body object, or (`auto`) also those "
        "with `agent_hint` or the headers of known agents.",
    )
    binding_only: bool = Field(
        default=False,
        description="Only bind Programs to ranks: no admission, no TTL, no pause, no resume. For comparison.",
    )
    global_queue: bool = Field(
        default=False,
        description="Whether a paused Program may resume on another rank than its last, where that has the room.",
    )
    resume_order: Literal["mru", "fcfs"] = Field(
        default="mru",
        description="Which paused Program of a rank resumes first among equals: the one that finished last, or the one "
        "that has waited longest.",
    )
    cross_rank_headroom_ratio: float = Field(
        default=1.2,
        ge=0,
        description="A rank takes another's Program only with as much free room as that one has, and this many times "
        "the Program's context besides.",
    )
    binding_strategy: Literal[
        "consistent_hash", "program_round_robin", "least_program_count", "reasoning_token_balance", "cache_aware"
    ] = Field(default="consistent_hash", description="How the first rank of a Program is chosen.")
    hash_virtual_nodes: int = Field(
        default=160, ge=1, le=4096, description="Points of each rank on the ring of `consistent_hash`."
    )
    token_capacity_per_dp_rank: int | None = Field(
        default=None,
        ge=1,
        description="KV tokens of one rank that Programs may own. Unset: their number alone is bounded.",
    )
    max_active_programs_per_target: int = Field(
        default=64, ge=1, description="Active Programs of one rank; only a forced resume may exceed it."
    )
    metrics_interval_seconds: float = Field(
        default=1.0, gt=0, le=60, description="How often ranks are observed and scheduling runs without an event."
    )
    admission_waiting_request_threshold: int = Field(
        default=1, ge=0, description="A rank with this many waiting requests of its own admits nobody. 0: no such gate."
    )
    queue_timeout_seconds: float = Field(
        default=600.0, gt=0, le=604_800, description="Longest a request waits for its Program to be active."
    )
    force_resume_timeout_seconds: float = Field(
        default=300.0, gt=0, le=604_800, description="Latest time after which a waiting Program resumes by force."
    )
    paused_retention_ttl_seconds: float = Field(
        default=1800.0, gt=0, le=2_592_000, description="An idle paused Program is forgotten after this time."
    )
    shared_prefix_freshness_warmup_seconds: float = Field(
        default=100.0,
        ge=0,
        le=2_592_000,
        description="How long an observed shared prefix counts while the statistics cannot say it.",
    )
    shared_prefix_freshness_kv_turnovers: float = Field(
        default=2.0, gt=0, description="How often a rank's whole KV is replaced before an observed prefix is stale."
    )
    decode_buffer_tokens: int = Field(
        default=100, ge=0, description="Output tokens reserved for a request that does not say how many it expects."
    )
    on_pause: Literal["drop", "offload"] = Field(
        default="drop",
        description="What becomes of the KV of a Program that is paused: it is given up, or moved to memory or disk "
        "(`offload_memory_bytes`, `offload_disk_bytes` of its model) and put back where that costs less than "
        "`prefill_cost_model` says of computing it again.",
    )
    log_level: Literal["debug", "info", "warning"] = Field(
        default="info",
        description="How much the log tells of Programs: `debug` also each of their requests and each look at a rank.",
    )
    max_acting_ttl_seconds: float = Field(
        default=10.0,
        ge=0,
        le=604_800,
        description="Longest the place of a Program between two requests is kept automatically.",
    )
    place_cost: Literal["share", "rank"] = Field(
        default="share",
        description="What a second costs for which a Program between two requests keeps its place automatically: the "
        "`share` of its rank that the place takes, as the rank serves others meanwhile; or the whole `rank`, which is "
        "the published formula.",
    )
    max_kv_retention_ttl_seconds: float = Field(
        default=300.0,
        ge=0,
        le=604_800,
        description="Longest `kv_retention_ttl_seconds` of a request; more counts as this.",
    )
    high_watermark_ratio: float = Field(
        default=1.0, gt=0, le=1, description="Part of the capacity above which Programs are paused."
    )
    low_watermark_ratio: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Part of the capacity up to which Programs are admitted, or paused down to.",
    )
    max_segment_rounds: int = Field(
        default=14, ge=1, description="Requests in a row after which an idle Program yields to one that waits."
    )
    stats_window_size: int = Field(
        default=100,
        ge=1,
        le=10_000,
        description="Samples of a rank before its statistics count, and of which they are.",
    )
    enable_batch_gain_admission: bool = Field(
        default=True,
        description="Whether a larger batch's gain may outweigh the room reserved for the growth of those that run.",
    )
    rank_gone_seconds: float = Field(
        default=60.0, gt=0, le=86400, description="A rank away this long leaves the ring; its Programs are bound anew."
    )
    prefill_cost_model: PrefillCostModel = Field(
        default_factory=PrefillCostModel, description="Cost of computing a prompt that is not cached."
    )
    decode_throughput_model: DecodeThroughputModel = Field(
        default_factory=DecodeThroughputModel, description="Throughput of decoding by batch and context."
    )
    models: dict[ModelName, ProgramModelSettings] = Field(
        default_factory=dict, description="What differs for single models."
    )

    _older_names = model_validator(mode="before")(_with_todays_names)

    @model_validator(mode="after")
    def _consistent(self) -> ProgramSettings:
        if not self.enabled and self.model_fields_set - {"enabled"}:
            raise ValueError("enabled must be true where other fields of [programs] are given")
        if self.high_watermark_ratio < self.low_watermark_ratio:
            raise ValueError("high_watermark_ratio must be at least low_watermark_ratio")
        if self.binding_strategy == "reasoning_token_balance" and self.token_capacity_per_dp_rank is None:
            raise ValueError("binding_strategy reasoning_token_balance needs token_capacity_per_dp_rank")
        return self

    def of_model(self, model: str) -> ProgramSettings:
        """The settings as they hold for `model`: of a cost model, too, what it does not say is as in `[programs]`."""
        own = self.models.get(model)
        return self if own is None else _over(self, own)


def _over(base: SectionT, own: Section) -> SectionT:
    """`base` with what `own` says."""
    said = {name: getattr(own, name) for name in own.model_fields_set if getattr(own, name) is not None}
    nested = {name: _over(getattr(base, name), value) for name, value in said.items() if isinstance(value, Section)}
    return base.model_copy(update=said | nested)
