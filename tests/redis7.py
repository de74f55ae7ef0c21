"""Debian's Redis 7.0, the oldest server that genpool supports: the one on PATH, or unpacked from its packages.

Unpacking installs nothing, starts nothing and needs no root: the packages' files go to genpool's cache folder.
`python -m tests.redis7` prints the program's path.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

from pool.errors import ConfigurationError
from pool.store.server_binary import binary_version
from tasks.config import model_cache

VERSION = (7, 0)
PACKAGES = ("redis-server", "redis-tools")
#: An archive that does not answer must not hold up the tests.
APT = ("apt-get", "-q", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::Retries=1")
COMMAND_TIMEOUT_S = 60
HOW = "to run these tests, put a redis-server of version 7.0 on PATH (Debian 12: apt-get install redis-server)"


class Redis7Missing(Exception):
    """There is no Redis 7.0 here; the message says why, and what to do."""


@cache
def redis7() -> Path:
    """The program. Raises Redis7Missing."""
    on_path = shutil.which("redis-server")
    unpacked = model_cache().parent / "tests" / "redis-7.0"
    for found in filter(None, (on_path, unpacked / "redis-server")):
        if _is_right(Path(found)):
            return Path(found)
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise Redis7Missing(f"no Redis 7.0 on PATH, and no apt-get to fetch it with; {HOW}")
    try:
        _unpack(unpacked)
    except (subprocess.SubprocessError, OSError) as error:
        raise Redis7Missing(f"no Redis 7.0 on PATH, and its packages cannot be had ({error}); {HOW}") from error
    if not _is_right(unpacked / "redis-server"):
        raise Redis7Missing(f"no Redis 7.0 on PATH, and the package is of another version; {HOW}")
    return unpacked / "redis-server"


def _is_right(program: Path) -> bool:
    try:
        return binary_version(program) == VERSION
    except ConfigurationError:
        return False


def _unpack(target: Path) -> None:
    """Fill `target` with the packages' files and a `redis-server` that finds its libraries among them."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        _download(work, PACKAGES)
        _download(work, [library for package in work.glob("*.deb") for library in _missing_libraries(package)])
        for package in work.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(work / "files")], work)
        libraries = ":".join(
            str(target / folder.relative_to(work / "files")) for folder in (work / "files/usr/lib").glob("*-linux-*")
        )
        program = work / "files" / "redis-server"
        program.write_text(
            f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{target}/usr/bin/redis-server" "$@"\n', encoding="utf-8"
        )
        program.chmod(0o755)
        # Another test process may do the same at the same time: the last one stays, complete.
        shutil.rmtree(target, ignore_errors=True)
        (work / "files").rename(target)


def _download(work: Path, packages: list[str] | tuple[str, ...]) -> None:
    """Fetch packages into `work`; with package lists of its own where the system has none, as in a bare container."""
    if not packages:
        return
    (work / "apt" / "partial").mkdir(parents=True, exist_ok=True)
    private = ["-o", f"Dir::State::Lists={work / 'apt'}", "-o", f"Dir::Cache={work / 'apt'}"]
    try:
        _run([*APT, "download", *packages], work)
    except subprocess.CalledProcessError:
        _run([*APT, *private, "update"], work)
        _run([*APT, *private, "download", *packages], work)


def _missing_libraries(package: Path) -> list[str]:
    """The libraries that a package depends on and that the system does not have."""
    depends = _run(["dpkg-deb", "-f", str(package), "Depends"], package.parent)
    names = [entry.split("|")[0].split("(")[0].strip() for entry in depends.split(",")]
    return [name for name in names if name.startswith("lib") and not _is_installed(name)]


def _is_installed(package: str) -> bool:
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${db:Status-Status}", package], capture_output=True, text=True, check=False
    )
    return asked.stdout == "installed"


def _run(command: list[str], folder: Path) -> str:
    return subprocess.run(
        command,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=COMMAND_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
    ).stdout


if __name__ == "__main__":
    try:
        print(redis7())
    except Redis7Missing as missing:
        sys.exit(str(missing))
