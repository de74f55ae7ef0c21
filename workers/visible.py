"""Makes generations visible to Celery's own tools: `inspect active`, task events, Flower. Never prompt or output text.

Events go through a dispatcher of our own (the consumer's is bound to the hub's connection), from a thread of its own:
nothing that goes wrong here may touch a generation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from celery.worker import state as celery_state
from kombu.exceptions import OperationalError

from pool.rules import jobs
from pool.store.connection import Client
from pool.store.dead_letters import DeadLetters
from pool.store.handouts import Ending, Handout
from tasks import names

log = logging.getLogger("genpool.events")

FLUSH_S = 0.1
BACKLOG_EVENTS = 10_000
#: How old dead letters may be that a worker tells of when it begins.
LETTERS_BEFORE_MS = 60_000


class GenerationRequestStub:
    """A running generation in the shape of Celery's Request, as far as inspect and shutdown look at one."""

    acknowledged = True
    expires = None
    eta = None
    worker_pid = None

    def __init__(self, task: Any, handout: Handout, model: str, hostname: str, cancel: Callable[[], object]) -> None:
        self.id = handout.task_id
        self.name = names.GENERATE
        self.task = task
        self.hostname = hostname
        self.time_start = time.time()
        self.delivery_info = {"exchange": "", "routing_key": model, "priority": None, "redelivered": False}
        self.stamps: dict[str, Any] = {}
        self._cancel = cancel

    def info(self, safe: bool = False) -> dict[str, Any]:  # noqa: ARG002 - Celery's signature; all of it is safe
        """What `inspect active` shows."""
        return {
            "id": self.id,
            "name": self.name,
            "args": [],
            "kwargs": {},
            "type": self.name,
            "hostname": self.hostname,
            "time_start": self.time_start,
            "acknowledged": self.acknowledged,
            "delivery_info": self.delivery_info,
            "worker_pid": self.worker_pid,
        }

    def terminate(self, pool: Any, signal: Any = None) -> None:  # noqa: ARG002 - Celery's signature
        """Cancel the generation: its record, of which the rank then hears."""
        self._cancel()

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        """Celery's cold shutdown calls this for late-ack tasks; the host hands generations back itself."""


class Visible:
    """Registers generations of one worker process with Celery, and tells of them in events."""

    def __init__(self, worker: Any) -> None:
        self._app = worker.app
        self._worker = worker
        self._stubs: dict[str, GenerationRequestStub] = {}
        self._events: deque[tuple[str, dict[str, Any]]] = deque(maxlen=BACKLOG_EVENTS)
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="genpool-events", daemon=True)

    def start(self) -> None:
        """Begin to send events in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Send what is left and end the thread."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout=5)

    def begun(self, handout: Handout, model: str, cancel: Callable[[], object]) -> None:
        """A generation has begun here."""
        stub = GenerationRequestStub(self._app.tasks[names.GENERATE], handout, model, self._worker.hostname, cancel)
        self._stubs[handout.lease.token] = stub
        celery_state.task_reserved(stub)
        celery_state.task_accepted(stub)
        if self.enabled():
            queue = {"queue": model, "routing_key": model, "exchange": ""}
            called = {"name": stub.name, "args": "()", "kwargs": "{}", "retries": handout.lease.attempt - 1}
            self._send("task-sent", stub.id, timestamp=handout.created_ms / 1000, **called, **queue)
            self._send("task-received", stub.id, **called, eta=None, expires=None)
            self._send("task-started", stub.id)

    def left(self, handout: Handout, state: str, ending: Ending | None) -> None:
        """It has ended here (`ending`), was cancelled, or went back to the queue."""
        stub = self._stubs.pop(handout.lease.token, None)
        if stub is None:
            return
        celery_state.task_ready(stub)
        if not self.enabled():
            return
        if ending is None:
            self._ended_elsewhere(stub, state)
        elif ending.state == jobs.FAILED:
            self._failed(stub.id, ending.error_code)
        else:
            tokens = sum(output.tokens for output in ending.outputs)
            runtime_s = time.time() - stub.time_start
            self._send("task-succeeded", stub.id, runtime=runtime_s, result=f"'{ending.state}, {tokens} tokens'")

    def _ended_elsewhere(self, stub: GenerationRequestStub, state: str) -> None:
        """Ended by a caller or a time limit, or taken away; of an end that another worker wrote, that one tells."""
        if state == jobs.CANCELLED:
            self._send("task-revoked", stub.id, terminated=True, signum=None, expired=False)
        elif state == jobs.FAILED:
            self._failed(stub.id, state)
        elif not jobs.is_terminal(state):
            self._send("task-retried", stub.id, exception=f"WorkerLost('{state}')", traceback="")

    def given_up(self, task_id: str, code: str) -> None:
        """A job has failed after its workers were lost; it was whoever swept that ended it, which is no worker's."""
        self._failed(task_id, code)

    def _failed(self, task_id: str, code: str) -> None:
        self._send("task-failed", task_id, exception=f"GenerationFailed('{code}')", traceback="")

    def enabled(self) -> bool:
        """Whether anybody wants events."""
        dispatcher = getattr(getattr(self._worker, "consumer", None), "event_dispatcher", None)
        return bool(
            dispatcher is not None and dispatcher.enabled and (not dispatcher.groups or "task" in dispatcher.groups)
        )

    def _send(self, kind: str, task_id: str, **fields: Any) -> None:
        fields.setdefault("timestamp", time.time())
        self._events.append((kind, {"uuid": task_id, **fields}))
        if not self._wake.is_set():
            self._wake.set()

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait()
            time.sleep(FLUSH_S)
            self._wake.clear()
            self._flush()

    def _flush(self) -> None:
        """Send the backlog over a fresh connection. What cannot be sent is dropped: events are no truth."""
        if not self._events:
            return
        try:
            with self._app.connection_for_write(transport_options={"max_retries": 1}) as connection:
                dispatcher = self._app.events.Dispatcher(
                    connection, hostname=self._worker.hostname, buffer_group=["task"], buffer_limit=256
                )
                while self._events:
                    kind, fields = self._events.popleft()
                    dispatcher.send(kind, **fields)
                dispatcher.flush()
        except (OperationalError, OSError) as error:
            log.warning("task events dropped: %s", type(error).__name__)


def given_up_chore(visible: Visible, client: Client, models: Sequence[str]) -> Callable[[], None]:
    """A maintenance chore that tells of dead letters. Every worker tells of each, so none depends on one that dies; a
    monitor that hears it twice has learned nothing new. Letters of the minute before this worker began count too: with
    the last worker of a model lost, it may be the first to tell."""
    last: dict[str, str] = {}

    def chore() -> None:
        if not visible.enabled():
            return
        for model in models:
            letters = DeadLetters(client, model)
            if model not in last:
                last[model] = letters.entry_ago(LETTERS_BEFORE_MS)
            for entry, task_id, code in letters.after(last[model]):
                visible.given_up(task_id, code)
                last[model] = entry

    return chore
