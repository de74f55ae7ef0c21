"""What a container asks whether its process is well: `python -m tasks.health api|worker`, exit code 0 or 1.

A module of its own, because it runs every half minute beside each process: it loads no engine and no Celery. It looks
at this host alone. Whether the system as a whole can serve is what `/readyz` and `genpool doctor` say.
"""

from __future__ import annotations

import socket
import sys

from pool.errors import GenpoolError
from pool.store.connection import connect
from pool.store.ranks import RankRegistry
from tasks.config import Settings, load_settings, state_url
from tasks.probes import answers_ok

TIMEOUT_S = 3.0
LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def api_answers(settings: Settings) -> bool:
    """Whether the API of this host answers, ready or not."""
    host = LOOPBACK.get(settings.server.host, settings.server.host)
    return answers_ok(host, settings.server.port, "/healthz", timeout_s=TIMEOUT_S)


def worker_serves(settings: Settings) -> bool:
    """Whether a worker of this host has its place in the registry, which it must renew within a lease. Raises
    StateUnavailable."""
    client = connect(state_url(settings), max_connections=1, timeout_s=TIMEOUT_S)
    try:
        return any(
            rank.host == socket.gethostname()
            for model in settings.models
            for rank in RankRegistry(client, model).present()
        )
    finally:
        client.connection_pool.disconnect()


CHECKS = {"api": api_answers, "worker": worker_serves}


def main() -> None:
    """The exit code is the answer; what is wrong goes to stderr."""
    if len(sys.argv) != 2 or sys.argv[1] not in CHECKS:
        sys.exit(f"usage: python -m tasks.health {'|'.join(CHECKS)}")
    try:
        well = CHECKS[sys.argv[1]](load_settings())
    except GenpoolError as error:
        sys.exit(error.message)
    sys.exit(0 if well else f"no {sys.argv[1]} answers here")


if __name__ == "__main__":
    main()
