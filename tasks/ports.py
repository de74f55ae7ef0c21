"""The two ports between the queue and whatever generates tokens.

**Engine**: one loaded model in this process. It turns a batch of token rows into rows of logits and keeps KV per
(session, epoch). It neither samples, nor queues, nor knows of Redis; one shared sampler draws from its logits.

**Runner**: what a worker's I/O threads talk to: submit, cancel, capacity, events. The batching loop implements it over
an Engine; a remote backend implements it over HTTP.

Everything that crosses these borders is a dataclass that nobody changes, so that tests drive either side alone. Those
made for each job or token are not frozen: making a frozen one costs three times as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tasks.payloads import Sampling
from tasks.vocabulary import Vocabulary

TokenIds = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Capability:
    """What an engine can honestly do. `max_sessions`: generations in flight at most; `max_positions`: KV positions a
    session may hold at most; flags as documented in `docs/architecture.md`."""

    max_sessions: int
    max_positions: int
    batch_invariant: bool
    recompute_exact: bool
    snapshot: bool
    prefix_share: bool
    logprobs: bool
    seed: bool


@dataclass(slots=True)
class Member:
    """One session's part of a step: `tokens` (T,) int32 go to positions [start, start + T).

    T == 1 with start > 0 is a decode row, anything else a prefill chunk. `wants_logits` is False for chunks and forced
    rows whose logits nobody reads.
    """

    session: str
    epoch: int
    tokens: TokenIds
    start: int
    wants_logits: bool = True


@dataclass(slots=True)
class StepLogits:
    """`row` (V,) float32: logits after the member's last token, or None where none were wanted; `length`: positions the
    session holds now."""

    row: Logits | None
    length: int


@dataclass(frozen=True, slots=True)
class CacheMiss:
    """The session's KV is not here (never was, was evicted, or is of another epoch): the caller prefills again."""


@dataclass(frozen=True, slots=True)
class MemberError:
    """This member failed alone; the rest of the batch is good. `message` holds no prompt text."""

    message: str


StepResult = StepLogits | CacheMiss | MemberError


class Engine(Protocol):
    """An in-process model. All methods are called from one thread; none may end the process."""

    @property
    def vocabulary(self) -> Vocabulary: ...

    @property
    def context_length(self) -> int:
        """Positions (prompt + output) a session can have at most."""
        ...

    @property
    def bytes_per_token(self) -> int:
        """Bytes of KV one position takes."""
        ...

    @property
    def prefill_grid(self) -> int:
        """Prefill chunks must start and, except the last of a prompt, end at absolute multiples of this many tokens;
        only then are results independent of how a prompt was cut."""
        ...

    def fingerprint(self) -> str:
        """Stable hash of weights, tokenizer, engine build, KV layout and numeric policy; constant in a process."""
        ...

    def capability(self) -> Capability: ...

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """Run one batch of decode rows and prefill chunks together; one result per member, in order.

        A (session, epoch) may appear once in a batch. A member whose `start` differs from the positions held is a
        CacheMiss, unless start == 0, which begins the session (dropping what an equal (session, epoch) held).
        """
        ...

    def release(self, session: str, epoch: int) -> None:
        """Forget the session's KV. Idempotent; another epoch's KV is untouched."""
        ...

    def share_prefix(self, source: tuple[str, int], target: tuple[str, int], positions: int) -> bool:
        """Let `target` begin with the first `positions` of `source`'s KV. False: unsupported or missing."""
        ...

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        """The session's KV as bytes, or None where unsupported or missing."""
        ...

    def restore(self, session: str, epoch: int, blob: bytes) -> bool:
        """Put a snapshot back under (session, epoch). False: unsupported, damaged or of another fingerprint."""
        ...

    def close(self) -> None:
        """Free the weights. Idempotent."""
        ...


@dataclass(slots=True)
class Generation:
    """One job as the runner sees it.

    `job`: its token; `attempt`: the number of this hand-out, used as the KV epoch; `prompt` (P,) int32; `replay`: for
    each of the `n` choices the token ids already logged by earlier attempts, which are forced, never drawn again;
    `max_tokens`: output tokens a choice may have, logged ones included.
    """

    job: str
    attempt: int
    prompt: TokenIds
    sampling: Sampling
    max_tokens: int
    seed: int
    n: int = 1
    replay: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True)
class Tokens:
    """New output of one choice. `text` is the piece that became safe to show with these tokens (it may be empty, and
    may hold text withheld earlier)."""

    job: str
    attempt: int
    choice: int
    token_ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class ChoiceOutput:
    """How one choice ended: `finish_reason` is `stop` or `length`; `text` is its complete text."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(slots=True)
class Finished:
    """All choices of the job ended by themselves. Token counts are whole-job totals, replayed tokens included."""

    job: str
    attempt: int
    outputs: tuple[ChoiceOutput, ...]
    prompt_tokens: int
    cached_tokens: int


@dataclass(slots=True)
class Failed:
    """The job failed by name (`code`, e.g. `engine_error`); `message` is safe to show."""

    job: str
    attempt: int
    code: str
    message: str


Event = Tokens | Finished | Failed


class EventSink(Protocol):
    """Where a runner delivers. Called from the runner's own thread; must not block on the network."""

    def deliver(self, events: Sequence[Event]) -> None: ...

    def congested(self) -> bool:
        """Whether so much output waits to be stored that the runner should pause."""
        ...


@dataclass(slots=True)
class RunnerCapacity:
    """`effective`: generations in flight at most; `in_flight`: choices accepted and not yet ended."""

    effective: int
    in_flight: int


class Runner(Protocol):
    """Runs generations for one rank."""

    def start(self, sink: EventSink) -> None: ...

    def submit(self, generation: Generation) -> None:
        """Take a job. Raises InvalidRequest when it can never run here; queueing is the caller's business."""
        ...

    def cancel(self, job: str, attempt: int) -> bool:
        """Stop within one step, without any event. False: no such live job. Idempotent."""
        ...

    def capacity(self) -> RunnerCapacity: ...

    def set_limit(self, limit: int) -> None:
        """Generations in flight at most from now on (>= 1); running ones finish."""
        ...

    def progress(self) -> int:
        """A counter that rises while the runner is healthy (each turn, idle turns included): standing still means
        stalled."""
        ...

    def telemetry(self) -> dict[str, Any]:
        """JSON-safe figures without session content."""
        ...

    def stop(self) -> list[Generation]:
        """Stop after the current step, free everything, return what had not ended."""
        ...
