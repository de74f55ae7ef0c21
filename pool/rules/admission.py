"""Whether a rank takes a generation: its budgets, what one generation needs of them, and the decision with its reason.

Pure: the loop in `workers` shows what is in use, and keeps to the answer. KV is counted in positions here, because
what a position costs is the engine's matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from pool.errors import ConfigurationError
from pool.settings import ModelSettings

MIB = 2**20


class Reason(StrEnum):
    """Why a generation was taken or not, as it stands on the wire and in metrics."""

    ADMITTED = "admitted"
    QUEUED = "queued"
    QUEUE_FULL = "rejected-queue-full"
    KV_BUDGET = "rejected-kv-budget"
    SCRATCH_BUDGET = "rejected-scratch-budget"
    DUPLICATE = "rejected-duplicate"
    INVALID = "rejected-invalid"


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bounds of one rank's loop; the fields are those of the model's settings, where they are described.

    Raises ConfigurationError that names the field. The KV budget is kept by the engine's books; here it is reported.
    """

    weight_bytes: int = 0
    kv_budget_bytes: int = 64 * MIB
    scratch_bytes_per_session: int = MIB
    scratch_budget_bytes: int = 16 * MIB
    max_active_sessions: int = 8
    max_queue_depth: int = 64
    max_batch_size: int = 8
    max_prefill_tokens_per_tick: int = 512
    kv_overcommit: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weight_bytes", "max_queue_depth"):
            self._require_whole(name, 0)
        for name in (
            "kv_budget_bytes",
            "scratch_bytes_per_session",
            "scratch_budget_bytes",
            "max_active_sessions",
            "max_batch_size",
            "max_prefill_tokens_per_tick",
        ):
            self._require_whole(name, 1)
        overcommit = self.kv_overcommit
        if isinstance(overcommit, bool) or not isinstance(overcommit, int | float) or not 1 <= overcommit < math.inf:
            raise ConfigurationError(
                f"kv_overcommit: must be a number >= 1, not {overcommit!r}.", param="kv_overcommit"
            )

    def _require_whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}: must be a whole number >= {least}, not {value!r}.", param=name)

    @classmethod
    def of(cls, model: ModelSettings) -> Budgets:
        """Those of a catalogue entry."""
        return cls(
            weight_bytes=model.weight_bytes,
            kv_budget_bytes=model.kv_budget_bytes,
            scratch_bytes_per_session=model.scratch_bytes_per_session,
            scratch_budget_bytes=model.scratch_budget_bytes,
            max_active_sessions=model.max_active_sessions,
            max_queue_depth=model.max_queue_depth,
            max_batch_size=model.max_batch_size,
            max_prefill_tokens_per_tick=model.max_prefill_tokens_per_tick,
            kv_overcommit=model.kv_overcommit,
        )

    @property
    def active_cap(self) -> int:
        """Sessions that may be active at once."""
        return max(1, min(self.max_active_sessions, self.scratch_budget_bytes // self.scratch_bytes_per_session))


def peak_positions(prompt_tokens: int, max_tokens: int) -> int:
    """Positions a session holds at most: prefill emits the first token, the last one is never fed back."""
    return prompt_tokens + max_tokens - 1


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for: `choices` sessions of `session`, each with this prompt and up to `max_tokens` of output.
    `epoch`: which attempt of it."""

    session: str
    prompt_tokens: int
    max_tokens: int
    choices: int = 1
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """What is in use. `slots`: sessions that may be active at once; `in_flight`: sessions taken and not ended;
    `ahead`: those that found no room when they were last looked at; `queued`: those taken into the queue that have not
    become active; `kv_positions`: positions one session may hold here; `is_known`: this very session and epoch is live
    or has ended."""

    slots: int
    in_flight: int
    ahead: int
    queued: int
    kv_positions: int
    is_known: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """`detail` holds the numbers, and nothing of the prompt."""

    session: str
    reason: Reason
    detail: str = ""

    @property
    def accepted(self) -> bool:
        """Whether it will run here, now or later."""
        return self.reason in (Reason.ADMITTED, Reason.QUEUED)


def decide(request: Request, budgets: Budgets, usage: Usage) -> Decision:
    """Checked in this order: the request itself, duplicates, KV and scratch alone, a free slot and nobody ahead, room
    in the queue. The choices of an admitted request come with it, and wait beside the queue where slots are few."""
    reason, detail = _decided(request, budgets, usage)
    return Decision(request.session, reason, detail)


def _decided(request: Request, budgets: Budgets, usage: Usage) -> tuple[Reason, str]:
    impossible = _impossible(request, budgets, usage)
    if impossible is not None:
        return impossible
    if usage.in_flight < usage.slots and not usage.ahead:
        return Reason.ADMITTED, f"{usage.in_flight} of {usage.slots} slots are taken"
    if usage.queued + request.choices <= budgets.max_queue_depth:
        return Reason.QUEUED, f"{usage.queued} sessions are queued, {budgets.max_queue_depth} may be"
    return (
        Reason.QUEUE_FULL,
        f"{usage.queued} sessions are queued and {request.choices} more were asked for, but only "
        f"{budgets.max_queue_depth} may be",
    )


def _impossible(request: Request, budgets: Budgets, usage: Usage) -> tuple[Reason, str] | None:
    """Why it cannot run here, however long it waits."""
    fault = _fault(request)
    if fault:
        return Reason.INVALID, fault
    if usage.is_known:
        return Reason.DUPLICATE, "this attempt of it is here, or has ended here"
    peak = peak_positions(request.prompt_tokens, request.max_tokens)
    if peak > usage.kv_positions:
        return Reason.KV_BUDGET, f"it needs KV for {peak} tokens, but a session here holds {usage.kv_positions} at most"
    if budgets.scratch_bytes_per_session > budgets.scratch_budget_bytes:
        return (
            Reason.SCRATCH_BUDGET,
            f"a session takes {budgets.scratch_bytes_per_session} bytes of scratch memory, but this rank has "
            f"{budgets.scratch_budget_bytes}",
        )
    return None


def _fault(request: Request) -> str:
    """What is wrong with the request itself."""
    if not request.session.strip():
        return "its id is blank"
    if isinstance(request.epoch, bool) or request.epoch < 0:
        return f"its attempt is {request.epoch!r}, not a whole number >= 0"
    if min(request.prompt_tokens, request.max_tokens, request.choices) < 1:
        return (
            f"{request.choices} choices of {request.prompt_tokens} prompt tokens and up to {request.max_tokens} output "
            "tokens were asked for; each must be at least 1"
        )
    return ""
