"""Names that cross process borders."""

from __future__ import annotations

#: The Celery task that stands for one generation, in events, in Flower and for `send_task`.
GENERATE = "genpool.generate"

#: The attribute of Celery's worker under which the running host is found by control commands.
HOST_ATTRIBUTE = "genpool_host"
CONSUMER = "workers.consumer:Consumer"
#: The broker connections of the application.
AMQP = "tasks.broker:AMQP"
HOST_POOL = "workers.pool:HostPool"
ENGINE_STEP = "workers.step:EngineStep"
BRIDGE = "tasks.bridge:strategy"
