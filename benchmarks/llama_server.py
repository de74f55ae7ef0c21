"""llama.cpp's own server, built from the very source that the engine `llama_cpp` was built from, with the same flags.

The source package of llama-cpp-python brings all of llama.cpp. It is fetched by pip in the version that is installed
here, and built once for each kind of processor and each CMAKE_ARGS, as `tools/build_llama.py` builds the library.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from benchmarks.peer_environments import cache, environment
from benchmarks.report import note
from tools.build_llama import build_variables, processor, requirement

#: Nothing that computes: only what else would be built, fetched or linked.
_ONLY_THE_SERVER = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    "CMAKE_BUILD_WITH_INSTALL_RPATH": "ON",
    "CMAKE_INSTALL_RPATH": "$ORIGIN",
    "LLAMA_BUILD_APP": "OFF",
    "LLAMA_BUILD_EXAMPLES": "OFF",
    "LLAMA_BUILD_TESTS": "OFF",
    "LLAMA_BUILD_UI": "OFF",
    "LLAMA_CURL": "OFF",
    "LLAMA_OPENSSL": "OFF",
    "LLAMA_USE_PREBUILT_UI": "OFF",
}


def llama_server() -> Path | None:
    """The program; built on first use, which takes minutes. None when that fails."""
    version = importlib.metadata.version(requirement().name)
    parts = [version, processor(), *build_variables().values(), *_ONLY_THE_SERVER.values()]
    folder = cache() / f"llama-server-{hashlib.sha256(' '.join(parts).encode()).hexdigest()[:12]}"
    program = folder / "llama-server"
    if program.exists():
        return program
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time; who waited finds its program
        return program if program.exists() or _install(version, folder) else None


def _install(version: str, folder: Path) -> bool:
    """Build into the folder, which appears in one step. False when that fails."""
    for leftover in folder.parent.glob(f".{folder.name}-*"):  # of a build that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as work:
        note(f"building llama.cpp's server from the source of {requirement().name} {version}, once; this takes minutes")
        try:
            built = _build(version, Path(work))
        except subprocess.CalledProcessError as error:
            note(f"llama-server is left out: {error.cmd[0]} ended with {error.returncode}\n{error.stdout[-1500:]}")
            return False
        shutil.rmtree(folder, ignore_errors=True)
        built.rename(folder)
    return True


def _build(version: str, work: Path) -> Path:
    """Fetch, unpack, configure and build; returns the folder of programs and libraries."""
    wanted = f"{requirement().name}=={version}"
    options = ("--quiet", "--disable-pip-version-check", "--no-input", "--no-deps", "--no-binary", requirement().name)
    _run([sys.executable, "-m", "pip", "download", *options, "--dest", str(work), wanted])
    (archive,) = work.glob("*.tar.gz")
    with tarfile.open(archive) as source:
        source.extractall(work, filter="data")
    (unpacked,) = work.glob("*/vendor/llama.cpp")
    cmake, further = _cmake()
    variables = {**build_variables(), **further}
    # What llama-cpp-python decides itself comes last, so that it wins, as it does there.
    definitions = [f"-D{name}={value}" for name, value in _ONLY_THE_SERVER.items()]
    arguments = [*shlex.split(variables["CMAKE_ARGS"]), *definitions]
    _run([cmake, "-S", str(unpacked), "-B", str(work / "build"), *arguments], variables)
    jobs = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    _run([cmake, "--build", str(work / "build"), "--target", "llama-server", "-j", jobs], variables)
    return work / "build" / "bin"


def _cmake() -> tuple[str, dict[str, str]]:
    """The machine's, else one of an environment of its own; and the variables it needs."""
    found = shutil.which("cmake")
    if found and (shutil.which("make") or shutil.which("ninja")):
        return found, {} if shutil.which("make") else {"CMAKE_GENERATOR": "Ninja"}
    programs = environment("cmake")
    if programs is None:
        raise subprocess.CalledProcessError(127, ["cmake"], "cmake is neither on PATH nor can it be installed")
    return str(programs / "cmake"), {"CMAKE_GENERATOR": "Ninja", "PATH": f"{programs}:{os.environ['PATH']}"}


def _run(command: list[str], variables: dict[str, str] | None = None) -> None:
    subprocess.run(
        ["nice", "-n", "19", *command],
        env={**os.environ, **(variables or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=True,
    )
