"""`docs/configuration.md`, written from the settings' own fields: `genpool config --markdown`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from pool.backend_settings import UpstreamSettings
from pool.program_settings import ProgramModelSettings, ProgramSettings
from pool.sections import Section
from pool.settings import ModelSettings
from tasks.config import OTHER_VARIABLES, SECTIONS, SHIPPED_MODELS, FieldPath, dotted, inner_sections, variable_name

_INTRODUCTION = """\
# Configuration

<!-- Written by `genpool config --markdown`; edit the descriptions in the files pool/*settings.py
instead. -->

genpool reads one TOML file and the environment. A value comes from the first of these that has it:

1. the variable `GENPOOL_...`: section and field in capitals, joined by two underscores (`GENPOOL_SERVER__PORT=9000`);
2. the configuration file: the path in `GENPOOL_CONFIG`, else `genpool.toml` of the current directory, if there is one;
3. the default below.

Everything is checked before anything starts. Unknown fields, unknown `GENPOOL_` variables and values out of range are
refused by name. `genpool config` prints the values in force with their origin; passwords in URLs are shown as `***`.
"""

_PROGRAMS = """\
Programs are scheduled with `enabled = true`; any other field without it is refused, as nothing here would have an
effect. The older name `token_capacity_per_target` is accepted for `token_capacity_per_dp_rank`.
"""

_MODEL_PROGRAMS = """\
Capacity and cost models belong to a model on a kind of machine, so they may differ by model. What is not given is as in
`[programs]`, field by field. `[programs.models.NAME.prefill_cost_model]` and
`[programs.models.NAME.decode_throughput_model]` have the fields above, and so have their variables
(`GENPOOL_PROGRAMS__MODELS__NAME__PREFILL_COST_MODEL__INTERCEPT_SECONDS`).
"""

_UPSTREAM = """\
The server of a model that no engine in the worker runs: [backends.md](backends.md). A variable holds a list as words,
separated and quoted as in a shell (`GENPOOL_MODELS__BIG__UPSTREAM__BASE_URLS="http://a:8000/v1 http://b:8000/v1"`).
"""

_MODELS = """\
Shipped models are merged with the file by name: an entry may change single fields, or switch a model off with
`enabled = false`. A name that holds a dot is quoted in TOML: `[models."my-model-1.5"]`.

In a variable, the model's name is written in capitals with `_` for `-` and `.`
(`GENPOOL_MODELS__SMOLLM2_135M_INSTRUCT__THREADS=2`). `GENPOOL_MODELS__NAME__SOURCE` of a name that is not known yet
adds a model, with `-` for each `_`; a name that fits two models is refused.
"""


def markdown() -> str:
    """The whole page, ending with a newline."""
    parts = [_INTRODUCTION]
    for name, section in SECTIONS.items():
        parts += [f"## `[{name}]`\n", *_about(section), _table(section, (name,))]
        for path, inner in inner_sections(section, (name,)):
            parts += [f"### `[{dotted(path)}]`\n", *_about(inner), _table(inner, path)]
    model = ("models", "NAME")
    parts += ["## `[models.NAME]`\n", _MODELS, _table(ModelSettings, model)]
    for path, inner in inner_sections(ModelSettings, model):
        parts += [f"### `[{dotted(path)}]`\n", *_about(inner), _table(inner, path)]
    parts.append(_shipped())
    parts += ["## Other variables\n", _other_variables()]
    return "\n".join(parts)


def _about(section: type[Section]) -> list[str]:
    """What to know before a section's table."""
    about: dict[type[Section], str] = {
        ProgramSettings: _PROGRAMS,
        ProgramModelSettings: _MODEL_PROGRAMS,
        UpstreamSettings: _UPSTREAM,
    }
    return [about[section]] if section in about else []


def _table(section: type[Section], path: FieldPath) -> str:
    head = ["| field | values | default | variable | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *_rows(section, path)]) + "\n"


def _rows(section: type[Section], path: FieldPath) -> Iterator[str]:
    inner = {below[len(path)] for below, _ in inner_sections(section, path)}
    for name, schema in section.model_json_schema()["properties"].items():
        if name in inner:
            continue
        default = _plain(schema["default"]) if "default" in schema else "required"
        variable = variable_name((*path, name))
        yield f"| `{name}` | {_values(schema)} | {default} | `{variable}` | {schema['description']} |"


def _values(schema: Mapping[str, Any]) -> str:
    """What a field accepts, in words. A field that may be unset is described by its other values."""
    if "anyOf" in schema:
        (schema,) = [values for values in schema["anyOf"] if values.get("type") != "null"]
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    kind = {
        "integer": "whole number",
        "number": "number",
        "string": "text",
        "boolean": "`true`, `false`",
        "array": "list of texts",
    }[schema["type"]]
    bounds = [
        f"{sign} {_plain(schema[key])}"
        for key, sign in {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}.items()
        if key in schema
    ]
    return " ".join([kind, ", ".join(bounds)]).strip()


def _plain(value: Any) -> str:
    """A value as TOML writes it, with digits in groups where they are many."""
    if value is None:
        return "unset"
    if isinstance(value, bool | str):
        return "empty" if value == "" else f"`{json.dumps(value)}`"
    if isinstance(value, list):
        return f"`{json.dumps(value)}`" if value else "empty"
    if float(value).is_integer():
        return f"{int(value):_}" if abs(value) >= 10_000 else f"{int(value)}"
    return f"{value}"


def _shipped() -> str:
    lines = ["Shipped:", "", "```toml"]
    for name, fields in SHIPPED_MODELS.items():
        lines += [
            f"[{dotted(('models', name))}]",
            *(f"{field} = {json.dumps(value)}" for field, value in fields.items()),
        ]
    return "\n".join([*lines, "```", ""])


def _other_variables() -> str:
    rows = [f"| `{name}` | {meaning} |" for name, meaning in OTHER_VARIABLES.items()]
    return "\n".join(["| variable | meaning |", "|---|---|", *rows]) + "\n"
