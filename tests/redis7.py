"""Debian's Redis 7.0, the oldest server that genpool supports: the one on PATH, or unpacked from its packages.

`python -m tests.redis7` prints the program's path.
"""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path

from pool.errors import ConfigurationError
from pool.store.server_binary import binary_version
from tests.debian_programs import NotToBeHad, cached, unpack

VERSION = (7, 0)
PACKAGES = ("redis-server", "redis-tools")
HOW = "to run these tests, put a redis-server of version 7.0 on PATH (Debian 12: apt-get install redis-server)"


class Redis7Missing(Exception):
    """There is no Redis 7.0 here; the message says why, and what to do."""


@cache
def redis7() -> Path:
    """The program. Raises Redis7Missing."""
    on_path = shutil.which("redis-server")
    unpacked = cached("redis-7.0") / "redis-server"
    for found in filter(None, (on_path, unpacked)):
        if _is_right(Path(found)):
            return Path(found)
    unpacked.unlink(missing_ok=True)
    try:
        program = unpack("redis-7.0", PACKAGES, "usr/bin/redis-server")
    except NotToBeHad as error:
        raise Redis7Missing(f"no Redis 7.0 on PATH, and {error}; {HOW}") from error
    if not _is_right(program):
        raise Redis7Missing(f"no Redis 7.0 on PATH, and the package is of another version; {HOW}")
    return program


def _is_right(program: Path) -> bool:
    try:
        return binary_version(program) == VERSION
    except ConfigurationError:
        return False


if __name__ == "__main__":
    try:
        print(redis7())
    except Redis7Missing as missing:
        sys.exit(str(missing))
