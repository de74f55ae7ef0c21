"""The two state servers that tests run on: the embedded Valkey, and Redis 7.0, the oldest that is supported."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool.errors import ConfigurationError
from pool.store.server_binary import BINARY_VARIABLE, find_binary
from tests.redis7 import Redis7Missing, redis7

VALKEY, REDIS7 = "valkey", "redis-7.0"
SERVERS = (VALKEY, REDIS7)


def program(server: str) -> Path:
    """The server's program; skips the test where it cannot be had."""
    if server == REDIS7:
        try:
            return redis7()
        except Redis7Missing as missing:
            pytest.skip(str(missing))
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(BINARY_VARIABLE, raising=False)
        patch.setenv("PATH", "")
        try:
            return find_binary()
        except ConfigurationError as error:
            pytest.skip(error.message)
