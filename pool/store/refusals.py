"""What a refused submit is told: which limit, or what the model does, and when to come back."""

from __future__ import annotations

from typing import Any

from pool.errors import InvalidRequest, ModelClosed, QueueFull
from pool.store.records import NewJob

#: Nobody knows when a place becomes free; a client that asks every few seconds finds one soon enough.
COME_BACK_S = 5


def refusal(job: NewJob, code: bytes, detail: list[Any], pending_per_model: int) -> QueueFull | InvalidRequest:
    """The error for a reply of submit.lua: "full" and "crowded" carry (time, choices held), "many" (time, Programs it
    has), "refused" the time alone: the claim of its key was left behind, or another resend just had it. InvalidRequest
    for a job of more choices than may ever be held at once: no time makes room for it."""
    if code == b"refused":
        return QueueFull("This request was refused a moment ago. Try again now.", retry_after_s=1)
    if code == b"many":
        return QueueFull(
            f"This API key's owner has {int(detail[1])} Programs of {job.ref.model}, its limit. Finish one, or "
            "try again later.",
            retry_after_s=COME_BACK_S,
            code="key_programs_full",
        )
    for who, most in ((job.ref.model, pending_per_model), ("This API key's owner", job.tenant_cap)):
        if 0 < most < job.n:
            return InvalidRequest(
                f"n={job.n} asks for more generations than {who} may hold at once: {most}, queued and running.",
                param="n",
            )
    if code == b"full":
        whose, limit, name = job.ref.model, pending_per_model, None
    else:
        whose, limit, name = f"This API key's owner, for {job.ref.model},", job.tenant_cap, "fairness_key_queue_full"
    return QueueFull(
        f"{whose} holds {int(detail[1])} generations, queued and running; {job.n} more would pass its "
        f"limit of {limit}. Try again later.",
        retry_after_s=COME_BACK_S,
        code=name,
    )


def closed(model: str, why: bytes, *, again: bool) -> ModelClosed:
    """The error for "closed" of submit.lua. `again`: the model will be loaded by itself."""
    retry_after_s = COME_BACK_S if again else None
    if why == b"unloading":
        then = "It is loaded again afterwards; try again later." if again else "An admin must load it again."
        return ModelClosed(f"{model} is being unloaded. {then}", code="model_unloading", retry_after_s=retry_after_s)
    if why == b"unloaded":
        return ModelClosed(f"{model} is not loaded. An admin must load it.", code="model_not_loaded")
    return ModelClosed(f"{model} could not be loaded. An admin must load it again.", code="model_failed")
