"""Builds llama.cpp for this machine and installs it into the environment that runs this file (`make llama`).

The package index has llama-cpp-python as source only, and building it takes minutes. So the wheel is kept in a cache
folder, one for each kind of processor and each CMAKE_ARGS: a wheel built for one processor may not run on another.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import parse_wheel_filename

ROOT = Path(__file__).parents[1]
#: For this processor, without what genpool does not use.
CMAKE_ARGS = "-DGGML_BLAS=OFF -DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"
#: Some virtual machines name AMX among their instruction sets and die of it; and it multiplies a single row by another
#: kernel than many.
WITHOUT_AMX = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
COMPILERS = ("c++", "g++", "clang++")


def main() -> None:
    """Install what the extra `llama` asks for, from the cache if it is there."""
    wanted = requirement()
    if _installed(wanted):
        return
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build at a time; who waited finds its wheel
        wheel = _cached(folder, wanted) or _build(folder, wanted)
    _pip("install", "--quiet", str(wheel))


def requirement() -> Requirement:
    """What the extra `llama` asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (text,) = project["optional-dependencies"]["llama"]
    return Requirement(text)


def _installed(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(importlib.metadata.version(requirement.name))
    except importlib.metadata.PackageNotFoundError:
        return False


def _folder() -> Path:
    """Where wheels for this processor and these arguments are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    base = cache if cache.is_absolute() else Path.home() / ".cache"
    kind = " ".join([processor(), *build_variables().values()])
    return base / "genpool" / "wheels" / f"llama-{hashlib.sha256(kind.encode()).hexdigest()[:16]}"


def processor() -> str:
    """What tells this kind of processor from others: its instruction sets where the system names them."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines() if cpuinfo.is_file() else []
    flags = [line for line in lines if line.startswith(("flags", "Features"))]
    return " ".join([platform.system(), platform.machine(), platform.processor(), *flags[:1]])


def build_variables() -> dict[str, str]:
    """What every build of llama.cpp is told, the caller's own variables first."""
    variables = {"CMAKE_ARGS": os.environ.get("CMAKE_ARGS", CMAKE_ARGS)}
    if " amx" in processor():
        variables |= {name: f"{WITHOUT_AMX} {os.environ.get(name, '')}".strip() for name in ("CFLAGS", "CXXFLAGS")}
    return variables


def _cached(folder: Path, requirement: Requirement) -> Path | None:
    """The newest fitting wheel of the folder."""
    name = requirement.name.replace("-", "_")
    versions = {path: parse_wheel_filename(path.name)[1] for path in folder.glob(f"{name}-*.whl")}
    fitting = [path for path, version in versions.items() if requirement.specifier.contains(version)]
    return max(fitting, key=versions.__getitem__, default=None)


def _build(folder: Path, requirement: Requirement) -> Path:
    """Build the wheel; it appears in the folder in one step."""
    compiler = os.environ.get("CXX") or next(filter(shutil.which, COMPILERS), "")
    if not compiler or not shutil.which(compiler.split()[0]):
        sys.exit(
            "llama.cpp is built from source, and that needs a C and C++ compiler; none was found on PATH.\n"
            "On Debian: apt install g++ (cmake and ninja are fetched from the package index when they are not there)."
        )
    print(f"Building {requirement} for this machine, once; this takes 4 to 8 minutes on two cores.", flush=True)
    for leftover in folder.glob(".build-*"):  # of a build that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as part:
        # pip's own cache knows nothing of the arguments.
        options = ("--no-deps", "--no-cache-dir", "--wheel-dir", part)
        _pip("wheel", *options, str(requirement), env={**os.environ, **build_variables()})
        (built,) = Path(part).glob("*.whl")
        return built.replace(folder / built.name)


def _pip(*arguments: str, env: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    code = subprocess.run(command, env=env, check=False).returncode
    if code:
        sys.exit(f"pip could not {arguments[0]} llama.cpp (exit code {code}); what it said is above.")


if __name__ == "__main__":
    main()
