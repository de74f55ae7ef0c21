"""`calibration.json` in, TOML out: what is read, what is refused by name, and that a merge changes nothing else."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pool.errors import ConfigurationError, InvalidRequest
from pool.program_settings import DecodeThroughputModel, PrefillCostModel
from tasks.config import load_configuration
from workers.calibration.configuration import Tables, fragment, merged, tables, write
from workers.calibration.document import read_coefficients

NAME = "smollm2-135m-instruct"
SIX = {
    "ttl_prefill_model_intercept_seconds": 0.5,
    "ttl_prefill_model_linear_seconds_per_1k_tokens": 0.25,
    "ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared": 0,
    "decode_step_fixed_seconds": 0.01,
    "decode_step_seconds_per_request": 0.001,
    "decode_step_seconds_per_context_token": 1e-7,
}
PREFILL = {name: value for name, value in SIX.items() if name.startswith("ttl")}
DECODE = {name: value for name, value in SIX.items() if name.startswith("decode")}
ALPHA = {"ttl_decode_throughput_alpha": 0.3}
ON = "[programs]\nenabled = true\n"


def document_of(path: Path, content: Any) -> Path:
    """A file of this content."""
    file = path / "calibration.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def values(intercept_seconds: float = 0.5) -> Tables:
    """A measured model's."""
    return tables(
        PrefillCostModel(intercept_seconds=intercept_seconds, decode_throughput_alpha=0.25),
        DecodeThroughputModel(fixed_step_seconds=0.01),
        alpha_given=True,
    )


# --- reading


@pytest.mark.parametrize(
    "content",
    [
        SIX,
        {"coefficients": SIX},
        {
            "metadata": {"schema_version": 1},
            "metadata_hash": "sha256:0",
            "calibration": {
                "scope": {"kind": "homogeneous_internal_dp"},
                "prefill": {
                    "coefficients": PREFILL,
                    "unconstrained_coefficients": dict.fromkeys(PREFILL, -1.0),
                    "points": [],
                },
                "decode": {"coefficients": DECODE, "fit": {"r_squared": 0.99}},
            },
        },
    ],
)
def test_the_six_names_are_found_where_tools_write_them(tmp_path: Path, content: Any) -> None:
    """At the top, below `coefficients`, or in the parts of `calibration`; what was fitted without bounds is not meant.
    Without alpha, it keeps its default and is not said."""
    found = read_coefficients(document_of(tmp_path, content))
    assert found.prefill == PrefillCostModel(
        intercept_seconds=0.5, linear_seconds_per_1k_tokens=0.25, quadratic_seconds_per_1k_tokens_squared=0
    )
    assert found.decode.model_dump() == {
        "fixed_step_seconds": 0.01,
        "batch_step_seconds_per_request": 0.001,
        "context_step_seconds_per_token": 1e-7,
    }
    assert not found.alpha_given
    assert "alpha" not in fragment(NAME, tables(found.prefill, found.decode, alpha_given=found.alpha_given))


def test_alpha_is_read_where_it_is_said(tmp_path: Path) -> None:
    """Below `calibration.mixed`."""
    content = {"coefficients": SIX, "calibration": {"mixed": {"coefficients": ALPHA}}}
    found = read_coefficients(document_of(tmp_path, content))
    assert (found.alpha_given, found.prefill.decode_throughput_alpha) == (True, 0.3)


@pytest.mark.parametrize(
    ("content", "param", "message"),
    [
        ("{", "from", "cannot be read as JSON"),
        ("[1]", "from", "is no JSON object"),
        ({}, "ttl_prefill_model_intercept_seconds", "does not say ttl_prefill_model_intercept_seconds, "),
        (PREFILL, "decode_step_fixed_seconds", "does not say decode_step_fixed_seconds, decode_step_seconds_per_req"),
        (SIX | {"decode_step_fixed_seconds": 0}, "decode_step_fixed_seconds", "= 0: should be greater than 0"),
        (
            SIX | {"ttl_prefill_model_linear_seconds_per_1k_tokens": -0.1},
            "ttl_prefill_model_linear_seconds_per_1k_tokens",
            "= -0.1: should be greater than or equal to 0",
        ),
        (SIX | {"decode_step_seconds_per_request": "1"}, "decode_step_seconds_per_request", "valid number"),
        (SIX | {"decode_step_seconds_per_request": True}, "decode_step_seconds_per_request", "valid number"),
        (SIX | {"decode_step_seconds_per_request": float("nan")}, "decode_step_seconds_per_request", "finite number"),
        (SIX | {"ttl_decode_throughput_alpha": 1.5}, "ttl_decode_throughput_alpha", "less than or equal to 1"),
        (
            SIX | {"coefficients": {"decode_step_fixed_seconds": 0.02}},
            "decode_step_fixed_seconds",
            "says decode_step_fixed_seconds twice, differently",
        ),
        ({"calibration": [], "coefficients": 3}, "ttl_prefill_model_intercept_seconds", "does not say"),
    ],
)
def test_bad_documents_are_refused_by_name(tmp_path: Path, content: Any, param: str, message: str) -> None:
    """The file, the coefficient, and what is wrong with it."""
    file = document_of(tmp_path, content)
    with pytest.raises(InvalidRequest) as refused:
        read_coefficients(file)
    assert refused.value.param == param
    assert message in refused.value.message and str(file) in refused.value.message


def test_files_that_are_none_or_huge_are_refused(tmp_path: Path) -> None:
    """Before they are read."""
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_coefficients(tmp_path / "none.json")
    file = tmp_path / "huge.json"
    with file.open("wb") as opened:
        opened.truncate(2**25)
    with pytest.raises(InvalidRequest, match="larger than"):
        read_coefficients(file)


# --- TOML


def load(text: str, path: Path) -> Any:
    """The Programs' settings of this text."""
    file = path / "checked.toml"
    file.write_text(text)
    return load_configuration(file, {}).settings.programs


def test_a_fragment_is_the_models_configuration(tmp_path: Path) -> None:
    """Every figure exactly as it was; of other models nothing changes."""
    programs = load(ON + fragment(NAME, values(0.1 + 0.2)), tmp_path)
    assert programs.of_model(NAME).prefill_cost_model == values_of(0.1 + 0.2)
    assert programs.of_model("smollm2-135m-q4").prefill_cost_model == PrefillCostModel()


def values_of(intercept_seconds: float) -> PrefillCostModel:
    """The prefill part of `values`."""
    return PrefillCostModel(intercept_seconds=intercept_seconds, decode_throughput_alpha=0.25)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ON,
        ON.rstrip("\n"),
        f"# mine\n{ON}\n[programs.models.{NAME}]\ntoken_capacity_per_dp_rank = 500  # measured\n\n# the end\n",
        f"{ON}[programs.prefill_cost_model]\nintercept_seconds = 9.0\n[server]\nport = 9\n",
        f'{ON}\n[ programs . models."{NAME}". prefill_cost_model ]  # old\nintercept_seconds = 9.0\n\n# ports\n'
        "[server]\nport = 9\n",
        f"{ON}[programs.models.{NAME}.decode_throughput_model]\n[server]\nport = 9\n",
        f'{ON}[server]\nkeys_file = """\n[programs.models]\n[no table]\n"""\n',
    ],
)
def test_a_merge_changes_two_tables_and_nothing_else(text: str) -> None:
    """Every other line stays, comments too; doing it again changes nothing; other figures replace them."""
    once = merged(text, NAME, values())
    assert merged(once, NAME, values()) == once
    kept = [line for line in text.splitlines() if "9.0" not in line and "_model" not in line]
    assert [line for line in once.splitlines() if line in kept and line] == [line for line in kept if line]
    own = tomllib.loads(once)["programs"]["models"][NAME]
    assert own["prefill_cost_model"] == dict(values()["prefill_cost_model"])
    again = tomllib.loads(merged(once, NAME, values(0.75)))["programs"]["models"][NAME]
    assert again["prefill_cost_model"]["intercept_seconds"] == 0.75
    assert again["decode_throughput_model"] == own["decode_throughput_model"]


def test_a_models_dots_are_quoted() -> None:
    """Else they would be tables."""
    once = merged(ON, "llama-3.1", values())
    assert list(tomllib.loads(once)["programs"]["models"]) == ["llama-3.1"]
    assert merged(once, "llama-3.1", values()) == once


@pytest.mark.parametrize(
    "text",
    [
        f"{ON}[programs.models.{NAME}]\nprefill_cost_model.intercept_seconds = 1.0\n",
        f"{ON}[programs.models]\n{NAME} = {{ prefill_cost_model = {{ intercept_seconds = 1.0 }} }}\n",
        f'{ON}[server]\nkeys_file = """\n[programs.models.{NAME}.prefill_cost_model]\n"""\n',
    ],
)
def test_what_cannot_be_merged_is_refused_with_the_fragment(text: str) -> None:
    """Dotted keys, inline tables, and text that looks like a table."""
    with pytest.raises(ConfigurationError, match="cannot be merged") as refused:
        merged(text, NAME, values())
    assert fragment(NAME, values()) in refused.value.message


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    """It keeps its mode and, behind a link, its place; what is no configuration stays as it is, and nothing is left
    beside it."""
    file, link = tmp_path / "genpool.toml", tmp_path / "link.toml"
    file.write_text(ON)
    file.chmod(0o640)
    link.symlink_to(file)
    write(link, NAME, values())
    assert link.is_symlink() and file.stat().st_mode & 0o777 == 0o640
    assert load(file.read_text(), tmp_path).of_model(NAME).prefill_cost_model == values_of(0.5)
    for bad, message in (("[programs]\nenabled = false\n", "enabled must be true"), ("[", "cannot be changed")):
        file.write_text(bad)
        with pytest.raises(ConfigurationError, match=message) as refused:
            write(file, NAME, values())
        assert str(file) in refused.value.message and ".genpool" not in refused.value.message
        assert file.read_text() == bad
    assert {path.name for path in tmp_path.iterdir()} == {"genpool.toml", "link.toml", "checked.toml"}


def test_a_file_that_is_not_there_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may be turned on by a variable."""
    monkeypatch.setenv("GENPOOL_PROGRAMS__ENABLED", "true")
    write(tmp_path / "new.toml", NAME, values())
    assert (tmp_path / "new.toml").read_text() == fragment(NAME, values())
