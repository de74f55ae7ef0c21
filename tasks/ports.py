"""The two ports between the queue and whatever generates tokens.

**Engine**: one loaded model in this process. It turns a batch of token rows into rows of logits and keeps KV per
(session, epoch). It neither samples, nor queues, nor knows of Redis; one shared sampler draws from its logits.

**Runner**: what a worker's I/O threads talk to: submit, cancel, capacity, events. The batching loop implements it over
an Engine; a remote backend implements it over HTTP.

Everything that crosses these borders is a dataclass that nobody changes, so that tests drive either side alone. Those
made for each job or token are not frozen: making a frozen one costs three times as much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from pool.store.log import TokenLogprobs
from tasks.payloads import Prompt, Sampling
from tasks.vocabulary import Vocabulary

TokenIds = npt.NDArray[np.int32]
Logits = npt.NDArray[np.float32]
#: A session's id and its epoch.
SessionKey = tuple[str, int]


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
    offload: bool


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
    """`row` (V,) float32: logits after the member's last token, or None where none were wanted; it holds them until the
    engine's next step. `length`: positions the session holds now."""

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


def kept(result: StepResult) -> StepResult:
    """The result with a row of its own, which outlives the engine's next step."""
    if isinstance(result, StepLogits) and result.row is not None:
        return StepLogits(result.row.copy(), result.length)
    return result


@dataclass(frozen=True, slots=True)
class KVUsage:
    """In positions, each counted once however many sessions share it. `held`: by sessions, room they were given and
    have not filled included, or pinned for a holder; `pinned`: that part; `cached`: what later sessions may begin with,
    given up when room is needed. The rest of `total` is free. `evictions`: units given up since the start."""

    total: int
    held: int
    pinned: int
    cached: int
    evictions: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What an engine kept for a holder: the KV of all of `tokens` (T,), as bytes. It is good in `scope` alone."""

    scope: str
    tokens: TokenIds
    blob: bytes


class KVRefused(ValueError):
    """Bytes that an engine cannot take for KV. The message says why, and shows nothing of them."""


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
        """Prefill chunks must start, except a session's first, and end, except the last of a prompt, at absolute
        multiples of this many tokens; only then are results independent of how a prompt was cut."""
        ...

    def fingerprint(self) -> str:
        """Stable hash of weights, tokenizer, engine build, KV layout and numeric policy; constant in a process."""
        ...

    def capability(self) -> Capability: ...

    def begin(self, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = "") -> int | None:
        """Make room for a new session that will hold `positions` of KV, and let it begin with what is held of `prompt`
        (P,) already, in the same `scope`: nothing is shared between scopes.

        Returns how many positions it holds from the start, less than P. None: there is no room now, and nothing has
        happened. Raises ValueError for a session that has begun.
        """
        ...

    def extend(self, session: str, epoch: int, positions: int) -> bool:
        """More room, up to `positions` in all. False: there is none now, and nothing has happened."""
        ...

    def resident(self, prompt: TokenIds, scope: str = "") -> int:
        """How many positions a session of this prompt would hold from the start."""
        ...

    def step(self, batch: Sequence[Member]) -> list[StepResult]:
        """Run one batch of decode rows and prefill chunks together; one result per member, in order.

        A (session, epoch) may appear once in a batch. One that has not begun, or holds another number of positions than
        `start`, is a CacheMiss. Positions beyond its room are a MemberError.
        """
        ...

    def release(self, session: str, epoch: int, *, tokens: TokenIds | None = None, holder: str = "") -> None:
        """Forget the session. Idempotent; another epoch's KV is untouched.

        What was prefilled of its prompt may stay for later sessions to begin with, while there is room. `tokens`, where
        given: prompt and output of all its positions, which may then stay too. `holder`: what stays is kept for it,
        whatever else needs room, in place of what it had kept before, until `unpin`.
        """
        ...

    def unpin(self, holder: str) -> None:
        """What was kept for the holder may be given up. Idempotent."""
        ...

    def snapshot(self, session: str, epoch: int) -> bytes | None:
        """The session's KV as bytes, or None where unsupported or missing."""
        ...

    def restore(
        self, session: str, epoch: int, blob: bytes, prompt: TokenIds, positions: int, scope: str = ""
    ) -> bool | None:
        """Begin a session with a snapshot of it, with room for `positions`; it holds what it held then. None: there is
        no room now. False: unsupported, damaged, of another fingerprint or prompt, so that it can never be restored.
        Then the session has not begun. Raises ValueError for a session that has begun."""
        ...

    def kept_for(self, holder: str) -> int:
        """How many positions are kept for the holder."""
        ...

    def export(self, holder: str) -> Kept | None:
        """What is kept for the holder, as bytes. It stays as it is until `unpin`. None: nothing is, or unsupported."""
        ...

    def begin_from(
        self, kept: Kept, session: str, epoch: int, prompt: TokenIds, positions: int, scope: str = ""
    ) -> int | None:
        """`begin`, with what `kept` holds of the prompt where that is more than is held already. None: there is no room
        now. Raises KVRefused where `kept` is unsupported, damaged, of another fingerprint or scope. Then the session
        has not begun."""
        ...

    def held_by(self, owners: Mapping[str, Sequence[SessionKey]]) -> dict[str, int]:
        """Positions that each owner has, as `KVUsage.held` counts them: those of the sessions named for it, and what is
        kept for it as a holder. What several have counts for the first of them. Owners that have none are left out."""
        ...

    def sole(self, sessions: Sequence[SessionKey]) -> int:
        """Positions that nobody holds but these sessions: what releasing all of them gives to others."""
        ...

    def kv_usage(self) -> KVUsage: ...

    def check_integrity(self) -> None:
        """Raises IntegrityError when the books of its KV contradict themselves. Cheap enough for every idle moment."""
        ...

    def close(self) -> None:
        """Free the weights. Idempotent."""
        ...


@dataclass(slots=True)
class Generation:
    """One job as the runner sees it.

    `job`: its token; `attempt`: the number of this hand-out, used as the KV epoch; `prompt` (P,) int32; `tenant`: whose
    it is, the scope of its KV; `holder`: for whom its KV is kept after its end ("": for nobody); `replay`: for
    each of the `n` choices the token ids already logged by earlier attempts, which are forced, never drawn again;
    `max_tokens`: output tokens a choice may have, logged ones included.

    `given`: the prompt as the caller gave it, where whoever runs the model tokenizes; then `prompt` is empty, and
    `max_tokens` 0 where the caller named no limit.
    """

    job: str
    attempt: int
    prompt: TokenIds
    sampling: Sampling
    max_tokens: int
    seed: int
    n: int = 1
    tenant: str = ""
    holder: str = ""
    replay: tuple[tuple[int, ...], ...] = ()
    given: Prompt | None = None


#: Stands in a token log for a piece of text whose tokens nobody told: no vocabulary has this id.
UNTOLD = 2**32 - 1


@dataclass(slots=True)
class Tokens:
    """New output of one choice. `text` is the piece that became safe to show with these tokens (it may be empty, and
    may hold text withheld earlier). `logprobs`: one for each token id where the job asks for them, else empty."""

    job: str
    attempt: int
    choice: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(slots=True)
class ChoiceOutput:
    """How one choice ended: `finish_reason` is `stop` or `length`; `text` is its complete text."""

    text: str
    finish_reason: str
    tokens: int


@dataclass(slots=True)
class Finished:
    """All choices of the job ended by themselves. Token counts are whole-job totals, replayed tokens included.
    `cached_tokens`: of its prompt when it began, None where it never had to; `decode_s`: from its first token to its
    last, None where an earlier attempt had drawn some of them."""

    job: str
    attempt: int
    outputs: tuple[ChoiceOutput, ...]
    prompt_tokens: int
    cached_tokens: int | None
    decode_s: float | None = None


@dataclass(slots=True)
class Failed:
    """The job failed by name (`code`, e.g. `engine_error`); `message` is safe to show."""

    job: str
    attempt: int
    code: str
    message: str


@dataclass(slots=True)
class GivenBack:
    """The job cannot go on here, through no fault of its own: it goes back to the queue, with what it has logged."""

    job: str
    attempt: int


Event = Tokens | Finished | Failed | GivenBack

#: How a job counts that is stopped from outside.
Stopped = Literal["cancelled", "failed"]


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
        """Take a job. Raises InvalidRequest when it can never run here, another Refused when it may run elsewhere or
        later: then it goes back to the queue."""
        ...

    def cancel(self, job: str, attempt: int, *, how: Stopped = "cancelled") -> bool:
        """Stop within one step, without any event; tokens that were told stay. `how` it counts: `failed` is for
        deadlines and lost leases. False: no such live job. Idempotent."""
        ...

    def capacity(self) -> RunnerCapacity:
        """`effective` 0: it takes nothing now."""
        ...

    def effective_limit(self) -> int:
        """Generations in flight at most, of what it was told and what it can honestly do."""
        ...

    def is_alive(self) -> bool:
        """Whether its thread runs."""
        ...

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
