"""The Celery bootstep that puts the host into a worker, and everything that must be refused or installed around it.

A *worker* step, not a consumer step: consumer steps are stopped and started on every broker reconnect.
"""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import click
from celery import bootsteps
from celery.exceptions import CeleryCommandException
from celery.signals import worker_ready
from click.core import ParameterSource

from tasks import names
from tasks.celery import UNLIMITED_CONCURRENCY
from tasks.config import Settings
from tasks.generate import Generate
from tasks.launch import DEVICES_VARIABLE, device_env
from workers.host import Host
from workers.pool import HostPool


class EngineStep(bootsteps.StartStopStep):
    """Starts and stops the host with the worker."""

    name = "genpool"
    label = "Generations"
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        task: Generate = worker.app.tasks[names.GENERATE]
        self._services = task.services
        self._settings: Settings = self._services.settings
        self._check(worker)
        self._pin(worker)
        super().__init__(worker, **options)

    def _check(self, worker: Any) -> None:
        """Refuse what cannot work, with what to type instead."""
        queues = ",".join(worker.app.amqp.queues.consume_from)
        if _pool_was_typed() or not issubclass(worker.pool_cls, HostPool):
            raise _refusal(
                "genpool batches generations inside its own pool, which -P and worker_pool must not replace. "
                f"Type: celery -A tasks worker -Q {queues} (-c N bounds the generations in flight)."
            )
        if getattr(worker, "autoscale", None):
            raise _refusal("--autoscale is not supported; use -c N, or `celery -A tasks control pool_grow`.")
        if not Host.wanted(worker.app, self._settings.models):
            known = ", ".join(self._services.submitter.models()) or "none"
            raise _refusal(
                f"No enabled model among the queues ({queues}). "
                f"Name one: celery -A tasks worker -Q MODEL. Models: {known}."
            )

    def _pin(self, worker: Any) -> None:
        """Show this process the devices of its models alone, unless whoever started it has chosen. Nothing that looks
        for devices is loaded yet."""
        devices = {
            self._settings.models[name].device_of(0) for name in Host.wanted(worker.app, self._settings.models)
        } - {""}
        if not devices or DEVICES_VARIABLE in os.environ:
            return
        if len(devices) > 1:
            raise _refusal(
                f"Its models are on different devices ({', '.join(sorted(devices))}), and a process sees one choice. "
                f"Start a worker for each, or set {DEVICES_VARIABLE} for all of them."
            )
        os.environ |= device_env(devices.pop())

    def create(self, worker: Any) -> Host:
        """Build the host; `-c` bounds the generations in flight of each model, its absence leaves the model's own
        limit."""
        limit = None if worker.concurrency == UNLIMITED_CONCURRENCY else worker.concurrency
        models = [self._settings.models[name] for name in Host.wanted(worker.app, self._settings.models)]
        targets = [model.target_inflight if limit is None else min(limit, model.target_inflight) for model in models]
        worker.concurrency = worker.pool.limit = max(targets)
        host = Host(worker, self._services, limit=limit)
        worker.pool.on_resize = host.resize
        setattr(worker, names.HOST_ATTRIBUTE, host)
        return host

    def start(self, worker: Any) -> None:
        """Start the host and take over the signals that drain it."""
        worker_ready.connect(self._on_ready, weak=False)
        super().start(worker)

    def stop(self, worker: Any) -> None:  # noqa: ARG002 - the bootstep protocol
        """Warm shutdown: drain. After a drain by signal there is nothing left to do."""
        if self.obj is not None:
            self.obj.stop(self._settings.worker.drain_grace_seconds)

    def terminate(self, worker: Any) -> None:  # noqa: ARG002 - the bootstep protocol
        """Cold shutdown (SIGQUIT): hand everything back at once."""
        if self.obj is not None:
            self.obj.stop(0.0)

    def _on_ready(self, **_: Any) -> None:
        """Drain first and shut the consumer down after, so that the worker answers pings while it drains. Celery
        installs its own handlers earlier; a second signal falls back to them."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (signal.SIGTERM, signal.SIGINT):
            former = signal.getsignal(number)

            def drain(_number: int, _frame: Any, former: Any = former, number: int = number) -> None:
                signal.signal(number, former)
                if self.obj is not None:
                    self.obj.drain()

            signal.signal(number, drain)


def _pool_was_typed() -> bool:
    """Whether -P is on the command line. Celery takes `-P prefork` for its own default and would use our pool."""
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source("pool") == ParameterSource.COMMANDLINE


def _refusal(message: str) -> CeleryCommandException:
    """An error that Celery's command line prints as one line, without a traceback."""
    return CeleryCommandException(message, exit_code=1)
