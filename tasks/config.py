"""Settings, composed: defaults, then `genpool.toml`, then `GENPOOL_...` variables, validated before anything starts.

Lists of names do not exist here: every field lives in `pool.settings`. Errors name the field, its value's origin and
the limit. The result is immutable and is passed to whoever needs it.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import tomllib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError
from pydantic_core import ErrorDetails

from pool.backend_settings import MISSING
from pool.errors import ConfigurationError
from pool.program_settings import OLDER_NAMES, ProgramSettings
from pool.sections import Section
from pool.settings import (
    LimitSettings,
    ModelName,
    ModelSettings,
    ServerSettings,
    WorkerSettings,
)
from pool.state_settings import StateSettings, names_cluster
from pool.store.server import socket_url
from pool.store.server_binary import BINARY_VARIABLE
from tasks.passwords import with_password
from tasks.urls import celery_form, masked, redis_form

PREFIX = "GENPOOL_"
DELIMITER = "__"
CONFIG_VARIABLE = "GENPOOL_CONFIG"
API_KEYS_VARIABLE = "GENPOOL_API_KEYS"
DEFAULT_FILE = Path("genpool.toml")

#: Variables that are no field: name -> what it does.
OTHER_VARIABLES = {
    CONFIG_VARIABLE: "Path of the configuration file. Unset: `genpool.toml` of the current directory, if there is one.",
    BINARY_VARIABLE: "Path of the Valkey or Redis program (>= 7.0) to run as the embedded state server.",
    API_KEYS_VARIABLE: "API keys beside those of `server.keys_file`: its lines, separated by `;`. Never printed.",
}

#: Shipped with the product; `[models.*]` in genpool.toml adds to it or overrides single fields by name.
SHIPPED_MODELS: Mapping[str, Mapping[str, Any]] = {
    "smollm2-135m-instruct": {
        "backend": "numpy",
        "source": "smollm2-135m-instruct",
        "target_inflight": 8,
        "weight_bytes": 538_060_032,
        "kv_budget_bytes": 2 * 2**30,
        "scratch_budget_bytes": 64 * 2**20,
        "max_active_sessions": 64,
        "max_queue_depth": 128,
        "max_batch_size": 16,
    },
    # The same weights in llama.cpp, in the quantisation that gains most from batches.
    "smollm2-135m-q4": {
        "backend": "llama_cpp",
        "source": "smollm2-135m-instruct:q4_0",
        "enabled": False,
        "target_inflight": 8,
        "kept_prefixes": 4,
        "weight_bytes": 91_726_912,
        "kv_budget_bytes": 2**30,
        # A burst of short prompts in one step; beside others it is the time that bounds.
        "max_prefill_tokens_per_tick": 2048,
    },
}


class Settings(Section):
    """All effective settings of one process."""

    server: ServerSettings = ServerSettings()
    state: StateSettings = StateSettings()
    worker: WorkerSettings = WorkerSettings()
    limits: LimitSettings = LimitSettings()
    programs: ProgramSettings = ProgramSettings()
    models: dict[ModelName, ModelSettings] = Field(default_factory=dict)


#: The sections with fixed fields, by name.
SECTIONS: Mapping[str, type[Section]] = {
    "server": ServerSettings,
    "state": StateSettings,
    "worker": WorkerSettings,
    "limits": LimitSettings,
    "programs": ProgramSettings,
}

FieldPath = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Effective:
    """One field: its dotted name, its value (secrets masked) and where that came from: `default`, the configuration
    file's path, or a variable's name."""

    field: str
    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Configuration:
    """Settings together with the origin of every value that is not a default; `file_models`: the file's tables of
    models, as they stand there."""

    settings: Settings
    origins: Mapping[FieldPath, str]
    file_models: Mapping[str, Mapping[str, Any]]

    def effective(self) -> list[Effective]:
        """Every field in the order of the documentation; of `[programs.models.NAME]` what was given, as the rest is as
        in `[programs]`."""
        tree = self.settings.model_dump()
        tree["programs"] |= self.settings.programs.model_dump(include={"models"}, exclude_unset=True)
        return [
            Effective(
                dotted(path), masked(value) if isinstance(value, str) else value, self.origins.get(path, "default")
            )
            for path, value in _leaves(tree)
            if value != {}
        ]


def load_settings(path: Path | None = None) -> Settings:
    """The effective settings. `path` None: $GENPOOL_CONFIG, else ./genpool.toml if it exists.

    Raises ConfigurationError naming the field, the origin of its value and the limit.
    """
    return load_configuration(path).settings


def origins(path: Path | None = None) -> list[Effective]:
    """Every field with its effective value and origin. Raises ConfigurationError as `load_settings` does."""
    return load_configuration(path).effective()


def load_configuration(path: Path | None = None, environ: Mapping[str, str] | None = None) -> Configuration:
    """Settings and origins from `path` and `environ` (None: the process's own)."""
    environ = os.environ if environ is None else environ
    file = _existing_file(path, environ)
    values: dict[FieldPath, tuple[Any, str]] = {
        ("models", name, field): (value, "default")
        for name, fields in SHIPPED_MODELS.items()
        for field, value in fields.items()
    }
    tree = {} if file is None else _read_toml(file)
    values.update({path: (value, str(file)) for path, value in _leaves(tree)})
    values.update(_from_environment(environ, _model_names(values)))
    found = {field: origin for field, (_, origin) in values.items() if origin != "default"}
    try:
        settings = Settings.model_validate(_nested({field: value for field, (value, _) in values.items()}))
    except ValidationError as error:
        problems = [_explain(detail, found) for detail in error.errors(include_url=False)]
        raise ConfigurationError("; ".join(problems), param=dotted(_location(error.errors()[0]))) from None
    _require_models(settings, found)
    _require_servers_for_celery(settings)
    _require_room(settings, found)
    return Configuration(settings, {_todays(path): origin for path, origin in found.items()}, tree.get("models", {}))


def _require_servers_for_celery(settings: Settings) -> None:
    if not names_cluster(settings.state.url):
        return
    for field in ("broker_url", "result_backend"):
        url = getattr(settings.state, field)
        if not url or names_cluster(url):
            raise ConfigurationError(
                f"state.{field} must name a single server: state.url is a cluster, which Celery cannot use.",
                param=f"state.{field}",
            )


def dotted(path: Iterable[str]) -> str:
    """`("models", "a.b", "threads")` -> `models."a.b".threads`, as TOML writes it."""
    return ".".join(part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else f'"{part}"' for part in path)


# --- what follows from settings


def state_folder(settings: Settings) -> Path:
    """The embedded state server's folder; it may not exist yet."""
    if settings.state.folder:
        return Path(settings.state.folder).expanduser().absolute()
    return _xdg("XDG_STATE_HOME", ".local/state") / "genpool"


def offload_folder(settings: Settings) -> Path:
    """The folder of KV that workers of this machine keep on disk; it may not exist yet."""
    return state_folder(settings) / "offload"


def model_cache() -> Path:
    """The folder fetched weights are kept in; it may not exist yet."""
    return _xdg("XDG_CACHE_HOME", ".cache") / "genpool" / "models"


def state_url(settings: Settings) -> str:
    """The state server's URL in redis-py's form: `state.url`, or the embedded server's socket.

    Raises ConfigurationError when `state.password_file` cannot be read, or has nowhere to go.
    """
    url = redis_form(settings.state.url) if settings.state.url else socket_url(state_folder(settings))
    return with_password(url, settings.state.password_file) if settings.state.password_file else url


def broker_url(settings: Settings) -> str:
    """Celery's broker, in Celery's form."""
    return celery_form(settings.state.broker_url or state_url(settings))


def result_backend(settings: Settings) -> str:
    """Celery's result backend, in Celery's form."""
    return celery_form(settings.state.result_backend or state_url(settings))


def _xdg(variable: str, fallback: str) -> Path:
    """A base directory; relative values of the variable are ignored, as the XDG specification demands."""
    value = Path(os.environ.get(variable, ""))
    return value if value.is_absolute() else Path.home() / fallback


# --- the configuration file


def config_file(environ: Mapping[str, str] | None = None) -> Path:
    """The configuration file that is read; it may not exist."""
    named = (os.environ if environ is None else environ).get(CONFIG_VARIABLE)
    return Path(named) if named else DEFAULT_FILE


def _existing_file(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    if path is None and not environ.get(CONFIG_VARIABLE) and not DEFAULT_FILE.is_file():
        return None
    path = path or config_file(environ)
    if not path.is_file():
        raise ConfigurationError(f"The configuration file {path} does not exist.", param=CONFIG_VARIABLE)
    return path


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"The configuration file {file} cannot be read: {error}") from error


def _leaves(tree: Mapping[str, Any], path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    """Every value below the tables. An empty table counts as a value: `[models.x]` without fields must be noticed."""
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), value


def _nested(values: Mapping[FieldPath, Any]) -> dict[str, Any]:
    """The inverse of `_leaves`. A value in a table's place stays, for validation to name it."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        table = tree
        for name in path[:-1]:
            below = table.setdefault(name, {})
            if not isinstance(below, dict):
                break
            table = below
        else:
            if not (value == {} and isinstance(table.get(path[-1]), dict)):
                table[path[-1]] = value
    return tree


# --- variables


def variable_name(path: FieldPath) -> str:
    """The variable that sets a field: ("server", "port") -> GENPOOL_SERVER__PORT. In a model's name `-` and `.` become
    `_`."""
    return PREFIX + DELIMITER.join(re.sub(r"[-.]", "_", part).upper() for part in path)


def _from_environment(environ: Mapping[str, str], models: set[str]) -> dict[FieldPath, tuple[Any, str]]:
    ours = sorted(name for name in environ if name.startswith(PREFIX) and name not in OTHER_VARIABLES)
    new_models = {
        parts[1].lower().replace("_", "-")
        for parts in (name.removeprefix(PREFIX).split(DELIMITER) for name in ours)
        if len(parts) == 3 and parts[0] == "MODELS" and parts[2] == "SOURCE" and not _matching(parts[1], models)
    }
    known = _variables(models | new_models)
    values: dict[FieldPath, tuple[Any, str]] = {}
    for name in ours:
        path, annotation = _variable(name, known)
        values[path] = (_typed(environ[name], annotation), name)
    return values


def _variables(models: set[str]) -> dict[str, list[tuple[FieldPath, Any]]]:
    """The field and type of every variable; more than one where the names of two models are written alike."""
    known: dict[str, list[tuple[FieldPath, Any]]] = {}
    for path, annotation in _fields(Settings, (), sorted(models)):
        known.setdefault(variable_name(path), []).append((path, annotation))
    return known


def _fields(section: type[Section], path: FieldPath, models: Iterable[str]) -> Iterator[tuple[FieldPath, Any]]:
    """Every field below a section that holds a plain value, with its type; tables of models once for each of them."""
    for name, field in section.model_fields.items():
        annotation = _given_type(field.annotation)
        if typing.get_origin(annotation) is dict:
            below = typing.get_args(annotation)[1]
            for model in models:
                yield from _fields(below, (*path, name, model), models)
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            yield from _fields(annotation, (*path, name), models)
        else:
            yield (*path, name), annotation
            for older, today in OLDER_NAMES.items():
                if today == name:
                    yield (*path, older), annotation


def inner_sections(section: type[Section], path: FieldPath) -> Iterator[tuple[FieldPath, type[Section]]]:
    """The sections that are fields of a section, with their paths; of a table of models the one that all of them have,
    below NAME."""
    for name, field in section.model_fields.items():
        annotation = _given_type(field.annotation)
        if typing.get_origin(annotation) is dict:
            yield (*path, name, "NAME"), typing.get_args(annotation)[1]
        elif isinstance(annotation, type) and issubclass(annotation, Section):
            yield (*path, name), annotation


def _given_type(annotation: Any) -> Any:
    """The type of a field that may also be unset."""
    if isinstance(annotation, types.UnionType):
        (annotation,) = [part for part in typing.get_args(annotation) if part is not types.NoneType]
    return annotation


def _variable(name: str, known: Mapping[str, Sequence[tuple[FieldPath, Any]]]) -> tuple[FieldPath, Any]:
    """The field a variable sets, and its type. Raises ConfigurationError for a variable that sets none, or two."""
    found = known.get(name.upper(), ())
    if len(found) == 1:
        return found[0]
    if found:
        parts = [set(path) for path, _ in found]
        models = ", ".join(sorted(set[str]().union(*parts).difference(parts[0].intersection(*parts))))
        raise ConfigurationError(
            f"{name} matches more than one model: {models}. Set it in the configuration file.", param=name
        )
    raise ConfigurationError(f"{name} is no setting.{_suggestion(name, [*known, *OTHER_VARIABLES])}", param=name)


def _matching(written: str, models: set[str]) -> list[str]:
    """The models a variable's middle part may mean: in it, `_` stands for `-` or `.`."""
    return sorted(name for name in models if re.sub(r"[-.]", "_", name) == written.lower())


def _typed(text: str, annotation: Any) -> Any:
    """Text as the field's type; text that is none stays as it is, and validation names it."""
    text = text.strip()
    if annotation is bool and text.lower() in {"true", "false", "1", "0", "yes", "no", "on", "off"}:
        return text.lower() in {"true", "1", "yes", "on"}
    if annotation in (int, float) and re.fullmatch(r"[+-]?[0-9]+", text):
        return int(text)
    if typing.get_origin(annotation) is tuple:
        return _words(text)
    if annotation is float and re.fullmatch(r"[+-]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)([eE][+-]?[0-9]+)?", text):
        return float(text)
    return text


def _words(text: str) -> Any:
    """A list, as a shell would read it."""
    try:
        return shlex.split(text)
    except ValueError:
        return text


# --- errors


def _model_names(values: Iterable[FieldPath]) -> set[str]:
    return {path[1] for path in values if path[0] == "models" and len(path) > 1}


def _location(detail: ErrorDetails) -> FieldPath:
    return tuple(str(part) for part in detail["loc"] if part != "[key]")


def _explain(detail: ErrorDetails, found: Mapping[FieldPath, str]) -> str:
    """One problem in one line: field, value, origin, limit."""
    path = _location(detail)
    if detail["type"] == MISSING:
        path = (*path, *detail["ctx"]["field"].split("."))
    where = sorted(
        {origin for field, origin in found.items() if field[: len(path)] == path or path[: len(field)] == field}
    )
    origin = f" (from {', '.join(where)})" if where else ""
    if detail["type"] == "extra_forbidden":
        return f"{dotted(path)}{origin} is no setting.{_suggestion(path[-1], _siblings(path))}"
    if detail["type"] in ("missing", MISSING):
        return f"{dotted(path)}{_origin_of_table(path, found)} is required.{_suggestion_of_model(path)}"
    if detail["loc"][-1] == "[key]":
        return (
            f"{dotted(path)}{origin}: a model's name is 1 to 63 of a-z, 0-9, '-', '.', first and last a letter or digit"
        )
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input ")
    shown = "" if isinstance(detail["input"], Mapping) else f" = {masked(repr(detail['input']))[:200]}"
    return f"{dotted(path)}{shown}{origin}: {message}"


def _origin_of_table(path: FieldPath, found: Mapping[FieldPath, str]) -> str:
    where = sorted({origin for field, origin in found.items() if field[: len(path) - 1] == path[:-1]})
    return f" (a field of a model named in {', '.join(where)})" if where else ""


def _siblings(path: FieldPath) -> Iterable[str]:
    """The fields of the section that `path` is in."""
    kind: Any = Settings
    for part in path[:-1]:
        is_table_of_models = typing.get_origin(kind) is dict
        kind = typing.get_args(kind)[1] if is_table_of_models else _given_type(kind.model_fields[part].annotation)
    fields: Iterable[str] = kind.model_fields
    return fields


def _require_models(settings: Settings, found: Mapping[FieldPath, str]) -> None:
    """Raise ConfigurationError for `[programs.models.NAME]` of a model that is not there: it would never apply."""
    for name in settings.programs.models:
        if name not in settings.models:
            path = ("programs", "models", name)
            where = ", ".join(sorted({origin for field, origin in found.items() if field[:3] == path}))
            near = _suggestion(name, settings.models)
            raise ConfigurationError(
                f"{dotted(path)} (from {where}): no model has this name.{near}", param=dotted(path)
            )


def _require_room(settings: Settings, found: Mapping[FieldPath, str]) -> None:
    """Raise ConfigurationError for offloading where no model has room for it: it would never happen."""
    models = settings.models.values()
    if settings.programs.on_pause == "offload" and not any(
        m.offload_memory_bytes or m.offload_disk_bytes for m in models
    ):
        raise ConfigurationError(
            f"programs.on_pause (from {found['programs', 'on_pause']}): offload needs offload_memory_bytes or "
            "offload_disk_bytes of a model.",
            param="programs.on_pause",
        )


def _todays(path: FieldPath) -> FieldPath:
    """A field's path by its name of today."""
    return (*path[:-1], OLDER_NAMES.get(path[-1], path[-1]))


def _suggestion_of_model(path: FieldPath) -> str:
    return _suggestion(path[1], SHIPPED_MODELS) if path[0] == "models" else ""


def _suggestion(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean {near[0]}?" if near else ""
