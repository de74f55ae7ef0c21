"""Every error genpool raises on purpose, in one tree, split by *when* it can happen.

    GenpoolError
    ├── ConfigurationError        before anything starts; names the field
    ├── Refused                   before queueing: nothing was stored, nothing will run
    │   ├── InvalidRequest        the caller's input is wrong; names the field and the limit
    │   │   └── ContextTooLong    prompt + max tokens do not fit; carries both numbers
    │   ├── UnknownModel          no catalogue entry of that name
    │   ├── ModelClosed           the model is being unloaded, is unloaded, or could not be loaded
    │   ├── KeyConflict           the Idempotency-Key stands for another request
    │   ├── QueueFull             bounded queue; carries when to come back
    │   └── StateUnavailable      the state server is away, read-only or out of memory
    ├── JobUnknown                no such id (never issued, or deleted)
    │   ├── JobErased             its owner had it deleted
    │   └── JobExpired            the job ended, and its result was kept as long as promised
    ├── ProgramUnknown            no Program of the caller's has this id
    ├── JobNotCancellable         the job has already ended in another way
    ├── JobNotWaiting             the job does not wait in a lane: it has had its turn, or waits elsewhere
    ├── Stale                     a write with an old fence: the attempt is no longer ours
    └── GenerationFailed          after queueing: the job's terminal record says so too

Each class carries `code`, the machine-readable word that ends up in API errors and job records, and `param`, the
field at fault where there is one. HTTP statuses are mapped once in `webapp.errors`, Lua replies once in `pool.store`.
"""

from __future__ import annotations


class GenpoolError(Exception):
    """Base of all deliberate errors; `message` is safe to show to the caller and never holds prompt text."""

    code = "genpool_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class ConfigurationError(GenpoolError):
    """A setting is missing, unknown or out of range."""

    code = "configuration_error"


class Refused(GenpoolError):
    """Refused before queueing: no record, no stream entry, no key is left behind."""

    code = "refused"


class InvalidRequest(Refused):
    """A field of the request is wrong; `param` names it."""

    code = "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt and output together exceed the model's context; lengths are in tokens."""

    code = "context_length_exceeded"

    def __init__(self, *, prompt_tokens: int, max_tokens: int, context_length: int, param: str) -> None:
        super().__init__(
            f"The prompt has {prompt_tokens} tokens and up to {max_tokens} more were asked for, "
            f"but this model's context holds {context_length} tokens.",
            param=param,
        )
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.context_length = context_length


class UnknownModel(Refused):
    """No enabled catalogue entry carries this name."""

    code = "model_not_found"


class ModelClosed(Refused):
    """The model takes no jobs: `model_unloading`, `model_not_loaded` or `model_failed`. `retry_after_s`: when it
    probably does again by itself, None where an admin must act first."""

    code = "model_not_loaded"

    def __init__(self, message: str, *, code: str, retry_after_s: int | None = None) -> None:
        super().__init__(message, param="model", code=code)
        self.retry_after_s = retry_after_s


class QueueFull(Refused):
    """The model's queue is at its bound; `retry_after_s` is a whole number of seconds >= 1."""

    code = "executor_queue_full"

    def __init__(self, message: str, *, retry_after_s: int, code: str | None = None) -> None:
        super().__init__(message, code=code)
        self.retry_after_s = retry_after_s


class StateUnavailable(Refused):
    """The state server cannot take writes now; nothing was stored."""

    code = "state_unavailable"


class KeyConflict(Refused):
    """The caller's Idempotency-Key was used before, for another request."""

    code = "idempotency_conflict"


class JobUnknown(GenpoolError):
    """No job has this id (never issued, or deleted)."""

    code = "not_found"


class JobErased(JobUnknown):
    """The job was deleted at its owner's wish; to whoever asks for it, it never was."""


class JobExpired(JobUnknown):
    """The job has ended, and its result was kept as long as promised; only its id is remembered. `tenant`: whose it
    was, None where that is not known."""

    code = "expired"

    def __init__(self, message: str, *, tenant: str | None = None) -> None:
        super().__init__(message)
        self.tenant = tenant


class ProgramUnknown(GenpoolError):
    """The caller has, and lately had, no Program of this id."""

    code = "not_found"


class JobNotCancellable(GenpoolError):
    """The job has already ended as completed, incomplete or failed."""

    code = "not_cancellable"


class JobNotWaiting(GenpoolError):
    """The job does not wait in a lane: it has had its turn or has ended, or its Program decides on its turn."""

    code = "not_waiting"


class Stale(GenpoolError):
    """A write carried an old fence: another attempt owns the job, or it has ended. The writer drops its work."""

    code = "stale"


class GenerationFailed(GenpoolError):
    """A generation that was accepted and then failed; `code` is the one in its terminal record."""

    code = "generation_failed"
