"""`genpool sweep`: a catalogue model through the sweep, and the sweep as a table."""

from __future__ import annotations

import re
from dataclasses import astuple, dataclass, fields
from pathlib import Path

from threadpoolctl import threadpool_limits

from pool.errors import InvalidRequest
from pool.settings import ModelSettings
from tasks.ports import Engine
from workers.engines import load_engine
from workers.sweep import Level, Sweep, mixed_requests, some_cancels, sweep

_RANGE = re.compile(r"(\d{1,7})(?:-(\d{1,7}))?")


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """As typed: `levels` by commas, `prompts` as MIN-MAX or one length; None: what never makes sessions give way."""

    levels: str
    requests: int
    prompts: str
    max_tokens: int
    seed: int
    kv_tokens: int | None = None
    overcommit: float = 1.0
    prefill_tokens: int | None = None
    cancels: int = 0


def sweep_model(name: str, model: ModelSettings, weights: Path | None, options: SweepOptions) -> Sweep:
    """Raises InvalidRequest for options that make no sweep, and what `sweep` and `load_engine` raise."""
    levels, (shortest, longest) = _levels(options.levels), _lengths(options.prompts)
    # The engine's products run one after another; BLAS's threads would spin beside its own.
    with threadpool_limits(limits=1, user_api="blas"):
        first = load_engine(name, model, weights=weights)
        bytes_per_token, vocabulary = first.bytes_per_token, first.vocabulary
        context_length = first.context_length
        first.close()
        if longest + options.max_tokens > context_length:
            raise InvalidRequest(
                f"Prompts of {longest} tokens with {options.max_tokens} more exceed the context of {context_length}.",
                param="prompts",
            )

        def load(kv_positions: int) -> Engine:
            room = model.model_copy(update={"kv_budget_bytes": kv_positions * bytes_per_token})
            return load_engine(name, room, weights=weights)

        requests = mixed_requests(
            vocabulary,
            count=options.requests,
            shortest=shortest,
            longest=longest,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
        return sweep(
            load,
            requests,
            levels,
            kv_positions=options.kv_tokens,
            kv_overcommit=options.overcommit,
            max_prefill_tokens_per_tick=options.prefill_tokens,
            cancels=some_cancels(requests, options.cancels, seed=options.seed),
        )


def table(found: Sweep) -> tuple[list[str], list[list[str]]]:
    """Head and rows."""
    head = [field.name.upper().replace("_", " ") for field in fields(Level)]
    return head, [[f"{value:.10g}" for value in astuple(result)] for result in found.results]


def _levels(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d{1,5}", part) for part in parts):
        raise InvalidRequest(f"Levels are whole numbers with commas between them, not {text!r}.", param="levels")
    return [int(part) for part in parts]


def _lengths(text: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(text.strip())
    shortest = int(found[1]) if found else 0
    longest = int(found[2] or shortest) if found else 0
    if not 1 <= shortest <= longest:
        raise InvalidRequest(f"Lengths of prompts are MIN-MAX with 1 <= MIN <= MAX, not {text!r}.", param="prompts")
    return shortest, longest
