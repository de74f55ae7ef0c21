"""Inspect and control commands of a genpool worker, declared here so that clients know them; workers implement them.

celery -A tasks inspect generations        running generations: id, model, tokens so far, age
celery -A tasks inspect ranks              the models this worker serves, and their state
celery -A tasks inspect engine             figures of each model's batching loop (docs/metrics.md)
celery -A tasks control drain              finish what runs, hand back the rest, and exit
celery -A tasks control revoke ID          cancel a generation, running or queued (overrides Celery's own)
celery -A tasks control terminate SIG ID   the same, whatever the signal
"""

from __future__ import annotations

from typing import Any, Protocol, cast

from celery.worker import control
from celery.worker.control import control_command, inspect_command

from tasks.names import HOST_ATTRIBUTE


class Host(Protocol):
    """What a worker process offers to control commands. Answers are JSON-safe and hold no prompt or output text."""

    def generations(self) -> list[dict[str, Any]]: ...

    def ranks(self) -> list[dict[str, Any]]: ...

    def engine(self) -> dict[str, Any]: ...

    def drain(self) -> None: ...

    def cancel(self, task_ids: list[str]) -> int: ...


def _host(state: Any) -> Host:
    return cast(Host, getattr(state.consumer.controller, HOST_ATTRIBUTE))


@inspect_command()
def generations(state: Any) -> list[dict[str, Any]]:
    """Running generations: id, model, attempt, choices, tokens so far, age in seconds."""
    return _host(state).generations()


@inspect_command()
def ranks(state: Any) -> list[dict[str, Any]]:
    """The models this worker serves: state, limits, in flight."""
    return _host(state).ranks()


@inspect_command()
def engine(state: Any) -> dict[str, Any]:
    """Figures of each model's batching loop, as of now."""
    return _host(state).engine()


@control_command()
def drain(state: Any) -> dict[str, str]:
    """Stop reading, finish what fits the grace period, hand back the rest, exit."""
    _host(state).drain()
    return {"ok": "draining"}


@control_command(name="revoke", variadic="task_id", signature="[id1 [id2 [... [idN]]]]")
def revoke(state: Any, task_id: Any, terminate: bool = False, signal: str | None = None, **options: Any) -> Any:
    """Cancel generations by id, running or queued; `terminate` makes no difference to them."""
    ids = [str(each) for each in ([task_id] if isinstance(task_id, str) else task_id or [])]
    _host(state).cancel(ids)
    return control.revoke(state, ids, terminate=terminate, signal=signal, **options)


@control_command(name="terminate", variadic="task_id", args=[("signal", str)], signature="<signal> [id1 [... [idN]]]")
def terminate(state: Any, signal: str, task_id: Any, **options: Any) -> Any:
    """As `revoke`; no signal is sent to anybody."""
    return revoke(state, task_id, terminate=True, signal=signal, **options)
