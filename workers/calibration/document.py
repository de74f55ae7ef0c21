"""`calibration.json`: what was measured and fitted, under the names that other tools for these models use.

Written is the whole of it; read are the coefficients alone, from files of this tool and of others: below
`calibration.prefill.coefficients` and its siblings `decode` and `mixed`, below `coefficients`, or at the top.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pool.errors import InvalidRequest
from pool.program_settings import DecodeThroughputModel, PrefillCostModel
from pool.sections import Section
from workers.calibration.fit import Fit
from workers.calibration.results import DECODE, MISS, PREFILL, Calibration

SCHEMA_VERSION = 1
ALPHA = "ttl_decode_throughput_alpha"
#: Names of the document, and the fields of the settings.
PREFILL_NAMES = {
    "ttl_prefill_model_intercept_seconds": "intercept_seconds",
    "ttl_prefill_model_linear_seconds_per_1k_tokens": "linear_seconds_per_1k_tokens",
    "ttl_prefill_model_quadratic_seconds_per_1k_tokens_squared": "quadratic_seconds_per_1k_tokens_squared",
}
DECODE_NAMES = {
    "decode_step_fixed_seconds": "fixed_step_seconds",
    "decode_step_seconds_per_request": "batch_step_seconds_per_request",
    "decode_step_seconds_per_context_token": "context_step_seconds_per_token",
}
ALPHA_NAMES = {ALPHA: "decode_throughput_alpha"}
#: No document of coefficients is larger.
MOST_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class Coefficients:
    """What a document says. `alpha_given`: False where it does not say alpha, which then keeps its default."""

    prefill: PrefillCostModel
    decode: DecodeThroughputModel
    alpha_given: bool


# --- reading


def read_coefficients(path: Path) -> Coefficients:
    """The six coefficients of a document, and alpha where it is there. Raises InvalidRequest that names the file and
    the coefficient."""
    found = _found(path, _loaded(path))
    missing = [name for name in (*PREFILL_NAMES, *DECODE_NAMES) if name not in found]
    if missing:
        raise InvalidRequest(f"{path} does not say {', '.join(missing)}.", param=missing[0])
    prefill = _section(PrefillCostModel, PREFILL_NAMES | ALPHA_NAMES, found, path)
    decode = _section(DecodeThroughputModel, DECODE_NAMES, found, path)
    return Coefficients(prefill, decode, ALPHA in found)


def _loaded(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InvalidRequest(f"{path} is larger than {MOST_BYTES} bytes.", param="from")
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}", param="from") from None
    if not isinstance(document, dict):
        raise InvalidRequest(f"{path} is no JSON object.", param="from")
    return document


def _found(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name. Two different ones of a name are refused: nobody could say which is meant."""
    names = {*PREFILL_NAMES, *DECODE_NAMES, *ALPHA_NAMES}
    found: dict[str, Any] = {}
    for place in _places(document):
        for name in names & place.keys():
            if name in found and found[name] != place[name]:
                raise InvalidRequest(f"{path} says {name} twice, differently.", param=name)
            found[name] = place[name]
    return found


def _places(document: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    calibration = document.get("calibration")
    parts = [calibration.get(part) for part in ("prefill", "decode", "mixed")] if isinstance(calibration, dict) else []
    yield document
    for part in (document, calibration, *parts):
        if isinstance(part, dict) and isinstance(part.get("coefficients"), dict):
            yield part["coefficients"]


def _section(kind: type[Section], names: Mapping[str, str], found: Mapping[str, Any], path: Path) -> Any:
    """The settings' section of these values."""
    try:
        return kind.model_validate({field: found[name] for name, field in names.items() if name in found})
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        (name,) = [name for name, field in names.items() if field == detail["loc"][0]]
        problem = detail["msg"].removeprefix("Input ")
        raise InvalidRequest(f"{path}: {name} = {detail['input']!r}: {problem}.", param=name) from None


# --- writing


def as_json(model: str, deployment: Mapping[str, Any], found: Calibration) -> str:
    """The document of a calibration. `deployment`: what the coefficients hold for."""
    metadata = {"schema_version": SCHEMA_VERSION, "backend": {"type": "genpool"}, "model": {"id": model}, **deployment}
    canonical = json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()
    document = {
        "metadata": metadata,
        "metadata_hash": f"sha256:{hashlib.sha256(canonical).hexdigest()}",
        "calibration": {
            "scope": {
                "kind": "one_rank",
                "rounds": found.measurement.rounds,
                "longest_prompt_tokens": found.measurement.longest_tokens,
                "cut_by_time": found.measurement.cut,
                "disturbance": found.measurement.samples.disturbance(),
            },
            "prefill": {
                "formula": "seconds = intercept + linear x + quadratic x^2; x = uncached tokens / 1000",
                **_fitted(found.prefill, PREFILL_NAMES),
                "points": _points(found, PREFILL),
            },
            "decode": {
                "formula": "tokens/s = B / (fixed + per_request B + per_context_token C)",
                **_fitted(found.decode, DECODE_NAMES),
                "points": _points(found, DECODE),
            },
        },
    }
    if found.alpha is not None:
        document["calibration"]["mixed"] = {  # type: ignore[index]
            "formula": "alpha = decode throughput beside a prefill / without one; cache miss = prefill (2 - alpha)",
            **_fitted(found.alpha, ALPHA_NAMES),
            "points": _points(found, MISS),
        }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _fitted(fit: Fit, names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "coefficients": dict(zip(names, fit.coefficients, strict=True)),
        "standard_errors": dict(zip(names, fit.standard_errors, strict=True)),
        "fit": {"r_squared": fit.r_squared, "max_relative_residual": fit.max_relative_residual},
    }


def _points(found: Calibration, kind: str) -> list[dict[str, Any]]:
    return [asdict(check) | {"error": check.error} for check in found.checks if check.kind == kind]
