"""The Celery application: `celery -A tasks worker -Q MODEL`.

Importing this module reads the settings of the process. The worker's pool and engine step are given by name, so that a
client of the application never loads them.
"""

from __future__ import annotations

from celery import Celery

# Imported for its effect: it declares our inspect and control commands, for workers and for `celery inspect` alike.
import tasks.control  # noqa: F401
from tasks import names
from tasks.config import Settings, broker_url, load_settings, result_backend
from tasks.generate import Generate
from tasks.services import open_services

#: Celery replaces a missing concurrency by the number of cores; this one means "as many as the model's own limit".
UNLIMITED_CONCURRENCY = 1024


def create_app(settings: Settings) -> Celery:
    """The application for these settings, with the generation task registered."""
    app = Celery("genpool", set_as_current=False, amqp=names.AMQP)
    app.conf.update(
        broker_url=broker_url(settings),
        result_backend=result_backend(settings),
        accept_content=["json"],
        result_accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        event_serializer="json",
        result_expires=settings.state.result_ttl_seconds,
        worker_pool=names.HOST_POOL,
        worker_consumer=names.CONSUMER,
        worker_concurrency=UNLIMITED_CONCURRENCY,
        worker_prefetch_multiplier=1,
        worker_hijack_root_logger=True,
        # Off until somebody asks (-E, enable_events; Flower does): events cost more than a short generation's queueing.
        worker_send_task_events=False,
        task_send_sent_event=False,
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        # A broker that turns into a replica breaks blocked reads and refuses writes until it is a primary again: to
        # wait and reconnect, not a reason for a worker to exit.
        broker_channel_error_retry=True,
        # Reply queues of `inspect` callers that went away would otherwise stay for ever.
        control_queue_expires=60.0,
        event_queue_expires=60.0,
    )
    app.steps["worker"].add(names.ENGINE_STEP)
    app.register_task(Generate(open_services(settings, max_connections=4)))
    return app


app = create_app(load_settings())
