"""`[programs]`: every parameter by name, default and bound; what is refused together; what differs by model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pool.errors import ConfigurationError
from pool.program_settings import DecodeThroughputModel, PrefillCostModel, ProgramSettings
from tasks.config import Configuration, load_configuration

SHIPPED = "smollm2-135m-instruct"
INFINITE = float("inf")

#: Parameter, its default, values at the edge that are accepted, values beyond it that are refused.
PARAMETERS: list[tuple[str, Any, list[Any], list[Any]]] = [
    ("program_scheduling_enable_key", "vllm_xargs.agentic_context", ["auto"], ["agent_hint", "", 1]),
    ("binding_only", False, [True], [1, "true"]),
    ("global_queue", False, [True], [1]),
    ("resume_order", "mru", ["fcfs"], ["lru", "MRU"]),
    ("cross_rank_headroom_ratio", 1.2, [0, 10.5], [-0.1, INFINITE, True]),
    (
        "binding_strategy",
        "consistent_hash",
        ["program_round_robin", "least_program_count", "cache_aware"],
        ["round_robin", "power_of_two"],
    ),
    ("hash_virtual_nodes", 160, [1, 4096], [0, 4097, 1.5]),
    ("token_capacity_per_dp_rank", None, [1, 266_864], [0, 1.5, True]),
    ("max_active_programs_per_target", 64, [1], [0]),
    ("metrics_interval_seconds", 1.0, [0.05, 60], [0, 61, float("nan")]),
    ("admission_waiting_request_threshold", 1, [0, 5], [-1]),
    ("queue_timeout_seconds", 600.0, [0.1], [0, -1, INFINITE]),
    ("force_resume_timeout_seconds", 300.0, [0.1], [0, INFINITE]),
    ("paused_retention_ttl_seconds", 1800.0, [0.1], [0, INFINITE]),
    ("shared_prefix_freshness_warmup_seconds", 100.0, [0], [-1, INFINITE]),
    ("shared_prefix_freshness_kv_turnovers", 2.0, [0.5], [0, INFINITE]),
    ("decode_buffer_tokens", 100, [0], [-1]),
    ("on_pause", "drop", ["offload"], ["retain", ""]),
    ("max_acting_ttl_seconds", 10.0, [0], [-1, INFINITE]),
    ("place_cost", "share", ["rank"], ["none", ""]),
    ("max_kv_retention_ttl_seconds", 300.0, [0], [-1, INFINITE]),
    ("high_watermark_ratio", 1.0, [1.0], [0, 1.1]),
    ("low_watermark_ratio", 1.0, [0.5], [0, 1.1]),
    ("max_segment_rounds", 14, [1], [0]),
    ("stats_window_size", 100, [1], [0]),
    ("enable_batch_gain_admission", True, [False], [0]),
    ("rank_gone_seconds", 60.0, [0.5], [0]),
    ("log_level", "info", ["debug", "warning"], ["DEBUG", 10]),
]

#: Coefficient, its default, accepted edges, refused values.
COEFFICIENTS: list[tuple[type[Any], str, float, list[Any], list[Any]]] = [
    (PrefillCostModel, "intercept_seconds", 0.06600061907132926, [0], [-1e-9, INFINITE]),
    (PrefillCostModel, "linear_seconds_per_1k_tokens", 0.05702024012166613, [0], [-1e-9, INFINITE]),
    (PrefillCostModel, "quadratic_seconds_per_1k_tokens_squared", 0.0044057347937978475, [0], [-1e-9, INFINITE]),
    (PrefillCostModel, "decode_throughput_alpha", 0.15, [0, 1], [-0.01, 1.01, float("nan")]),
    (DecodeThroughputModel, "fixed_step_seconds", 0.010635218423115973, [1e-9], [0, INFINITE]),
    (DecodeThroughputModel, "batch_step_seconds_per_request", 0.0004192803698834784, [0], [-1e-9, INFINITE]),
    (DecodeThroughputModel, "context_step_seconds_per_token", 1.420458414996201e-7, [0], [-1e-12, INFINITE]),
]


@pytest.mark.parametrize(("name", "default", "accepted", "refused"), PARAMETERS, ids=lambda value: str(value)[:40])
def test_every_parameter_has_its_default_and_its_bounds(
    name: str, default: Any, accepted: list[Any], refused: list[Any]
) -> None:
    """Values at the edge are kept as given; beyond it, of another type, or not finite, the error names the field."""
    assert getattr(ProgramSettings(), name) == default
    assert type(getattr(ProgramSettings(), name)) is type(default)
    for value in accepted:
        assert getattr(ProgramSettings.model_validate({"enabled": True, name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=rf"(?m)^{name}$"):
            ProgramSettings.model_validate({"enabled": True, name: value})


@pytest.mark.parametrize(("kind", "name", "default", "accepted", "refused"), COEFFICIENTS)
def test_every_coefficient_has_its_default_and_its_bounds(
    kind: type[Any], name: str, default: float, accepted: list[Any], refused: list[Any]
) -> None:
    """The reference machine's figures, and what physics allows."""
    assert getattr(kind(), name) == default
    for value in accepted:
        assert getattr(kind(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=rf"(?m)^{name}$"):
            kind(**{name: value})


def test_there_are_no_other_parameters() -> None:
    """The tables above are whole, so that each parameter has a test."""
    tested = {name for name, *_ in PARAMETERS}
    assert set(ProgramSettings.model_fields) - tested == {
        "enabled",
        "prefill_cost_model",
        "decode_throughput_model",
        "models",
    }
    for kind in (PrefillCostModel, DecodeThroughputModel):
        assert set(kind.model_fields) == {name for of, name, *_ in COEFFICIENTS if of is kind}


def test_settings_without_the_switch_are_refused() -> None:
    """Whoever sets them believes that Programs are scheduled; also where the value is the default."""
    assert not ProgramSettings().enabled
    assert not ProgramSettings(enabled=False).enabled
    with pytest.raises(ValueError, match="enabled must be true"):
        ProgramSettings(resume_order="mru")
    with pytest.raises(ValueError, match="enabled must be true"):
        ProgramSettings.model_validate({"enabled": False, "token_capacity_per_target": 100})


def test_the_watermarks_keep_their_order() -> None:
    """Repair begins above where admission ends."""
    both = ProgramSettings(enabled=True, high_watermark_ratio=0.9, low_watermark_ratio=0.8)
    assert (both.high_watermark_ratio, both.low_watermark_ratio) == (0.9, 0.8)
    assert ProgramSettings(enabled=True, high_watermark_ratio=0.8, low_watermark_ratio=0.8).low_watermark_ratio == 0.8
    with pytest.raises(ValueError, match="high_watermark_ratio must be at least low_watermark_ratio"):
        ProgramSettings(enabled=True, high_watermark_ratio=0.8)


def test_balance_by_tokens_needs_a_capacity() -> None:
    """Without one there is nothing to balance."""
    with pytest.raises(ValueError, match="needs token_capacity_per_dp_rank"):
        ProgramSettings(enabled=True, binding_strategy="reasoning_token_balance")
    balanced = ProgramSettings(
        enabled=True, binding_strategy="reasoning_token_balance", token_capacity_per_dp_rank=1000
    )
    assert balanced.binding_strategy == "reasoning_token_balance"


def test_the_older_name_is_taken_and_never_shown() -> None:
    """For all of `[programs]` and for one model; both names at once are refused, since one would be ignored."""
    settings = ProgramSettings.model_validate(
        {"enabled": True, "token_capacity_per_target": 7, "models": {"m": {"token_capacity_per_target": 8}}}
    )
    assert settings.token_capacity_per_dp_rank == 7
    assert settings.of_model("m").token_capacity_per_dp_rank == 8
    assert "token_capacity_per_target" not in settings.model_dump_json()
    with pytest.raises(ValueError, match="token_capacity_per_target is the older name of token_capacity_per_dp_rank"):
        ProgramSettings.model_validate(
            {"enabled": True, "token_capacity_per_target": 7, "token_capacity_per_dp_rank": 7}
        )


@pytest.mark.parametrize("value", ["text", 5, ["enabled"]])
def test_a_section_is_a_table(value: Any) -> None:
    """What is no table at all is refused as such."""
    with pytest.raises(ValueError, match="should be a valid dictionary"):
        ProgramSettings.model_validate(value)


def test_a_model_differs_field_by_field() -> None:
    """What `[programs.models.NAME]` does not say is as in `[programs]`, within the cost models too."""
    settings = ProgramSettings.model_validate(
        {
            "enabled": True,
            "token_capacity_per_dp_rank": 1000,
            "prefill_cost_model": {"intercept_seconds": 1.0, "decode_throughput_alpha": 0.5},
            "models": {"m": {"prefill_cost_model": {"intercept_seconds": 2.0}}, "other": {}},
        }
    )
    own = settings.of_model("m")
    assert (own.token_capacity_per_dp_rank, own.prefill_cost_model.intercept_seconds) == (1000, 2.0)
    assert own.prefill_cost_model.decode_throughput_alpha == 0.5
    assert own.decode_throughput_model == settings.decode_throughput_model
    assert settings.of_model("other") == settings.of_model("nobody") == settings


# --- in genpool.toml and in variables


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """load(toml, **variables): the configuration of a file and an environment of its own."""

    def load_from(toml: str = "", **environ: str) -> Configuration:
        file = tmp_path / "genpool.toml"
        file.write_text(toml)
        return load_configuration(file, environ)

    return load_from


def test_files_and_variables_reach_every_depth(load: Any, tmp_path: Path) -> None:
    """Sections within sections, and one model's; each value is printed with its origin, under its name of today."""
    configuration = load(
        f"[programs]\nenabled = true\n[programs.prefill_cost_model]\nintercept_seconds = 0.5\n"
        f"[programs.models.{SHIPPED}]\ntoken_capacity_per_target = 500",
        GENPOOL_PROGRAMS__TOKEN_CAPACITY_PER_TARGET="1000",
        GENPOOL_PROGRAMS__DECODE_THROUGHPUT_MODEL__FIXED_STEP_SECONDS="1e-3",
        GENPOOL_PROGRAMS__MODELS__SMOLLM2_135M_INSTRUCT__PREFILL_COST_MODEL__DECODE_THROUGHPUT_ALPHA="1",
    )
    settings = configuration.settings.programs
    assert (settings.enabled, settings.token_capacity_per_dp_rank) == (True, 1000)
    own = settings.of_model(SHIPPED)
    assert (own.token_capacity_per_dp_rank, own.prefill_cost_model.decode_throughput_alpha) == (500, 1.0)
    assert (own.prefill_cost_model.intercept_seconds, own.decode_throughput_model.fixed_step_seconds) == (0.5, 0.001)
    file = str(tmp_path / "genpool.toml")
    shown = {e.field: (e.value, e.origin) for e in configuration.effective() if e.field.startswith("programs.")}
    assert {field: entry for field, entry in shown.items() if entry[1] != "default"} == {
        "programs.enabled": (True, file),
        "programs.token_capacity_per_dp_rank": (1000, "GENPOOL_PROGRAMS__TOKEN_CAPACITY_PER_TARGET"),
        "programs.prefill_cost_model.intercept_seconds": (0.5, file),
        "programs.decode_throughput_model.fixed_step_seconds": (
            0.001,
            "GENPOOL_PROGRAMS__DECODE_THROUGHPUT_MODEL__FIXED_STEP_SECONDS",
        ),
        f"programs.models.{SHIPPED}.token_capacity_per_dp_rank": (500, file),
        f"programs.models.{SHIPPED}.prefill_cost_model.decode_throughput_alpha": (
            1.0,
            "GENPOOL_PROGRAMS__MODELS__SMOLLM2_135M_INSTRUCT__PREFILL_COST_MODEL__DECODE_THROUGHPUT_ALPHA",
        ),
    }
    # What a model does not say is not printed for it: its value is that of `[programs]`.
    assert [field for field in shown if field.startswith(f"programs.models.{SHIPPED}.")] == [
        f"programs.models.{SHIPPED}.token_capacity_per_dp_rank",
        f"programs.models.{SHIPPED}.prefill_cost_model.decode_throughput_alpha",
    ]


def test_without_a_table_nothing_is_scheduled(load: Any) -> None:
    """Off by default, and every default is printed."""
    configuration = load()
    assert configuration.settings.programs == ProgramSettings()
    shown = {entry.field: entry.value for entry in configuration.effective()}
    assert (shown["programs.enabled"], shown["programs.token_capacity_per_dp_rank"]) == (False, None)
    assert not any(field.startswith("programs.models") for field in shown)


@pytest.mark.parametrize(
    ("toml", "environ", "message"),
    [
        (
            "[programs]\nglobal_queue = true",
            {"GENPOOL_PROGRAMS__STATS_WINDOW_SIZE": "5"},
            "programs (from {file}, GENPOOL_PROGRAMS__STATS_WINDOW_SIZE): enabled must be true where other fields of "
            "[programs] are given",
        ),
        (
            "[programs]\nenabled = true\n[programs.prefill_cost_model]\nintercept = 1",
            {},
            "programs.prefill_cost_model.intercept (from {file}) is no setting. Did you mean intercept_seconds?",
        ),
        (
            f"[programs]\nenabled = true\n[programs.models.{SHIPPED}]\ntoken_capacity = 1",
            {},
            f"programs.models.{SHIPPED}.token_capacity (from {{file}}) is no setting. Did you mean "
            "token_capacity_per_dp_rank?",
        ),
        (
            f"[programs]\nenabled = true\n[programs.models.{SHIPPED}.decode_throughput_model]\nfixed_step = 1",
            {},
            f"programs.models.{SHIPPED}.decode_throughput_model.fixed_step (from {{file}}) is no setting. Did you mean "
            "fixed_step_seconds?",
        ),
        (
            "[programs]\nenabled = true\n[programs.models.smolm2-135m-instruct]\ntoken_capacity_per_dp_rank = 1",
            {},
            f"programs.models.smolm2-135m-instruct (from {{file}}): no model has this name. Did you mean {SHIPPED}?",
        ),
        (
            "[programs]\nenabled = true",
            {"GENPOOL_PROGRAMS__PREFILL_COST_MODEL__INTERCEPT_SECOND": "1"},
            "GENPOOL_PROGRAMS__PREFILL_COST_MODEL__INTERCEPT_SECOND is no setting. Did you mean "
            "GENPOOL_PROGRAMS__PREFILL_COST_MODEL__INTERCEPT_SECONDS?",
        ),
        (
            "[programs]\nenabled = true",
            {"GENPOOL_PROGRAMS__PREFILL_COST_MODEL": "1"},
            "GENPOOL_PROGRAMS__PREFILL_COST_MODEL is no setting.",
        ),
        (
            "[programs]\nenabled = true\ntoken_capacity_per_dp_rank = 5",
            {"GENPOOL_PROGRAMS__TOKEN_CAPACITY_PER_TARGET": "6"},
            "programs (from {file}, GENPOOL_PROGRAMS__TOKEN_CAPACITY_PER_TARGET): token_capacity_per_target is the "
            "older name of token_capacity_per_dp_rank: give one of them",
        ),
        (
            '[programs]\nenabled = true\non_pause = "offload"',
            {},
            "programs.on_pause (from {file}): offload needs offload_memory_bytes or offload_disk_bytes of a model.",
        ),
        (
            "[programs]\nenabled = true\ntoken_capacity_per_dp_rank = 0",
            {},
            "programs.token_capacity_per_dp_rank = 0 (from {file}): should be greater than or equal to 1",
        ),
    ],
)
def test_what_would_not_apply_is_refused(
    load: Any, tmp_path: Path, toml: str, environ: dict[str, str], message: str
) -> None:
    """The field, its origin, and the name that was probably meant."""
    with pytest.raises(ConfigurationError) as caught:
        load(toml, **environ)
    assert str(caught.value).startswith(message.format(file=tmp_path / "genpool.toml"))
