"""Configuration: order of sources, names of variables, errors that say what to change, and the generated page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pool.errors import ConfigurationError
from pool.store.server import socket_url
from tasks.config import (
    SECTIONS,
    SHIPPED_MODELS,
    Configuration,
    Settings,
    broker_url,
    dotted,
    inner_sections,
    load_configuration,
    load_settings,
    model_cache,
    result_backend,
    state_folder,
    state_url,
    variable_name,
)
from tasks.config_docs import markdown
from tasks.urls import celery_form, masked, redis_form

ROOT = Path(__file__).parents[2]
SHIPPED = "smollm2-135m-instruct"


@pytest.fixture
def load(tmp_path: Path) -> Any:
    """load(toml, **variables): the configuration of a file and an environment of its own."""

    def load_from(toml: str = "", **environ: str) -> Configuration:
        file = tmp_path / "genpool.toml"
        file.write_text(toml)
        return load_configuration(file, environ)

    return load_from


def origins_of(configuration: Configuration) -> Mapping[str, str]:
    """Origins of what is no default, by field."""
    return {entry.field: entry.origin for entry in configuration.effective() if entry.origin != "default"}


def refusal(load: Any, toml: str = "", **environ: str) -> ConfigurationError:
    """The error of a configuration that must be refused."""
    with pytest.raises(ConfigurationError) as caught:
        load(toml, **environ)
    return caught.value


# --- where values come from


def test_without_file_and_variables_all_is_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults alone are valid, and hold the shipped models."""
    monkeypatch.chdir(tmp_path)
    configuration = load_configuration(environ={})
    assert origins_of(configuration) == {}
    assert configuration.settings.server == Settings().server
    assert list(configuration.settings.models) == list(SHIPPED_MODELS)


def test_file_over_default_and_variable_over_file(load: Any, tmp_path: Path) -> None:
    """The nearest source wins, field by field, and is named."""
    configuration = load("[server]\nport = 9000\nthreads = 8", GENPOOL_SERVER__PORT="9001")
    assert (configuration.settings.server.port, configuration.settings.server.threads) == (9001, 8)
    assert origins_of(configuration) == {
        "server.port": "GENPOOL_SERVER__PORT",
        "server.threads": str(tmp_path / "genpool.toml"),
    }


def test_the_file_is_found_by_variable_then_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """$GENPOOL_CONFIG comes before ./genpool.toml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "genpool.toml").write_text("[server]\nport = 1")
    (tmp_path / "other.toml").write_text("[server]\nport = 2")
    assert load_configuration(environ={}).settings.server.port == 1
    monkeypatch.setenv("GENPOOL_CONFIG", str(tmp_path / "other.toml"))
    assert load_settings().server.port == 2


def test_a_named_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    """A typing mistake in the path does not fall back to defaults."""
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml does not exist"):
        load_configuration(environ={"GENPOOL_CONFIG": str(tmp_path / "nowhere.toml")})


@pytest.mark.parametrize(
    ("text", "field", "value"),
    [
        ("2", "sync_wait_seconds", 2.0),
        ("1.5", "sync_wait_seconds", 1.5),
        ("1e2", "sync_wait_seconds", 100.0),
        (" 12 ", "threads", 12),
        ("::1", "host", "::1"),
    ],
)
def test_variables_are_read_as_the_fields_type(load: Any, text: str, field: str, value: object) -> None:
    """Text becomes a number where the field is one."""
    settings = load(**{variable_name(("server", field)): text}).settings
    assert getattr(settings.server, field) == value


@pytest.mark.parametrize(
    ("text", "value"), [("false", False), ("0", False), ("No", False), ("TRUE", True), ("1", True)]
)
def test_boolean_variables(load: Any, text: str, value: bool) -> None:
    """The usual words for yes and no."""
    variable = variable_name(("models", SHIPPED, "enabled"))
    assert load(**{variable: text}).settings.models[SHIPPED].enabled is value


# --- models


def test_a_shipped_model_can_be_changed_in_single_fields(load: Any) -> None:
    """What the file does not say stays as shipped."""
    model = load(f"[models.{SHIPPED}]\nenabled = false\nthreads = 2").settings.models[SHIPPED]
    assert (model.enabled, model.threads) == (False, 2)
    assert model.target_inflight == SHIPPED_MODELS[SHIPPED]["target_inflight"]


def test_a_new_model_stands_beside_the_shipped_ones(load: Any) -> None:
    """A table with a source of its own adds a model."""
    models = load('[models."tiny-1.5"]\nsource = "random:1"').settings.models
    assert set(models) == {*SHIPPED_MODELS, "tiny-1.5"}
    assert models["tiny-1.5"].target_inflight == 1


def test_a_variable_reaches_a_model_whose_name_holds_dots_and_dashes(load: Any) -> None:
    """`_` stands for both."""
    settings = load('[models."tiny-1.5"]\nsource = "random:1"', GENPOOL_MODELS__TINY_1_5__THREADS="3").settings
    assert settings.models["tiny-1.5"].threads == 3


def test_a_source_variable_adds_a_model(load: Any) -> None:
    """Containers can be configured without a file."""
    settings = load(GENPOOL_MODELS__MY_TINY__SOURCE="random:7", GENPOOL_MODELS__MY_TINY__THREADS="1").settings
    assert (settings.models["my-tiny"].source, settings.models["my-tiny"].threads) == ("random:7", 1)


def test_a_variable_that_fits_two_models_is_refused(load: Any) -> None:
    """Both are named."""
    toml = '[models."a.b"]\nsource = "random:1"\n[models.a-b]\nsource = "random:2"'
    assert "more than one model: a-b, a.b" in str(refusal(load, toml, GENPOOL_MODELS__A_B__THREADS="1"))


# --- what is refused


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[server]\nport = 70000", "server.port = 70000 (from {file}): should be less than or equal to 65535"),
        ("[server]\nport = true", "server.port = True (from {file}): should be a valid integer"),
        ('[server]\nport = "8000"', "server.port = '8000' (from {file}): should be a valid integer"),
        (
            "[server]\nsync_wait_seconds = nan",
            "server.sync_wait_seconds = nan (from {file}): should be a finite number",
        ),
        ('[server]\nhost = ""', "server.host = '' (from {file}): "),
        ("[server]\nprot = 1", "server.prot (from {file}) is no setting. Did you mean port?"),
        ("[sever]\nport = 1", "sever (from {file}) is no setting. Did you mean server?"),
        ("server = 5", "server = 5 (from {file}): should be a valid dictionary"),
        ("[server.port]\nx = 1", "server.port (from {file}): should be a valid integer"),
        ("[worker]\nlease_seconds = 6", "worker (from {file}): renew_seconds must be at most half of lease_seconds"),
        (
            f"[models.{SHIPPED}]\ntarget_inflight = true",
            "target_inflight = True (from {file}): should be a valid integer",
        ),
        (f"[models.{SHIPPED}]\ntarget_inflight = 0", "target_inflight = 0 (from {file}): should be greater than or"),
        (f"[models.{SHIPPED}]\nreplicas = true", "replicas = True (from {file}): should be a valid integer"),
        (f"[models.{SHIPPED}]\nreplica_max = 1.0", "replica_max = 1.0 (from {file}): should be a valid integer"),
        (f"[models.{SHIPPED}]\nreplicas = -1", "replicas = -1 (from {file}): should be greater than or"),
        (
            f"[models.{SHIPPED}]\nreplicas = 3\nreplica_max = 2",
            f"models.{SHIPPED} (from {{file}}): replica_max (2) must be 0 or at least replicas (3)",
        ),
        (
            f'[models.{SHIPPED}]\nrequest_policy = "hash"',
            "request_policy = 'hash' (from {file}): should be 'least_inflight' or 'consistent_hash'",
        ),
        (f"[models.{SHIPPED}]\ndevice = 0", "device = 0 (from {file}): should be a valid string"),
        (f'[models.{SHIPPED}]\ndevice = "0;"', "device = '0;' (from {file}): must be what CUDA_VISIBLE_DEVICES takes"),
        (f"[models.{SHIPPED}]\nkv_overcommit = 0.5", "kv_overcommit = 0.5 (from {file}): should be greater than or"),
        (f"[models.{SHIPPED}]\nmax_queue_depth = -1", "max_queue_depth = -1 (from {file}): should be greater than or"),
        (
            f"[models.{SHIPPED}]\nscratch_bytes_per_session = 1000000000",
            "scratch_budget_bytes must be at least scratch_bytes_per_session",
        ),
        ("[models.smolm2-135m-instruct]\nthreads = 1", f"is required. Did you mean {SHIPPED}?"),
        ("[models.empty]", "models.empty.source (a field of a model named in {file}) is required."),
        ('[models.Bad_Name]\nsource = "x"', "models.Bad_Name (from {file}): a model's name is 1 to 63 of a-z"),
        ("[server]\nport = 1\nport = 2", "{file} cannot be read: Cannot overwrite a value"),
        (
            '[state]\nurl = "http://me:secret@host"',
            "state.url = 'http://***@host' (from {file}): must begin with one of",
        ),
    ],
)
def test_the_error_names_field_origin_and_limit(load: Any, tmp_path: Path, toml: str, message: str) -> None:
    """One line that says what to change and where; secrets stay out of it."""
    error = str(refusal(load, toml))
    assert message.format(file=tmp_path / "genpool.toml") in error
    assert "secret" not in error
    assert "\n" not in error


def test_all_problems_are_named_at_once(load: Any) -> None:
    """Nobody wants to fix a file one start at a time."""
    error = str(refusal(load, "[server]\nport = -1\nthreads = 0"))
    assert "server.port = -1" in error
    assert "server.threads = 0" in error


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("GENPOOL_SERVER__PROT", "GENPOOL_SERVER__PORT"),
        ("GENPOOL_SERVER_PORT", "GENPOOL_SERVER__PORT"),
        ("GENPOOL_CONFIGS", "GENPOOL_CONFIG"),
        ("GENPOOL_MODELS__SMOLM2_135M_INSTRUCT__THREADS", "GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__THREADS"),
    ],
)
def test_an_unknown_variable_is_refused_with_the_nearest_name(load: Any, name: str, near: str) -> None:
    """A setting that would silently not apply is an error."""
    error = refusal(load, **{name: "1"})
    assert str(error) == f"{name} is no setting. Did you mean {near}?"
    assert error.param == name


def test_a_bad_variable_is_named_as_the_origin(load: Any) -> None:
    """The origin of a wrong value is where to look."""
    error = refusal(load, GENPOOL_SERVER__PORT="eighty")
    assert str(error) == "server.port = 'eighty' (from GENPOOL_SERVER__PORT): should be a valid integer"


def test_other_programs_variables_are_none_of_ours(load: Any) -> None:
    """Only the prefix counts."""
    assert origins_of(load(GENPOOLX="1", PORT="1", genpool_server__port="x")) == {}


def test_settings_cannot_be_changed(load: Any) -> None:
    """They are passed around, never modified."""
    with pytest.raises(ValueError, match="frozen"):
        load().settings.server.port = 1


# --- URLs and folders


@pytest.mark.parametrize(
    ("given", "redis_py", "celery"),
    [
        ("redis://h:1/2", "redis://h:1/2", "redis://h:1/2"),
        ("valkey://u:p@h/0", "redis://u:p@h/0", "redis://u:p@h/0"),
        ("rediss://h/0", "rediss://h/0", "rediss://h/0?ssl_cert_reqs=required"),
        ("valkeys://h/0?a=b", "rediss://h/0?a=b", "rediss://h/0?a=b&ssl_cert_reqs=required"),
        ("rediss://h?ssl_cert_reqs=none", "rediss://h?ssl_cert_reqs=none", "rediss://h?ssl_cert_reqs=none"),
        ("unix:///a/b.sock", "unix:///a/b.sock", "redis+socket:///a/b.sock"),
        ("unix:///a.sock?db=3", "unix:///a.sock?db=3", "redis+socket:///a.sock?virtual_host=3"),
        ("redis+socket:///a.sock?virtual_host=3", "unix:///a.sock?db=3", "redis+socket:///a.sock?virtual_host=3"),
    ],
)
def test_url_dialects(load: Any, given: str, redis_py: str, celery: str) -> None:
    """One URL is written once and understood by both client libraries."""
    settings = load(GENPOOL_STATE__URL=given).settings
    assert state_url(settings) == redis_form(given) == redis_py
    assert broker_url(settings) == result_backend(settings) == celery_form(given) == celery


def test_without_a_url_the_embedded_server_is_meant(load: Any, tmp_path: Path) -> None:
    """State, broker and results all live on the folder's socket."""
    settings = load(GENPOOL_STATE__FOLDER=str(tmp_path / "state")).settings
    assert state_url(settings) == socket_url(tmp_path / "state") == f"unix://{tmp_path}/state/valkey.sock"
    assert broker_url(settings) == result_backend(settings) == f"redis+socket://{tmp_path}/state/valkey.sock"


def test_broker_and_results_may_live_elsewhere(load: Any) -> None:
    """Each has a URL of its own, passed to Celery as it is."""
    settings = load(GENPOOL_STATE__BROKER_URL="amqp://b", GENPOOL_STATE__RESULT_BACKEND="rpc://").settings
    assert (broker_url(settings), result_backend(settings)) == ("amqp://b", "rpc://")


def test_folders_follow_the_xdg_variables(load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute values are used; a relative one is ignored, as the specification wants it."""
    settings = load().settings
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "s"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "c"))
    assert (state_folder(settings), model_cache()) == (
        tmp_path / "s" / "genpool",
        tmp_path / "c" / "genpool" / "models",
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert state_folder(settings) == tmp_path / ".local" / "state" / "genpool"
    assert model_cache() == tmp_path / ".cache" / "genpool" / "models"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://:secret@h:1/0", "redis://***@h:1/0"),
        ("rediss://me:se@cr/et@h", "rediss://***@h"),
        ("unix:///a?password=secret&db=1", "unix:///a?password=***&db=1"),
        ("no such host: amqp://me:secret@h!", "no such host: amqp://***@h!"),
        ("redis://h:1/0", "redis://h:1/0"),
    ],
)
def test_secrets_in_urls_are_masked(text: str, shown: str) -> None:
    """Nothing between `://` and the last `@` is shown."""
    assert masked(text) == shown


def test_effective_values_hide_secrets(load: Any) -> None:
    """`genpool config` may be pasted into a bug report."""
    effective = load(GENPOOL_STATE__URL="redis://:secret@h").effective()
    assert [entry.value for entry in effective if entry.field == "state.url"] == ["redis://***@h"]


# --- the page


def test_the_documentation_is_current() -> None:
    """docs/configuration.md is what `genpool config --markdown` prints."""
    assert (ROOT / "docs" / "configuration.md").read_text() == markdown()


def test_every_field_is_described() -> None:
    """A field without words is no documentation; sections within sections have tables of their own."""
    page = markdown()
    for name, section in SECTIONS.items():
        inner = dict(inner_sections(section, (name,)))
        for path, kind in {(name,): section, **inner}.items():
            assert f"`[{dotted(path)}]`" in page
            for field, info in kind.model_fields.items():
                assert info.description, field
                assert f"| `{field}` |" in page or f".{field}]`" in page or (*path, field, "NAME") in inner
