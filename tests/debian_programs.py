"""Programs out of Debian's packages, for tests that need another project's server and may install nothing.

Unpacking installs nothing, starts nothing and needs no root: the packages' files go to genpool's cache folder.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tasks.config import model_cache

#: An archive that does not answer must not hold up the tests.
APT = ("apt-get", "-q", "-o", "Acquire::http::Timeout=15", "-o", "Acquire::Retries=1")
COMMAND_TIMEOUT_S = 300


class NotToBeHad(Exception):
    """The packages cannot be had here; the message says why."""


def cached(name: str) -> Path:
    """Where what was unpacked under this name is, or will be."""
    return model_cache().parent / "tests" / name


def unpack(name: str, packages: Sequence[str], program: str) -> Path:
    """Unpack packages of these names, if they are not there yet; the program at this path of theirs (`usr/bin/...`), as
    a script beside their files that finds their libraries. Raises NotToBeHad."""
    target = cached(name)
    started = target / Path(program).name
    if started.is_file():
        return started
    if not (shutil.which("apt-get") and shutil.which("dpkg")):
        raise NotToBeHad("there is no apt-get to fetch it with")
    try:
        _unpack(target, packages, program)
    except (subprocess.SubprocessError, OSError) as error:
        raise NotToBeHad(f"its packages cannot be had ({error})") from error
    return started


def _unpack(target: Path, packages: Sequence[str], program: str) -> None:
    """Fill `target` with the packages' files and a script for the program."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        work = Path(name)
        _download(work, packages)
        _download(work, [library for package in work.glob("*.deb") for library in _missing_libraries(package)])
        for package in work.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(work / "files")], work)
        libraries = ":".join(
            str(target / folder.relative_to(work / "files")) for folder in (work / "files/usr/lib").glob("*-linux-*")
        )
        script = work / "files" / Path(program).name
        script.write_text(
            f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{target / program}" "$@"\n', encoding="utf-8"
        )
        script.chmod(0o755)
        # Another test process may do the same at the same time: the last one stays, complete.
        shutil.rmtree(target, ignore_errors=True)
        (work / "files").rename(target)


def _download(work: Path, packages: Sequence[str]) -> None:
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
